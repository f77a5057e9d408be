"""Rules on optimizers, accumulation and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules.rule import Hit, rule

__all__: list[str] = []


@rule(
    "loop-optimizer",
    "what-lightning-does-already",
    "Build the optimizer with fused=True, or leave foreach at its default.",
)
def _loop_optimizer(facts: Facts) -> Iterator[Hit]:
    cost = f"part of {facts.phases.get('optimizer', 0.0) * 1e3:.2f} ms a step in the optimizer (measured)"
    for each in facts.optimizers:
        if each.one_by_one:
            yield Hit(f"{each.name}(foreach=False) steps its parameters one by one", each.site, cost)
        elif facts.cuda and each.can_fuse:
            yield Hit(f"{each.name} without fused=True", each.site, cost, "info")


@rule("short-window", "exact-accumulation", "Use ExactAccumulation, or drop the last batches.")
def _short_window(facts: Facts) -> Iterator[Hit]:
    rest = facts.batches % facts.accumulate
    if rest > 0 and not facts.exact_windows:  # of infinitely many batches nothing is left, but NaN
        what = f"the last {rest} of {facts.batches} batches are divided by {facts.accumulate}"
        cost = f"the epoch's last step is {rest}/{facts.accumulate} of what it should be"
        yield Hit(what, None, cost)


@rule(
    "stepped-per-epoch",
    "cyclic-lr",
    "Return {'scheduler': ..., 'interval': 'step'} from configure_optimizers; cyclic_lr does it for CyclicLR.",
)
def _stepped_per_epoch(facts: Facts) -> Iterator[Hit]:
    for each in facts.schedulers * facts.automatic:
        if each.interval == "epoch" and each.length > facts.epochs:
            what = f"{each.name} is stepped once an epoch: {each.length} steps to {each.aim}, in {facts.epochs} epochs"
            yield Hit(what, each.site, "the schedule is not the one you wrote")
