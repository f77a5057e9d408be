"""Gradients in the middle of an accumulation window, for a checkpoint that loses none of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_turbo._distributed import gather_for_checkpoint, rank_and_size
from lightning_turbo._lightning import rank_zero_warn
from lightning_turbo.amp.engine import AmpEngine
from lightning_turbo.errors import TurboWarning

__all__ = ["Waiting", "open_window"]


def open_window(
    engine: AmpEngine, optimizers: Sequence[Optimizer], unstepped: Collection[Optimizer], *, scaled: bool
) -> dict[str, Any]:
    """Return what a checkpoint needs for gradients that wait for their step, a collective call with several ranks.

    Ranks differ in the middle of a window, because DDP averages only at its end.

    Args:
        engine: The run's.
        optimizers: All of them.
        unstepped: Those whose gradients wait.
        scaled: Whether the gradients are scaled still, so that nothing is known of overflows.

    Returns:
        The gradients by rank, optimizer and index of the parameter; and what was noted of them, by rank.
    """
    if engine.weights is not None:
        engine.weights.fold_all()
    own = [
        {str(i): p.grad.detach().cpu().clone() for i, p in enumerate(_params(optimizer)) if p.grad is not None}
        if optimizer in unstepped
        else {}
        for optimizer in optimizers
    ]
    ranks = gather_for_checkpoint((own, [] if scaled else engine.noted(optimizers)), "accumulated gradients")
    gradients, noted = map(list, zip(*ranks, strict=True))
    return {"accumulated_gradients": gradients} | ({} if scaled else {"noted": noted})


class Waiting:
    """What ``open_window`` returned, until the run goes on: Lightning clears gradients between restoring and running.

    Args:
        state: The plugin's, of a window.

    Warns:
        TurboWarning: If the number of ranks is not the one that saved.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._gradients = _of_this_rank(state["accumulated_gradients"])
        self._scale = state["loss_scaler0"]["loss_scale"]
        # An overflow of one rank is one of all when they are next averaged.
        self._noted = [any(of_ranks) for of_ranks in zip(*state.get("noted", []), strict=True)]

    def put_back(self, engine: AmpEngine, optimizers: Sequence[Optimizer], *, scaled: bool) -> Iterator[Optimizer]:
        """Put the gradients back where they were, at the scale of now, and yield the optimizers that have some."""
        factor = engine.scalers[0].loss_scale / self._scale if scaled else 1.0
        engine.note(optimizers, self._noted)
        for optimizer, gradients in zip(optimizers, self._gradients, strict=True):
            params = list(_params(optimizer))
            for index, gradient in gradients.items():
                param = params[int(index)]
                param.grad = gradient.to(param.device, param.dtype) * factor
            if gradients:
                yield optimizer


def _of_this_rank(saved: list[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """Return what this rank goes on from; with another number of ranks, the mean over those that saved."""
    rank, size = rank_and_size()
    if len(saved) == size:
        return saved[rank]
    rank_zero_warn(
        f"The checkpoint was written in the middle of an accumulation window by {len(saved)} ranks; this run has "
        f"{size}. Each goes on from the mean of the gradients.",
        category=TurboWarning,
    )
    return [
        {
            i: torch.stack([rank[i] for rank in ranks if i in rank]).sum(0) / len(ranks)
            for i in dict.fromkeys(i for rank in ranks for i in rank)
        }
        for ranks in zip(*saved, strict=True)
    ]


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
