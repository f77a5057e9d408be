"""The rule on what would stop a CUDA graph of the step."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import Facts, Part
from lightning_turbo.doctor.rules.rule import Hit, rule

__all__: list[str] = []

CALLS = {"sync": "fetches a value", "moved": "copies from the CPU", "housekeeping": "waits for the device"}


@rule(
    "cuda-graph",
    "doctor",
    "Nothing to do without a graph. For one, keep values on the device and shapes the same: tensors in place of "
    "numbers, masks in place of branches, optimizers with capturable=True, no hooks in Python.",
)
def _cuda_graph(facts: Facts) -> Iterator[Hit]:
    # The calls that other rules name as waits stop a graph as well, on a CPU too, where they cost nothing.
    calls = (each for each in facts.seen.calls if each.kind in CALLS)
    stops = [Part(name=f"{each.name} {CALLS[each.kind]}", site=each.site) for each in calls]
    for each in (*stops, *facts.seen.graph):
        what = f"{each.name}, which would stop a CUDA graph of the step"
        yield Hit(what, each.site, "launches of kernels that a graph would spare", "info", each.name, cause="graph")
