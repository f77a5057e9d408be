"""Rules about what makes the host or the device wait in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules.rule import LAYER, Hit, hits_of_calls, rule

__all__: list[str] = []

COPYING = 0.01  # share of the step from which copying an array justifies a warning; a choice
FREE = "next to nothing on this CPU; on a GPU the host waits here for all queued work, if the tensor is there"

# A library that copies values to the host when the user's line calls it -> what the user can do.
REMEDIES = {
    "torch.distributions": "The distribution checks its arguments: make it with validate_args=False, or call "
    "torch.distributions.Distribution.set_default_validate_args(False) once.",
    "torchmetrics": "The metric checks its input: make an aggregator (MeanMetric and its like) with "
    "nan_strategy='disable', any other metric with validate_args=False.",
    "torch.utils.tensorboard": "Write to the log every so many steps only.",
    LAYER: "The layer does it by itself: nothing to change here, unless another layer can take its place.",
}


def _price(facts: Facts, hits: Iterator[Hit]) -> Iterator[Hit]:
    """On a CPU nothing waits and nothing is copied: the hits become info, without a cost."""
    for hit in hits:
        yield hit if facts.cuda else replace(hit, level="info", cost=FREE, seconds=0.0)


@rule(
    "host-sync",
    "doctor",
    "Keep values on the device: log tensors as they are, use torch.where or masks that keep the shape, and fetch "
    "numbers every so many steps only.",
)
def _host_sync(facts: Facts) -> Iterator[Hit]:
    does = "makes the host wait for the device" if facts.cuda else "fetches a value to the host"
    return _price(facts, hits_of_calls(facts, "sync", f"{{name}}{{within}} {does}, {{rate}}", remedies=REMEDIES))


@rule(
    "progress-bar-sync",
    "doctor",
    "Log with prog_bar=False, or with on_step=False, on_epoch=True, or every so many steps. Lightning converts it "
    'even when the bar is off, strategy="turbo" when it is shown.',
)
def _progress_bar_sync(facts: Facts) -> Iterator[Hit]:
    what = "self.log({name!r}, prog_bar=True) is turned into a number after the step, {rate}"
    cost = "one wait for the device a step (estimated)" if facts.cuda else FREE
    return (replace(hit, cause="bar") for hit in hits_of_calls(facts, "log", what, cost, "info"))


@rule(
    "made-on-host",
    "device-prefetch",
    "Make the tensor where it is used: torch.zeros(..., device=self.device), torch.full for a number, "
    "torch.zeros_like. Keep a list or an array that does not change as a buffer. Do not fetch what the device needs "
    "again.",
)
def _made_on_host(facts: Facts) -> Iterator[Hit]:
    return _price(facts, hits_of_calls(facts, "moved", "{name} copies from the CPU to the device, {rate}"))


@rule(
    "copied-array",
    "device-prefetch",
    "Use torch.as_tensor(array) or torch.from_numpy(array), which share the memory of the array.",
)
def _copied_array(facts: Facts) -> Iterator[Hit]:
    for hit in hits_of_calls(facts, "copied", "{name} copies the array, {rate}"):
        yield replace(hit, level="warning" if hit.seconds > COPYING * facts.step else "info")


@rule(
    "housekeeping",
    "doctor",
    "Remove the call from the step: torch reuses its memory by itself, and after the cache is emptied every step "
    "allocates again.",
)
def _housekeeping(facts: Facts) -> Iterator[Hit]:
    return hits_of_calls(facts, "housekeeping", "{name} is called, {rate}", "the host or the device waits for it")


@rule("prints", "doctor", "Log values with self.log, or print every so many steps only.")
def _prints(facts: Facts) -> Iterator[Hit]:
    cost = "a write in each step, and a wait for the device where a tensor is printed"
    return hits_of_calls(facts, "print", "{name} is called, {rate}", cost, "info")
