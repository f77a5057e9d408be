"""Callback that releases gradients right after the optimizer's step."""

from __future__ import annotations

from typing import Any

from lightning_turbo._lightning import (
    Callback,
    LightningModule,
    MisconfigurationException,
    Trainer,
    callbacks_named,
    check_binding,
    rank_zero_warn,
)
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.optim.gradient_release import GradientRelease, release_after_steps

__all__ = ["GradToNone", "why_not_release"]


class GradToNone(Callback):
    """Release gradients right after ``optimizer.step()`` instead of just before the next backward.

    Lightning sets gradients to ``None`` between forward and backward, so that they occupy memory during validation and
    the next forward pass. With this callback, activations can use that memory. The results do not change, also with
    accumulation, clipping, several optimizers and manual optimization.

    The first step of each optimizer is only watched. If the gradients at the second step are the same tensors, the loop
    may reuse them on purpose, and the callback releases nothing.

    Raises:
        MisconfigurationException: In ``setup``, if the strategy clears gradients itself.

    Warns:
        NoEffectWarning: If gradients are views of DDP's buckets, the loop clears them before the next batch or keeps
            them from step to step, or ``StochasticWeightAveraging`` reads them again.

    Note:
        Hooks after the step, such as ``on_train_batch_end`` and ``on_before_zero_grad``, see no gradients: read them in
        ``on_before_optimizer_step``. A parameter of several optimizers keeps its gradient.

    Example:
        >>> from lightning_turbo import GradToNone
        >>> callback = GradToNone()

    Source: PyTorch Performance Tuning Guide, set_to_none.
    """

    def __init__(self) -> None:
        check_binding("GradToNone")
        self._releases: list[GradientRelease] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy that keeps the gradients itself."""
        if stage == "fit" and trainer.strategy.handles_gradient_accumulation:
            raise MisconfigurationException(
                f"GradToNone: {type(trainer.strategy).__name__} keeps and clears gradients itself. Remove the callback."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observe the steps of every optimizer."""
        self._stop()
        if why := why_not_release(trainer):
            _warn(why)
        else:
            self._releases = release_after_steps(trainer.optimizers)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Give up where releasing has no effect."""
        for release in list(self._releases):
            if why := release.why_idle():
                release.remove()
                self._releases.remove(release)
                _warn(why)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop observing the optimizers."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop observing the optimizers."""
        self._stop()

    def _stop(self) -> None:
        for release in self._releases:
            release.remove()
        self._releases = []


def _warn(reason: str) -> None:
    rank_zero_warn(f"GradToNone has no effect: {reason}. Remove it.", category=NoEffectWarning)


def why_not_release(trainer: Any) -> str:
    """Return why the gradients of a Trainer's optimizers must not or need not be released, or an empty text."""
    if getattr(trainer.model, "gradient_as_bucket_view", False):
        return "gradients are views of DDP's buckets, which stay in memory"
    averaging = callbacks_named("StochasticWeightAveraging")
    if any(isinstance(callback, averaging) for callback in trainer.callbacks):
        return "StochasticWeightAveraging makes one more step with the last gradients"
    return ""
