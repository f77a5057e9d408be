"""Callback that runs the steps of optimizers fused."""

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
    """Tell whether torch has a fused step for an optimizer, and it does not run already."""
    return _has_fused_step(optimizer) and not any(group.get("fused") for group in optimizer.param_groups)


def _has_fused_step(optimizer: Optimizer) -> bool:
    """Tell whether torch has a fused step for an optimizer: it has none for complex parameters."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return type(optimizer) in FUSED and not any(parameter.is_complex() for parameter in parameters)


def fuse(optimizer: Optimizer) -> None:
    """Switch an optimizer to its fused step, whose counts are on the device of the parameters."""
    # The steps read these from the groups; only the constructor looks at the arguments.
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device)


class FusedOptimizers(Callback):
    """Run the steps of Adam, AdamW, SGD and Adagrad fused, as ``fused=True`` in their constructors does.

    An optimizer with complex parameters keeps its step, because torch has no fused one for them.

    Warns:
        NoEffectWarning: If no optimizer has a fused step.

    Example:
        >>> from lightning_turbo import FusedOptimizers
        >>> callback = FusedOptimizers()
    """

    def __init__(self) -> None:
        check_binding("FusedOptimizers")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Switch the optimizers, whose states are restored by now."""
        for optimizer in filter(can_fuse, trainer.optimizers):
            fuse(optimizer)
        if not any(map(_has_fused_step, trainer.optimizers)):
            rank_zero_warn(
                "FusedOptimizers changes nothing here: no optimizer is an Adam, AdamW, SGD or Adagrad of torch with "
                "real parameters. Remove it.",
                category=NoEffectWarning,
            )
