"""Rules on learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.advice import Hit, rule
from lightning_turbo.doctor.facts import Facts

__all__ = ["before_optimizer", "cycled_beta", "moves_on_skip", "never_turns", "stepped_per_epoch"]


@rule(
    name="stepped-per-epoch",
    symptom="The learning rate hardly moves.",
    threshold="a schedule whose lengths are meant in steps with Lightning's interval 'epoch', and the run has fewer "
    "epochs than OneCycleLR needs to its end, or CyclicLR to its first turn",
    remedy="Return {'scheduler': ..., 'interval': 'step'} from configure_optimizers; cyclic_lr does it for CyclicLR.",
    card="cyclic-lr",
)
def stepped_per_epoch(facts: Facts) -> Iterator[Hit]:
    """A schedule made for steps that is stepped per epoch."""
    for scheduler in facts.schedulers:
        if not facts.automatic or scheduler.interval != "epoch" or scheduler.length is None or facts.epochs is None:
            continue
        if scheduler.length > facts.epochs:
            aim = "its end" if scheduler.turn is None else "its first turn"
            yield Hit(
                what=f"{scheduler.name} is stepped once an epoch: {scheduler.length} steps to {aim}, in a run of "
                f"{facts.epochs} epoch{'s' if facts.epochs != 1 else ''}",
                site=scheduler.site,
                cost="the schedule is not the one you wrote",
            )


@rule(
    name="never-turns",
    symptom="The cyclic learning rate only rises.",
    threshold="CyclicLR's first half cycle is longer than the steps that it takes in the run, one at each optimizer "
    "step or as often as configured; in manual optimization, as often as in the steps that were looked at",
    remedy="Choose step_size_up from the run's length; cyclic_lr takes it in epochs.",
    card="cyclic-lr",
)
def never_turns(facts: Facts) -> Iterator[Hit]:
    """``CyclicLR`` that never turns within the run."""
    for scheduler in facts.schedulers:
        if scheduler.turn is None or scheduler.steps is None:
            continue
        if scheduler.turn > scheduler.steps:
            yield Hit(
                what=f"{scheduler.name} turns after {scheduler.turn} steps, and takes {scheduler.steps} in the run",
                site=scheduler.site,
                cost="the schedule is not the one you wrote",
            )


@rule(
    name="cycled-beta",
    symptom="Adam behaves oddly under a cyclic learning rate.",
    threshold="CyclicLR with cycle_momentum=True over an optimizer with betas",
    remedy="CyclicLR(cycle_momentum=False); cyclic_lr chooses it for Adam.",
    card="cyclic-lr",
)
def cycled_beta(facts: Facts) -> Iterator[Hit]:
    """Adam's first beta is moved along."""
    for scheduler in facts.schedulers:
        if scheduler.cycles_beta:
            yield Hit(
                what=f"{scheduler.name} moves Adam's beta1 between 0.8 and 0.9 or as given",
                site=scheduler.site,
                cost="not the optimizer you chose",
            )


@rule(
    name="moves-on-skip",
    symptom="torch warns that lr_scheduler.step() came before optimizer.step(), or the schedule ends early.",
    threshold="the loss scaler skipped an optimizer step in the watched steps while a per-step schedule moved on",
    remedy="Use ApexAMP, whose schedule follows the steps that were taken.",
    card="apex-amp",
)
def moves_on_skip(facts: Facts) -> Iterator[Hit]:
    """The schedule moves although the step was skipped."""
    if facts.scheduled_skips:
        yield Hit(
            what=f"{facts.scheduled_skips} skipped optimizer steps moved the schedule all the same",
            site=facts.schedulers[0].site if facts.schedulers else None,
            cost="the schedule runs ahead of the optimizer by that many steps",
        )


@rule(
    name="before-optimizer",
    symptom="The first value of the schedule is never used.",
    threshold="in manual optimization, a scheduler's step() comes before its optimizer's step() in at least half of "
    "the watched steps",
    remedy="Step the optimizer first, then the scheduler.",
    card="cyclic-lr",
)
def before_optimizer(facts: Facts) -> Iterator[Hit]:
    """Scheduler and optimizer in the wrong order."""
    for call in facts.calls:
        if call.kind == "early schedule" and 2 * call.steps >= facts.watched:
            yield Hit(
                what=f"{call.name} comes before the optimizer's step",
                site=call.site,
                cost="the schedule is one step ahead",
            )
