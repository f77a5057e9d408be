"""Rules on what the step makes the host or the device wait for."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.advice import Hit, rule
from lightning_turbo.doctor.facts import Call, Facts

__all__ = ["array_copy", "host_sync", "housekeeping", "made_on_host", "progress_bar_sync", "round_trip"]


def _often(facts: Facts, call: Call) -> bool:
    """Whether a call came in at least half of the watched steps."""
    return 2 * call.steps >= facts.watched > 0


def _rate(facts: Facts, call: Call) -> str:
    rate = call.count / max(facts.watched, 1)
    if rate < 1:
        return f"in {call.steps} of {facts.watched} steps"
    return "once a step" if rate == 1 else f"{rate:g} times a step"


def _level(facts: Facts, call: Call) -> str:
    return "warning" if _often(facts, call) else "info"


def _cost(facts: Facts, call: Call) -> tuple[str, float]:
    seconds = call.seconds / max(facts.watched, 1)
    if not facts.cuda:
        return "next to nothing on this CPU; on a GPU the host waits here for all queued work", seconds
    return f"{seconds * 1e3:.2f} ms of host time a step (measured while watching)", seconds


def _moves(facts: Facts, kind: str, what: str) -> Iterator[Hit]:
    """One hit for each place with a copy of ``kind``; ``what`` may use its name."""
    for call in facts.calls:
        if call.kind == kind:
            cost, seconds = _cost(facts, call)
            yield Hit(
                level=_level(facts, call) if facts.cuda else "info",
                what=f"{what.format(name=call.name)}, {_rate(facts, call)}",
                site=call.site,
                cost=cost,
                seconds=seconds if facts.cuda else 0.0,
            )


@rule(
    name="host-sync",
    symptom="The GPU idles in short gaps; the step takes as long as its Python code.",
    threshold="a value is fetched to the host in at least half of the watched steps; info for fewer, and within "
    "torch's own layers",
    remedy="Keep values on the device: log tensors as they are, use torch.where or masks that keep the shape, "
    "and fetch numbers every so many steps only.",
    card="what-lightning-does-already",
)
def host_sync(facts: Facts) -> Iterator[Hit]:
    """Values fetched to the host within the step."""
    for call in facts.calls:
        if call.kind in ("sync", "layer sync"):
            cost, seconds = _cost(facts, call)
            unseen = facts.cuda and call.confirmed is False
            inside = call.kind == "layer sync"
            yield Hit(
                level="info" if unseen or inside else _level(facts, call),
                what=f"{call.name} fetches a value to the host{' within a layer of torch' if inside else ''}, "
                f"{_rate(facts, call)}{' (but sync debug mode saw no wait)' if unseen else ''}",
                site=call.site,
                cost=cost,
                seconds=seconds if facts.cuda else 0.0,
            )


@rule(
    name="progress-bar-sync",
    symptom="A metric in the progress bar: its value is turned into a Python number after every step.",
    threshold="`self.log(..., prog_bar=True)` per step in a watched step; always info, since a bar may be wanted",
    remedy="Log with prog_bar=False, or with on_step=False, on_epoch=True, or every so many steps; "
    "the conversion happens even when the bar is switched off.",
    card="what-lightning-does-already",
)
def progress_bar_sync(facts: Facts) -> Iterator[Hit]:
    """Metrics that the progress bar turns into numbers each step."""
    for call in facts.calls:
        if call.kind == "log":
            cost, _ = _cost(facts, call)
            yield Hit(
                level="info",
                what=f"self.log({call.name!r}, prog_bar=True) is turned into a number after the step, "
                f"{_rate(facts, call)}",
                site=call.site,
                cost=cost if not facts.cuda else "one wait for the device a step (estimated)",
            )


@rule(
    name="array-copy",
    symptom="Host time goes into copying arrays that are there already.",
    threshold="torch.tensor is called on an array or tensor in at least half of the watched steps; fewer is info",
    remedy="Use torch.as_tensor or torch.from_numpy, which share the memory, and tensor.detach().clone() where a "
    "copy is meant.",
    card="device-prefetch",
)
def array_copy(facts: Facts) -> Iterator[Hit]:
    """``torch.tensor`` of what is an array or a tensor already."""
    for call in facts.calls:
        if call.kind == "copy":
            seconds = call.seconds / max(facts.watched, 1)
            yield Hit(
                level=_level(facts, call),
                what=f"{call.name} copies it, {_rate(facts, call)}",
                site=call.site,
                cost=f"{seconds * 1e6:.0f} us a step (measured while watching)",
                seconds=seconds,
            )


@rule(
    name="made-on-host",
    symptom="Small copies from host to device in every step.",
    threshold="a tensor is made on the CPU and moved in at least half of the watched steps; info for fewer, and in "
    "a run on the CPU, where nothing is copied",
    remedy="Make it where it is used (device=self.device, or torch.zeros_like and its kin), or once, as a buffer.",
    card="device-prefetch",
)
def made_on_host(facts: Facts) -> Iterator[Hit]:
    """Tensors made on the CPU and moved each step."""
    return _moves(facts, "moved", "a tensor is made on the CPU and moved by {name}")


@rule(
    name="round-trip",
    symptom="Tensors leave the device and come back within one step.",
    threshold="a tensor fetched by .cpu() is sent back in at least half of the watched steps; info for fewer, and in "
    "a run on the CPU, where nothing is copied",
    remedy="Leave it on the device.",
    card="device-prefetch",
)
def round_trip(facts: Facts) -> Iterator[Hit]:
    """Tensors fetched to the host and sent back."""
    return _moves(facts, "round trip", "a tensor fetched to the host is sent back by {name}")


@rule(
    name="housekeeping",
    symptom="The allocator is emptied, garbage collected or the device synchronised in the step.",
    threshold="such a call in at least half of the watched steps; fewer is info",
    remedy="Take the call out of the step; torch reuses its memory by itself, and emptying the cache makes every "
    "step allocate anew.",
    card="what-lightning-does-already",
)
def housekeeping(facts: Facts) -> Iterator[Hit]:
    """``empty_cache``, ``gc.collect`` and ``synchronize`` in the step."""
    for call in facts.calls:
        if call.kind == "housekeeping":
            seconds = call.seconds / max(facts.watched, 1)
            yield Hit(
                level=_level(facts, call),
                what=f"{call.name} is called, {_rate(facts, call)}",
                site=call.site,
                cost=f"{seconds * 1e3:.2f} ms a step (measured while watching)",
                seconds=seconds,
            )
