"""Rules on graphs and tensors that outlive their step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules.rule import Hit, hits_of_calls, rule

__all__: list[str] = []

GROWTH = 2**20


@rule(
    "retained-graph",
    "what-lightning-does-already",
    "Keep loss.detach(), which has no graph, or let self.log(..., on_epoch=True) average it.",
)
def _retained_graph(facts: Facts) -> Iterator[Hit]:
    for kept in facts.retained:
        what = f"{kept.name} keeps tensors with their graph after the step{', more with every step' * kept.growing}"
        cost = "the memory of a graph for each step kept" if kept.growing else "the memory of one graph"
        yield Hit(what, kept.site, cost, "warning" if kept.growing else "info", kept.name, str(kept.growing))


@rule(
    "retain-graph",
    "what-lightning-does-already",
    "Drop retain_graph=True, at least from the last backward of the step.",
)
def _retain_graph(facts: Facts) -> Iterator[Hit]:
    cost = "the activations stay in memory until the tensors go"
    last = "{name} with retain_graph=True, and no backward follows that would need it"
    yield from hits_of_calls(facts, "last retain", last, cost)
    yield from hits_of_calls(facts, "retain", "{name} with retain_graph=True", cost, "info")


@rule(
    "memory-growth",
    "what-lightning-does-already",
    "Look for tensors that are kept over steps: lists of losses or outputs, and hidden states that are not detached.",
)
def _memory_growth(facts: Facts) -> Iterator[Hit]:
    growth = [after - before for before, after in pairwise(facts.memory)]
    if len(growth) >= 4 and min(growth) >= GROWTH:
        cost = f"{sum(growth) / len(growth) / 2**20:.1f} MiB a step (measured)"
        yield Hit(f"CUDA memory in use grew in each of {len(growth)} steps", None, cost)
