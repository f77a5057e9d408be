"""Rules on optimizers, accumulation and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules.rule import Hit, hits_of_calls, rule

__all__: list[str] = []

NOT_YOURS = "the schedule is not the one you wrote"


@rule(
    "loop-optimizer",
    "what-lightning-does-already",
    "Build the optimizer with fused=True, or leave foreach at its default.",
)
def _loop_optimizer(facts: Facts) -> Iterator[Hit]:
    cost = f"part of {facts.phases.get('optimizer', 0.0) * 1e3:.2f} ms a step in the optimizer (measured)"
    for each in facts.optimizers:
        if each.foreach is False and not each.fused:
            yield Hit(f"{each.name}(foreach=False) steps {each.parameters} parameters one by one", each.site, cost)
        elif facts.cuda and each.can_fuse and not each.fused:
            yield Hit(f"{each.name} without fused=True", each.site, cost, "info")


@rule("gradients-kept", "gradients-to-none", "Leave set_to_none at its default, or use the GradToNone callback.")
def _gradients_kept(facts: Facts) -> Iterator[Hit]:
    cost = "one write over all gradients a step, and their memory during forward"
    return hits_of_calls(facts, "kept gradients", "{name} fills the gradients with zeros", cost, "warning")


@rule("short-window", "exact-accumulation", "Use ExactAccumulation, or drop the last batches.")
def _short_window(facts: Facts) -> Iterator[Hit]:
    rest = (facts.batches or 0) % facts.accumulate
    if rest and not facts.exact_windows:
        what = f"the last {rest} of {facts.batches} batches are divided by {facts.accumulate}"
        cost = f"the epoch's last step is {rest}/{facts.accumulate} of what it should be"
        yield Hit(what, facts.sites.get("accumulate_grad_batches"), cost)


@rule(
    "stepped-per-epoch",
    "cyclic-lr",
    "Return {'scheduler': ..., 'interval': 'step'} from configure_optimizers; cyclic_lr does it for CyclicLR.",
)
def _stepped_per_epoch(facts: Facts) -> Iterator[Hit]:
    for each in facts.schedulers if facts.automatic and facts.epochs is not None else ():
        if each.interval == "epoch" and each.length is not None and each.length > (facts.epochs or 0):
            aim = "its end" if each.turn is None else "its first turn"
            run = f"a run of {facts.epochs} epoch{'s' * (facts.epochs != 1)}"
            what = f"{each.name} is stepped once an epoch: {each.length} steps to {aim}, in {run}"
            yield Hit(what, each.site, NOT_YOURS)


@rule("never-turns", "cyclic-lr", "Choose step_size_up from the run's length; cyclic_lr takes it in epochs.")
def _never_turns(facts: Facts) -> Iterator[Hit]:
    for each in facts.schedulers:
        if each.turn is not None and each.steps is not None and each.turn > each.steps:
            what = f"{each.name} turns after {each.turn} steps, and takes {each.steps} in the run"
            yield Hit(what, each.site, NOT_YOURS)


@rule("cycled-beta", "cyclic-lr", "CyclicLR(cycle_momentum=False); cyclic_lr chooses it for Adam.")
def _cycled_beta(facts: Facts) -> Iterator[Hit]:
    for each in facts.schedulers:
        if each.cycles_beta:
            what = f"{each.name} moves Adam's beta1 between base_momentum and max_momentum"
            yield Hit(what, each.site, "not the optimizer you chose")
