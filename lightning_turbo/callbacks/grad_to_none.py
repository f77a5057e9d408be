"""Callback that releases gradients right after the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_turbo._lightning import (
    Callback,
    LightningModule,
    MisconfigurationException,
    Trainer,
    check_binding,
    is_overridden,
    rank_zero_warn,
)
from lightning_turbo._trainer import callbacks_named
from lightning_turbo.errors import NoEffectWarning

__all__ = ["GradToNone", "no_effect_reason", "zero_grad_after_steps"]


class GradToNone(Callback):
    """Release gradients right after ``optimizer.step()`` instead of just before the next backward.

    Lightning sets gradients to ``None`` between forward and backward, so that they occupy memory during validation and
    the next forward pass. With this callback, activations can use that memory. The results do not change, also with
    accumulation and clipping.

    Raises:
        MisconfigurationException: In ``setup``, if the strategy clears gradients itself.

    Warns:
        NoEffectWarning: If gradients are views of DDP's buckets, ``StochasticWeightAveraging`` reads them again, the
            module decides when to clear them (manual optimization, ``optimizer_zero_grad``), or an optimizer runs no
            hooks.

    Note:
        Hooks after the step, such as ``on_train_batch_end`` and ``on_before_zero_grad``, see no gradients: read them in
        ``on_before_optimizer_step``.

    Example:
        >>> from lightning_turbo import GradToNone
        >>> callback = GradToNone()

    Source: PyTorch Performance Tuning Guide, set_to_none.
    """

    def __init__(self) -> None:
        check_binding("GradToNone")
        self._handles: list[RemovableHandle] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy that keeps the gradients itself."""
        if stage == "fit" and trainer.strategy.handles_gradient_accumulation:
            raise MisconfigurationException(
                f"GradToNone: {type(trainer.strategy).__name__} keeps and clears gradients itself. Remove the callback."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the hook to every optimizer."""
        self._remove()
        # Not in setup: DDP has wrapped the module by now, and says whether gradients are views of its buckets.
        if reason := no_effect_reason(trainer):
            rank_zero_warn(f"GradToNone has no effect: {reason}. Remove it.", category=NoEffectWarning)
        else:
            self._handles = zero_grad_after_steps(trainer.optimizers)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hooks."""
        self._remove()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks."""
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def zero_grad_after_steps(optimizers: Iterable[Optimizer]) -> list[RemovableHandle]:
    """Let optimizers release their gradients after each of their steps; returns the handles that end it."""
    return [each.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad()) for each in optimizers]


def no_effect_reason(trainer: Any) -> str:
    """Return why the gradients of a Trainer's optimizers must not or need not be released, or an empty text."""
    if getattr(trainer.model, "gradient_as_bucket_view", False):
        return "gradients are views of DDP's buckets, which stay in memory"
    averaging = callbacks_named("StochasticWeightAveraging")
    if any(isinstance(callback, averaging) for callback in trainer.callbacks):
        return "StochasticWeightAveraging makes one more step with the last gradients"
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "manual optimization clears gradients itself: call optimizer.zero_grad() right after optimizer.step()"
    if is_overridden("optimizer_zero_grad", module):
        return f"{type(module).__name__}.optimizer_zero_grad decides when gradients are cleared"
    for optimizer in trainer.optimizers:
        # A wrapper around an optimizer that is an Optimizer in name only, without its constructor.
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            return f"{type(optimizer).__name__} does not call Optimizer.__init__, and so runs no hooks after its steps"
    return ""
