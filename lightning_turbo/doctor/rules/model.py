"""Rules about the model, what it retains, and debugging switches that were left on."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules.rule import Hit, hits_of_calls, rule

__all__: list[str] = []


@rule(
    "retained-graph",
    "doctor",
    "Keep loss.detach(), which has no graph, or let self.log(..., on_epoch=True) average it.",
)
def _retained_graph(facts: Facts) -> Iterator[Hit]:
    for kept in facts.seen.retained:
        more = ", more with every step" if kept.growing else ""
        what = f"{kept.name} keeps tensors with their graph after the step{more}"
        cost = "the memory of a graph for each step" if kept.growing else "the memory of one graph"
        yield Hit(what, kept.site, cost, "warning" if kept.growing else "info", kept.name, str(kept.growing))


@rule(
    "bias-before-norm",
    "no-bias-before-norm",
    "Build the layers with bias=False, or call lightning_turbo.drop_bias_before_norm.",
)
def _bias_before_norm(facts: Facts) -> Iterator[Hit]:
    cost = "one addition, one sum in backward and one optimizer entry a layer for nothing (estimated)"
    for layer in facts.seen.biases:
        what = f"{layer.name} has a bias, which the norm behind it cancels"
        yield Hit(what, layer.site, cost, "info", layer.name, cause="bias")


@rule(
    "anomaly-mode",
    "doctor",
    "Switch it off: Trainer(detect_anomaly=False), no torch.autograd.set_detect_anomaly(True). It is a tool for "
    "finding a NaN.",
)
def _anomaly_mode(facts: Facts) -> Iterator[Hit]:
    cost = "each operation records a stack trace and each gradient is checked for NaN, with a host sync"
    # Switched on for the run, in the Trainer or by a call, or inside the step.
    if facts.seen.anomaly:
        yield Hit("autograd's anomaly detection is on", facts.seen.anomaly_site, cost)
    yield from hits_of_calls(facts, "anomaly", "{name} is entered in the step", cost, "warning")
