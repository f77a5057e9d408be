"""Callback that makes gradient accumulation equal to one large batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_turbo._checks import expect
from lightning_turbo._lightning import (
    Callback,
    GradientAccumulationScheduler,
    LightningModule,
    MisconfigurationException,
    Trainer,
    check_binding,
    rank_zero_warn,
)
from lightning_turbo._trainer import warn_of_open_window
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.optim.accumulation import AccumulationWindow, checked_weight, scale_gradients

__all__ = ["ExactAccumulation"]


class ExactAccumulation(Callback):
    """Make ``accumulate_grad_batches`` equal to one large batch, in the last window of an epoch too.

    Lightning divides every loss by ``accumulate_grad_batches``, so a shorter last window gets too small a gradient.
    This callback divides each window by its own length or, with ``weight``, by its own sum of weights over all ranks.
    The result is the mean over samples or tokens, whatever the size of each batch.

    Args:
        weight: ``batch -> number`` of samples or tokens behind the mean loss of a batch, not negative, as a Python
            number or a tensor with one element (which is not copied to the host). ``None`` weighs all batches equally.

    Raises:
        TypeError: If ``weight`` is not callable or does not return a number.
        ValueError: If ``weight`` returns a negative or non-finite number.
        MisconfigurationException: In ``setup``, with manual optimization, a second ExactAccumulation, or a strategy
            that accumulates by itself; at the start of training, with LBFGS.

    Warns:
        NoEffectWarning: If every window is full, so that nothing needs to be corrected.
        TurboWarning: If a run resumes from a checkpoint saved inside a window.

    Note:
        Gradients are corrected after unscaling and before clipping, and before the module's own
        ``on_before_optimizer_step``. With ``weight`` and several ranks, one number is summed over the ranks at every
        optimizer step. A checkpoint holds no gradients: a run that resumes from one saved inside a window treats the
        remaining batches as a window of their own.

    Example:
        >>> from lightning_turbo import ExactAccumulation
        >>> callback = ExactAccumulation(weight=len)

    Source: Lightning's issue 19987 describes the gap.
    """

    warns_of_open_window = True

    def __init__(self, weight: Callable[[Any], Any] | None = None) -> None:
        check_binding("ExactAccumulation")
        valid = weight is None or callable(weight)
        expect(valid, "ExactAccumulation(weight)", weight, "a function from a batch to a number, or None", TypeError)
        self.weight = weight
        self._window = AccumulationWindow()
        self._batch_weight: float | Tensor | None = None
        self._reference_weight: float | None = None
        self._checked = False

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Raise an error if something else accumulates gradients."""
        if stage != "fit":
            return
        if reason := self._reason_to_refuse(trainer, pl_module):
            raise MisconfigurationException(f"ExactAccumulation: {reason}.")

    def _reason_to_refuse(self, trainer: Any, pl_module: LightningModule) -> str:
        if not pl_module.automatic_optimization:
            return "manual optimization divides its losses itself. Remove the callback"
        if trainer.strategy.handles_gradient_accumulation:
            return f"{type(trainer.strategy).__name__} accumulates too. Remove the callback"
        if sum(isinstance(callback, ExactAccumulation) for callback in trainer.callbacks) > 1:
            return "the Trainer has several of these callbacks, and each would correct the gradients. Keep one"
        return ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with an empty window."""
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise MisconfigurationException(
                "ExactAccumulation: expected an optimizer that runs each batch once per step, got LBFGS, which runs it "
                "several times. Remove the callback or use another optimizer."
            )
        self._checked = False
        # The reference weight may come from a checkpoint, so that a resumed run scales its losses as before.
        self._window = AccumulationWindow(self._reference_weight or 1.0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a new window when Lightning does, and weigh the batch."""
        # Checked at the first batch, because by then a scheduler has set the accumulation of the epoch.
        if not self._checked:
            self._checked = True
            self._warn_if_idle(trainer)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._window.reset()
        if self.weight is not None:
            self._batch_weight = checked_weight(self.weight(batch))
            if self._reference_weight is None:
                self._reference_weight = trainer.strategy.broadcast(_usual_weight(self._batch_weight))
                self._window.reference_weight = self._reference_weight

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Add the batch to the window."""
        # Not in training_step: this loss is the one that Lightning divides and a precision plugin scales, and a batch
        # without a loss never arrives here.
        self._window.add(loss, self._batch_weight)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Correct the gradients of the window."""
        window = self._window
        total = self._window.total
        # Every batch of the window has returned None.
        if window.count == 0:
            return
        # No rank returns early alone: with several ranks, Lightning raises an error for a step without a loss.
        if total is not None and trainer.world_size > 1:
            total = _sum_over_ranks(trainer.strategy, total)
        factor = window.factor(trainer.accumulate_grad_batches, total, trainer.world_size)
        if isinstance(factor, Tensor) or factor != 1.0:
            scale_gradients((p for group in optimizer.param_groups for p in group["params"]), factor)
        window.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the typical weight of a batch."""
        return {"reference_weight": self._reference_weight}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the typical weight of a batch.

        Args:
            state_dict: A result of ``state_dict``.
        """
        self._reference_weight = state_dict["reference_weight"]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Warn if the checkpoint was saved inside a window."""
        warn_of_open_window(trainer, checkpoint, self)

    def _is_even(self, length: int, batches: float, ranks: int) -> bool:
        """Return whether every window has full length and every batch full weight."""
        if self.weight is not None:
            return length == 1 and ranks == 1
        return length == 1 or (math.isfinite(batches) and batches % length == 0)

    def _warn_if_idle(self, trainer: Any) -> None:
        length = trainer.accumulate_grad_batches
        batches = trainer.num_training_batches
        changing = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
        if not changing and self._is_even(length, batches, trainer.world_size):
            rank_zero_warn(
                f"ExactAccumulation has no effect: with accumulate_grad_batches={length}, {batches} batches per epoch "
                f"and {trainer.world_size} rank(s), every window is full. Remove it, or pass weight.",
                category=NoEffectWarning,
            )


def _sum_over_ranks(strategy: Any, total: float | Tensor) -> Tensor:
    device = strategy.root_device
    wide = torch.float32 if device.type == "mps" else torch.float64
    if not isinstance(total, Tensor):
        total = torch.full((), total, dtype=wide, device=device)  # filled on the device: a copy would synchronize
    return strategy.reduce(total.to(device, wide), reduce_op="sum")


def _usual_weight(weight: float | Tensor) -> float:
    """Return the typical weight of a batch, derived from the first one."""
    value = float(weight)
    return value if math.isfinite(value) and value > 0 else 1.0
