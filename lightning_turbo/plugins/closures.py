"""Optimizers that run the forward and backward pass several times a step, which not every level can do."""

from __future__ import annotations

from torch.optim import LBFGS, Optimizer

from lightning_turbo._compat import MisconfigurationException
from lightning_turbo.amp.engine import AmpEngine

__all__ = ["refuse_many_closures"]


def refuse_many_closures(optimizer: Optimizer, engine: AmpEngine, *, automatic: bool) -> None:
    """Refuse LBFGS and SAM where the loss scale or the masters would not follow them.

    Args:
        optimizer: Any optimizer.
        engine: With the level that it shall train at.
        automatic: Whether Lightning steps it, not the user.

    Raises:
        MisconfigurationException: If its step runs the closure several times while there is a loss scale or there
            are masters, or if an overflow could not be skipped.
    """
    two_steps = hasattr(optimizer, "first_step")  # SAM and its kin
    many = isinstance(optimizer, LBFGS) or (two_steps and automatic)
    what = None
    if many and (engine.scales or engine.has_masters):
        instead = "step by first_step and second_step in manual optimization" if two_steps else "another optimizer"
        what = f"runs the closure several times a step; accepted is one that steps once. Take O0, or {instead}"
    elif two_steps and engine.is_dynamic:
        what = (
            "steps in two halves, between which an overflow cannot be skipped; accepted is a fixed loss scale. Pass "
            "dtype=torch.bfloat16 or loss_scale=128.0"
        )
    if what is not None:
        level = engine.properties.opt_level
        raise MisconfigurationException(f"ApexAMP({level!r}) was given {type(optimizer).__name__}, which {what}.")
