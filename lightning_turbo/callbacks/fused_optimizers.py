"""Callback that fuses the steps of optimizers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_turbo._lightning import Callback, check_binding, rank_zero_warn
from lightning_turbo.errors import NoEffectWarning, TurboWarning

__all__ = ["FusedOptimizers", "can_fuse"]

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def can_fuse(optimizer: Optimizer) -> bool:
    """Return whether torch has a fused step for an optimizer that the optimizer does not use yet."""
    return _has_fused_step(optimizer) and not any(group.get("fused") for group in optimizer.param_groups)


def _has_fused_step(optimizer: Optimizer) -> bool:
    """Return whether torch has a fused step for an optimizer and all its parameters, which it has for real ones."""
    kind = type(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return (
        kind in FUSED
        and not any(parameter.is_complex() for parameter in parameters)
        and all(_runs_fused(kind, device) for device in {parameter.device for parameter in parameters})
    )


@functools.cache
def _runs_fused(kind: type[Optimizer], device: torch.device) -> bool:
    """Return whether torch runs the fused step of an optimizer on a device: before torch 2.10 CUDA has none of Adagrad.

    Only a step tells.
    """
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        kind([parameter], lr=0.1, fused=True).step()  # pyright: ignore[reportCallIssue]
    except RuntimeError:
        return False
    return True


def fuse(optimizer: Optimizer, sparse: frozenset[Tensor] | set[Tensor] = frozenset()) -> list[int]:
    """Switch an optimizer to its fused step, which keeps its step counts on the device of the parameters.

    Args:
        optimizer: An optimizer that can be fused.
        sparse: Parameters with sparse gradients. Their groups keep their step.

    Returns:
        The numbers of these groups.
    """
    kept = list[int]()
    # A step reads the options from the groups; only the constructor reads its arguments.
    for number, group in enumerate(optimizer.param_groups):
        if any(parameter in sparse for parameter in group["params"]):
            kept.append(number)
            continue
        group.update(fused=True, foreach=False)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(parameter.device)
    return kept


class FusedOptimizers(Callback):
    """Use the fused steps of Adam, AdamW, SGD and Adagrad, like ``fused=True`` in their constructors.

    An optimizer keeps its step if torch has no fused one for a parameter of it: complex parameters, and Adagrad on CUDA
    before torch 2.10. So does a parameter group with the weight of an ``Embedding(sparse=True)`` or
    ``EmbeddingBag(sparse=True)``. Other sparse gradients are not foreseen: torch raises an error in the first step.

    Warns:
        NoEffectWarning: If no optimizer has a fused step.
        TurboWarning: If a parameter group keeps its step because of sparse gradients.

    Example:
        >>> from lightning_turbo import FusedOptimizers
        >>> callback = FusedOptimizers()
    """

    def __init__(self) -> None:
        check_binding("FusedOptimizers")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Switch the optimizers, whose states have been restored by now."""
        sparse = {
            each.weight
            for each in pl_module.modules()
            if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse
        }
        for optimizer in filter(can_fuse, trainer.optimizers):
            if kept := fuse(optimizer, sparse):
                rank_zero_warn(
                    f"FusedOptimizers leaves the parameter groups {kept} of {type(optimizer).__name__} as they are: "
                    "torch has no fused step for sparse gradients. Give the weights of embeddings with sparse=True a "
                    "group of their own, so that the others are fused.",
                    category=TurboWarning,
                )
        if not any(map(_has_fused_step, trainer.optimizers)):
            rank_zero_warn(
                "FusedOptimizers has no effect: no optimizer is torch's Adam, AdamW, SGD or Adagrad with real "
                "parameters on a device for which torch has a fused step. Remove it.",
                category=NoEffectWarning,
            )
