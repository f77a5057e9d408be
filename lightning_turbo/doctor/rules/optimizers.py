"""Rules on optimizers and gradients."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.advice import Hit, rule
from lightning_turbo.doctor.facts import Facts

__all__ = ["gradients_kept", "loop_optimizer", "short_window", "unused_parameters"]


@rule(
    name="loop-optimizer",
    symptom="The optimizer's step takes a visible part of the time, with one small kernel for each parameter.",
    threshold="foreach=False without fused=True; info on CUDA where fused=True is possible and not used",
    remedy="Build the optimizer with fused=True, or leave foreach at its default.",
    card="what-lightning-does-already",
)
def loop_optimizer(facts: Facts) -> Iterator[Hit]:
    """Optimizers that walk through the parameters one by one."""
    seconds = facts.phases.get("optimizer", 0.0)
    for optimizer in facts.optimizers:
        cost = f"part of {seconds * 1e3:.2f} ms a step in the optimizer (measured)"
        if optimizer.foreach is False and not optimizer.fused:
            what = f"{optimizer.name}(foreach=False) steps {optimizer.parameters} parameters one by one"
            yield Hit(what=what, site=optimizer.site, cost=cost)
        elif facts.cuda and optimizer.can_fuse and not optimizer.fused:
            yield Hit(level="info", what=f"{optimizer.name} without fused=True", site=optimizer.site, cost=cost)


@rule(
    name="gradients-kept",
    symptom="Gradients are filled with zeros each step and stay in memory.",
    threshold="zero_grad(set_to_none=False) in a watched step",
    remedy="Leave set_to_none at its default, or use the GradToNone callback.",
    card="gradients-to-none",
)
def gradients_kept(facts: Facts) -> Iterator[Hit]:
    """``zero_grad(set_to_none=False)``."""
    for call in facts.calls:
        if call.kind == "kept gradients":
            yield Hit(
                what=f"{call.name} fills the gradients with zeros",
                site=call.site,
                cost="one write over all gradients a step, and their memory during forward",
            )


@rule(
    name="unused-parameters",
    symptom="DDP stops with 'Expected to have finished reduction', or needs find_unused_parameters.",
    threshold="a parameter that requires a gradient got none in any watched step; warning with several ranks, info "
    "with one",
    remedy="Use it, remove it, or freeze it with requires_grad_(False).",
    card="what-lightning-does-already",
)
def unused_parameters(facts: Facts) -> Iterator[Hit]:
    """Parameters that never get a gradient."""
    for unused in facts.unused:
        yield Hit(
            level="warning" if facts.world_size > 1 else "info",
            what=f"{unused.name} never got a gradient",
            site=unused.site,
            cost="under DDP a search through the graph each step; else its memory",
        )


@rule(
    name="short-window",
    symptom="With gradient accumulation, the last step of each epoch is too small.",
    threshold="accumulate_grad_batches does not divide the epoch's batches, and nothing weighs the last window",
    remedy="Use ExactAccumulation, or drop the last batches.",
    card="exact-accumulation",
)
def short_window(facts: Facts) -> Iterator[Hit]:
    """The last, shorter window is divided by the full count."""
    if facts.accumulate > 1 and facts.batches and facts.batches % facts.accumulate and not facts.exact_windows:
        rest = facts.batches % facts.accumulate
        yield Hit(
            what=f"the last {rest} of {facts.batches} batches are divided by {facts.accumulate}",
            site=facts.sites.get("accumulate_grad_batches"),
            cost=f"the epoch's last step is {rest}/{facts.accumulate} of what it should be",
        )
