"""Modules and optimizers that a level cannot serve."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_turbo._lightning import LightningModule, MisconfigurationException
from lightning_turbo.amp.engine import AmpEngine
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.amp.model_casts import first_tensor_of
from lightning_turbo.errors import AmpUsageError

__all__ = ["refuse_half_module", "refuse_loop_by_hand", "refuse_many_closures", "refuse_strangers"]


def refuse_half_module(module: nn.Module, opt_level: str) -> None:
    """Refuse a module that has half weights before a level has made them.

    Raises:
        AmpUsageError: If it has.
    """
    half = first_tensor_of(module, HALF_DTYPES)
    if half is not None:
        raise AmpUsageError(
            f"ApexAMP({opt_level!r}) was given a module whose {half!r} is half precision already; accepted is float32. "
            "Do not call .half() on it or create it under half precision: the level decides what becomes half."
        )


def refuse_loop_by_hand(model: Any) -> None:
    """Refuse to run the backward pass of what no Trainer trains.

    Raises:
        AmpUsageError: If ``model`` is no LightningModule.
    """
    if not isinstance(model, LightningModule):
        raise AmpUsageError(
            f"ApexAMP was given a {type(model).__name__} outside of a Trainer; accepted is a LightningModule that one "
            "trains. In a loop by hand, with Fabric too, take lightning_turbo.amp."
        )


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


def refuse_strangers(engine: AmpEngine) -> Any:
    """Refuse from now on the steps of optimizers that would train nothing.

    They hold half weights, whose gradients go to masters; or masters, and step past Lightning, so that half weights do
    not follow.

    Args:
        engine: With the weights in question.

    Returns:
        A handle whose ``remove`` ends it.
    """

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        weights, name = engine.weights, type(optimizer).__name__
        if weights is not None and weights.holds_masters_of(optimizer):
            raise MisconfigurationException(
                f"ApexAMP({engine.properties.opt_level!r}) met {name}, which Lightning was not "
                "given, with half precision weights: it would train nothing. Accepted are optimizers that "
                "configure_optimizers returns; get them by self.optimizers(). Or take O0 or O1."
            )
        if weights is not None and not weights.following and weights.pairs(optimizer):
            raise MisconfigurationException(
                f"ApexAMP({engine.properties.opt_level!r}) met a step of {name} past Lightning, which the model's half "
                "weights would not follow. Accepted is the step of what self.optimizers() returns, without "
                "use_pl_optimizer=False. Or take O0 or O1."
            )

    return register_optimizer_step_pre_hook(look)
