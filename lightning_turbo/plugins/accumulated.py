"""Gradients in the middle of an accumulation window, for a checkpoint that loses none of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_turbo._compat import rank_zero_warn
from lightning_turbo.errors import TurboWarning
from lightning_turbo.optim.accumulation import gather_for_checkpoint, rank_and_size

__all__ = ["gather_gradients", "gradients_of_this_rank", "put_gradients"]


def gather_gradients(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Tensor]]]:
    """Return the gradients of every rank: rank, optimizer, index of the parameter; see ``gather_for_checkpoint``.

    Ranks differ in the middle of a window, because DDP averages only at its end.
    """
    return gather_for_checkpoint(
        [
            {str(i): p.grad.detach().cpu().clone() for i, p in enumerate(_params(optimizer)) if p.grad is not None}
            for optimizer in optimizers
        ]
    )


def gradients_of_this_rank(saved: list[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """Return what this rank goes on from; with another number of ranks, the mean over those that saved.

    Warns:
        TurboWarning: If the number of ranks is not the one that saved.
    """
    rank, size = rank_and_size()
    if len(saved) == size:
        return saved[rank]
    rank_zero_warn(
        f"The checkpoint was written in the middle of an accumulation window by {len(saved)} ranks; this run has "
        f"{size}. Each goes on from the mean of the gradients.",
        category=TurboWarning,
    )
    return [
        {i: torch.stack([rank[n][i] for rank in saved if i in rank[n]]).sum(0) / len(saved) for i in first}
        for n, first in enumerate(saved[0])
    ]


def put_gradients(optimizers: Sequence[Optimizer], gradients: list[dict[str, Tensor]], factor: float) -> None:
    """Put gradients back where ``gather_gradients`` took them from, times a factor."""
    for optimizer, own in zip(optimizers, gradients, strict=True):
        params = list(_params(optimizer))
        for index, gradient in own.items():
            param = params[int(index)]
            param.grad = gradient.to(param.device, param.dtype) * factor


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
