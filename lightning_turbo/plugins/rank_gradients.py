"""Gradients that DDP does not know of, because they were taken aside or are those of masters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_turbo.amp.collectives import on_dense
from lightning_turbo.amp.half_weights import HalfWeights
from lightning_turbo.optim.accumulation import mark_as_used

__all__ = ["RankGradients"]


class RankGradients:
    """Averages over the ranks of DDP what was gathered without synchronisation.

    Without it (all micro-batches of an accumulation but the last) gradients are gathered as they are, in float32;
    when those of the last one have been averaged over the ranks, so are the gathered ones.

    Args:
        ddp: The wrapped module.
        weights: Its half weights, if there are any.
    """

    def __init__(self, ddp: DistributedDataParallel, weights: HalfWeights | None) -> None:
        self.ddp = ddp
        self.weights = weights
        self.gathered = False
        """Whether there are gradients of this rank alone."""

    def go_on(self, parameters: Iterable[Tensor]) -> None:
        """Go on with gradients of this rank alone, from a checkpoint."""
        self.gathered = True
        mark_as_used(self.ddp, parameters)

    def before_backward(self, kept: dict[Tensor, Tensor | None] | None) -> None:
        """Put zeros where DDP expects a gradient, as the parameter was used since the last synchronisation.

        Args:
            kept: Gradients that were taken aside for this pass; ``None`` if the masters hold the gathered ones.
        """
        if not (self.gathered and self.ddp.find_unused_parameters and self.ddp.require_backward_grad_sync):
            return
        of_masters = {} if self.weights is None else self.weights.by_master()
        for param, gradient in (self._of_masters() if kept is None else kept).items():
            if gradient is not None:
                held = of_masters.get(param, param)
                held.grad = torch.zeros_like(held) if held.grad is None else held.grad

    def after_backward(self, kept: dict[Tensor, Tensor | None] | None) -> bool:
        """Average what was gathered if the pass was synchronised, and fold half gradients.

        Args:
            kept: As ``before_backward`` had it; changed in place.

        Returns:
            Whether it averaged.
        """
        averages = self.gathered and self.ddp.require_backward_grad_sync
        if not self.ddp.require_backward_grad_sync:
            self.gathered = True
        elif averages:
            self.gathered = False
            gradients = self._of_masters() if kept is None else kept
            self._average(gradients)
            if kept is None:
                for master, gradient in gradients.items():
                    master.grad = gradient
        if self.weights is not None:
            self.weights.fold_all()
        return averages

    def _of_masters(self) -> dict[Tensor, Tensor | None]:
        return {} if self.weights is None else {m: m.grad for m in self.weights.masters(trained=True)}

    def _average(self, gradients: dict[Tensor, Tensor | None]) -> None:
        """Average in place; a rank without a gradient counts as zero, and where no rank has one there is none."""
        wanted = [True] * len(gradients)
        if self.ddp.find_unused_parameters and gradients:
            device = next(iter(gradients)).device
            held = torch.tensor([g is not None for g in gradients.values()], dtype=torch.int32, device=device)
            torch.distributed.all_reduce(held)
            wanted = [count > 0 for count in held.tolist()]
        for (param, gradient), is_wanted in zip(list(gradients.items()), wanted, strict=True):
            if is_wanted:
                averaged = torch.zeros_like(param) if gradient is None else gradient
                on_dense(torch.distributed.all_reduce, averaged)
                gradients[param] = averaged.div_(torch.distributed.get_world_size())
