"""Gradients that wait for their step, in a checkpoint that was written in the middle of an accumulation window.

``ApexAMP`` saves and restores them in every run that it is part of, ``ExactAccumulation`` in all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_turbo._distributed import rank_and_size
from lightning_turbo._lightning import rank_zero_warn
from lightning_turbo.amp.engine import params_of
from lightning_turbo.errors import TurboWarning

__all__ = ["collect", "entry_of_this_rank", "owns_pending_gradients", "put_back"]

Gradients = list[dict[str, Tensor]]
"""For each optimizer its gradients, by the index of their parameter."""


def owns_pending_gradients(plugin: Any) -> bool:
    """Whether a precision plugin saves and restores gradients that wait for their step."""
    return bool(getattr(plugin, "owns_pending_gradients", False))


def collect(optimizers: Sequence[Optimizer]) -> Gradients:
    """Return copies of the gradients on the host."""
    return [
        {str(i): p.grad.detach().cpu().clone() for i, p in enumerate(params_of(o)) if p.grad is not None}
        for o in optimizers
    ]


def entry_of_this_rank(saved: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return what this rank saved; ``None``, with a warning, if the run has other ranks than the one that saved.

    Gradients of a window differ between ranks, and each rank continues with data of its own: they have no meaning for
    another number of ranks.

    Args:
        saved: An entry for each rank.
        sizes: How many parameters each optimizer of this run has.

    Warns:
        TurboWarning: In that case.
    """
    rank, ranks = rank_and_size()
    if len(saved) == ranks and _fits(saved[rank], sizes):
        return saved[rank]
    rank_zero_warn(
        f"The checkpoint was written in the middle of an accumulation window by a run of {len(saved)} rank(s); this "
        f"run has {ranks}, or other parameters. The gradients of that window are lost: it continues with the batches "
        "that are left. Continue with the same ranks and parameters, or from a checkpoint of a finished step.",
        category=TurboWarning,
    )
    return None


def _fits(gradients: Gradients, sizes: Sequence[int]) -> bool:
    return len(gradients) == len(sizes) and all(
        int(index) < size for own, size in zip(gradients, sizes, strict=True) for index in own
    )


def put_back(optimizers: Sequence[Optimizer], gradients: Gradients, factors: Sequence[float], model: Any) -> None:
    """Put gradients back where they were.

    Args:
        optimizers: As many as there are entries in ``gradients``.
        gradients: What ``collect`` returned.
        factors: For each optimizer by what its gradients are multiplied: the loss scale may be another one now.
        model: What wraps the module; a ``DistributedDataParallel`` is told that the parameters have been used.
    """
    for optimizer, own, factor in zip(optimizers, gradients, factors, strict=True):
        params = list(params_of(optimizer))
        for index, gradient in own.items():
            param = params[int(index)]
            param.grad = gradient.to(param.device, param.dtype) * factor
        _mark_as_used(model, params)


def _mark_as_used(model: Any, parameters: Iterable[Tensor]) -> None:
    """Have a DistributedDataParallel average gradients that it did not see come, as those from a checkpoint.

    With ``find_unused_parameters`` it leaves out parameters that no backward pass has used since it averaged last.
    """
    if isinstance(model, DistributedDataParallel) and model.find_unused_parameters:
        used = [p for p in parameters if p.requires_grad and _has_dense_gradient(p)]
        torch.autograd.backward(used, [torch.zeros_like(p) for p in used])


def _has_dense_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.layout is torch.strided
