"""Callback that reaches a batch size through gradient accumulation."""

from __future__ import annotations

from typing import Any

from lightning_turbo._checks import check_count, is_whole
from lightning_turbo._lightning import (
    Callback,
    GradientAccumulationScheduler,
    LightningModule,
    MisconfigurationException,
    Trainer,
    check_binding,
    rank_zero_info,
)

__all__ = ["EffectiveBatchSize"]


class EffectiveBatchSize(Callback):
    """Reach a number of samples per optimizer step through gradient accumulation, on any number of ranks.

    The callback sets ``accumulate_grad_batches`` to ``target / (batch_size * ranks)`` before the optimizers are
    created, and logs ``effective_batch_size``. It leaves the learning rate to you, so that monitors and checkpoints see
    it: multiply it by ``lightning_turbo.optim.lr_factor`` in ``configure_optimizers``, and warm up with torch's
    ``LinearLR``.

    Args:
        target: Samples per optimizer step over all ranks, at least 1; a multiple of batch size times ranks.
        batch_size: Samples per batch and rank, at least 1.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is out of range; in ``setup``, if the target is not a multiple of batch size times
            ranks; at the start of training, if the loader has another batch size.
        MisconfigurationException: In ``setup``, if something else also sets ``accumulate_grad_batches``.

    Note:
        Size a scheduler with ``trainer.estimated_stepping_batches``, which accounts for the accumulation.

    Example:
        >>> from lightning_turbo import EffectiveBatchSize
        >>> callback = EffectiveBatchSize(1024, batch_size=32)

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017.
    """

    def __init__(self, target: int, *, batch_size: int) -> None:
        check_binding("EffectiveBatchSize")
        self.target = check_count("target", target)
        self.batch_size = check_count("batch_size", batch_size)
        self._accumulate = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set ``accumulate_grad_batches``, if nothing else does."""
        if stage != "fit":
            return
        if reason := self._reason_to_refuse(trainer, pl_module):
            raise MisconfigurationException(f"EffectiveBatchSize(target={self.target}): {reason}.")
        # With model parallelism, several ranks share the same data.
        sampler: Any = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
        ranks = int(sampler["num_replicas"]) if sampler else trainer.world_size
        self._accumulate, rest = divmod(self.target, self.batch_size * ranks)
        if rest:
            raise ValueError(
                f"EffectiveBatchSize(target={self.target}): expected a multiple of {self.batch_size * ranks}, with "
                f"batches of {self.batch_size} on {ranks} rank(s), for example "
                f"{(self._accumulate + 1) * self.batch_size * ranks}."
            )
        # Set before configure_optimizers, in which a scheduler may ask for the number of steps.
        trainer.accumulate_grad_batches = self._accumulate
        rank_zero_info(
            f"EffectiveBatchSize: {self.batch_size} samples x {ranks} rank(s) x {self._accumulate} batches = "
            f"{self.target} per step."
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the loader, which now exists, and log the size."""
        loader = trainer.train_dataloader
        sizes = [getattr(owner, "batch_size", None) for owner in (loader, getattr(loader, "batch_sampler", None))]
        size = next((size for size in sizes if is_whole(size, 1)), self.batch_size)
        if size != self.batch_size:
            raise ValueError(
                f"EffectiveBatchSize(batch_size={self.batch_size}): expected the batch size of the training loader, "
                f"which has {size}. Pass batch_size={size}."
            )
        for logger in trainer.loggers:
            logger.log_metrics({"effective_batch_size": float(self.target)}, step=trainer.global_step)

    def _reason_to_refuse(self, trainer: Any, pl_module: LightningModule) -> str:
        accumulate = trainer.accumulate_grad_batches
        if not pl_module.automatic_optimization:
            return "manual optimization sets its own windows. Remove the callback"
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
            return "GradientAccumulationScheduler sets accumulate_grad_batches too. Keep one of them"
        if accumulate not in (1, self._accumulate):  # the second one is from an earlier fit
            return f"Trainer(accumulate_grad_batches={accumulate}) sets it too. Leave it at 1"
        return ""
