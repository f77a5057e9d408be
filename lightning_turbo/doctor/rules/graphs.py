"""Rules on graphs that outlive their step."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.advice import Hit, rule
from lightning_turbo.doctor.facts import Facts

__all__ = ["memory_growth", "retain_graph", "retained_graph"]

GROWTH = 2**20


@rule(
    name="retained-graph",
    symptom="Memory grows from step to step, until it runs out.",
    threshold="an attribute holds tensors with a graph after the step; info while they do not grow in number or length",
    remedy="Keep loss.detach(), which has no graph, or let self.log(..., on_epoch=True) average it.",
    card="what-lightning-does-already",
)
def retained_graph(facts: Facts) -> Iterator[Hit]:
    """Attributes that keep losses, outputs or metrics with their graph."""
    for kept in facts.retained:
        yield Hit(
            level="warning" if kept.growing else "info",
            what=f"{kept.name} keeps tensors with their graph after the step"
            + (", more with every step" if kept.growing else ""),
            site=kept.site,
            cost="the memory of a graph for each step kept" if kept.growing else "the memory of one graph",
        )


@rule(
    name="retain-graph",
    symptom="Memory stays high after backward.",
    threshold="the step's last backward has retain_graph=True in at least half of the watched steps; info where "
    "another backward follows",
    remedy="Drop retain_graph=True, at least from the last backward of the step.",
    card="what-lightning-does-already",
)
def retain_graph(facts: Facts) -> Iterator[Hit]:
    """``retain_graph=True`` where nothing needs the graph any more."""
    for call in facts.calls:
        if call.kind in ("last retain", "retain"):
            last = call.kind == "last retain" and 2 * call.steps >= facts.watched
            yield Hit(
                level="warning" if last else "info",
                what=f"{call.name} with retain_graph=True"
                + (", and no backward follows that would need it" if last else ""),
                site=call.site,
                cost="the activations stay in memory until the tensors go",
            )


@rule(
    name="memory-growth",
    symptom="Memory grows from step to step, until it runs out.",
    threshold="CUDA memory in use grows by 1 MiB or more in each of at least four steps",
    remedy="Look for tensors that are kept over steps: lists of losses or outputs, and hidden states that are "
    "not detached.",
    card="what-lightning-does-already",
)
def memory_growth(facts: Facts) -> Iterator[Hit]:
    """Memory that grows with every step."""
    growth = [after - before for before, after in zip(facts.memory, facts.memory[1:], strict=False)]
    if len(growth) >= 4 and min(growth) >= GROWTH:
        mean = sum(growth) / len(growth)
        yield Hit(
            what=f"CUDA memory in use grew in each of {len(growth)} steps",
            cost=f"{mean / 2**20:.1f} MiB a step (measured)",
        )
