"""Callback that fuses the steps of optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_turbo._lightning import Callback, check_binding, rank_zero_warn
from lightning_turbo.errors import NoEffectWarning

__all__ = ["FusedOptimizers", "can_fuse"]

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def can_fuse(optimizer: Optimizer) -> bool:
    """Return whether torch has a fused step for an optimizer that the optimizer does not use yet."""
    return _has_fused_step(optimizer) and not any(group.get("fused") for group in optimizer.param_groups)


def _has_fused_step(optimizer: Optimizer) -> bool:
    """Return whether torch has a fused step for an optimizer; it has none for complex parameters."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return type(optimizer) in FUSED and not any(parameter.is_complex() for parameter in parameters)


def fuse(optimizer: Optimizer) -> None:
    """Switch an optimizer to its fused step, which keeps its step counts on the device of the parameters."""
    # A step reads the options from the groups; only the constructor reads its arguments.
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device)


class FusedOptimizers(Callback):
    """Use the fused steps of Adam, AdamW, SGD and Adagrad, like ``fused=True`` in their constructors.

    An optimizer with complex parameters keeps its step, because torch has no fused step for them.

    Warns:
        NoEffectWarning: If no optimizer has a fused step.

    Example:
        >>> from lightning_turbo import FusedOptimizers
        >>> callback = FusedOptimizers()
    """

    def __init__(self) -> None:
        check_binding("FusedOptimizers")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Switch the optimizers, whose states have been restored by now."""
        for optimizer in filter(can_fuse, trainer.optimizers):
            fuse(optimizer)
        if not any(map(_has_fused_step, trainer.optimizers)):
            rank_zero_warn(
                "FusedOptimizers has no effect: no optimizer is torch's Adam, AdamW, SGD or Adagrad with real "
                "parameters. Remove it.",
                category=NoEffectWarning,
            )
