"""Callback that reaches a batch size by gradient accumulation and scales the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

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
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.optim.lr_scaling import LearningRateScaling, lr_factor

__all__ = ["EffectiveBatchSize"]


class EffectiveBatchSize(Callback):
    """Reach a number of samples per optimizer step by gradient accumulation, and scale the learning rate.

    The callback sets ``accumulate_grad_batches`` to ``target / (batch size * ranks)``. During each optimizer step it
    multiplies the learning rates by ``target / base_batch_size`` or its square root, for every schedule: see
    ``lightning_turbo.optim.LearningRateScaling``. Hyper-parameters, schedules and checkpoints keep the rates without
    the factor. The callback logs ``effective_batch_size`` and ``lr_factor``.

    Args:
        target: Samples per optimizer step, over all ranks, at least 1.
        lr_rule: ``"linear"`` (for SGD), ``"sqrt"`` (for Adam and LAMB), or ``None`` (do not scale).
        warmup_steps: Optimizer steps in which the factor rises from 1, at least 0.
        base_batch_size: Samples per step for which the learning rate was tuned. Default: the loader's batch size.
        batch_size: Samples in a batch of one rank. Needed for loaders without a ``batch_size``, and for code that reads
            ``accumulate_grad_batches`` before the loader exists.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is out of range or the rule is unknown; at the start of training, if the target is not
            a multiple of batch size times ranks, or the batch size is unknown.
        MisconfigurationException: In ``setup``, if something else sets ``accumulate_grad_batches`` too.

    Note:
        Size a schedule by ``trainer.estimated_stepping_batches``, which takes the accumulation into account.
        ``LearningRateMonitor`` shows the rates without the factor.

    Example:
        >>> from lightning_turbo import EffectiveBatchSize
        >>> callback = EffectiveBatchSize(1024, warmup_steps=500)

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017.
    """

    def __init__(
        self,
        target: int,
        lr_rule: Literal["linear", "sqrt"] | None = "linear",
        warmup_steps: int = 0,
        *,
        base_batch_size: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        check_binding("EffectiveBatchSize")
        check_count("target", target)
        check_count("warmup_steps", warmup_steps, 0)
        check_count("base_batch_size", 1 if base_batch_size is None else base_batch_size)
        check_count("batch_size", 1 if batch_size is None else batch_size)
        lr_factor(lr_rule, 1, 1)
        self.target, self.warmup_steps = target, warmup_steps
        self.lr_rule: Literal["linear", "sqrt"] | None = lr_rule
        self.base_batch_size, self.batch_size = base_batch_size, batch_size
        self.effective_batch_size: int | None = None
        self.factor = 1.0
        self._chosen: int | None = None
        self._replaced: ReplacedMethod | None = None
        self._scalings: list[LearningRateScaling] = []
        self._warmup_done = 0

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Check that nothing else sets ``accumulate_grad_batches``, and set it when the batch size is known."""
        if stage != "fit":
            return
        self._warmup_done = 0  # drop the state of an earlier run, or of a checkpoint that was tested
        self._refuse_other_owners(trainer, pl_module)
        self._set_early(trainer)

        def set_up_data(set_up: Callable[[], None]) -> None:
            set_up()
            self._set_early(trainer)

        # ``estimated_stepping_batches`` calls this, and then divides by the accumulation. It stays while Lightning's
        # finders remove the callbacks for their trials, which run without accumulation.
        self._replaced = ReplacedMethod(trainer.fit_loop, "setup_data", set_up_data)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the accumulation and scale the learning rates, because the loader and the optimizers now exist."""
        self._remove()
        size = self._set_accumulation(trainer)
        self.effective_batch_size = self.target
        self.factor = lr_factor(self.lr_rule, self.target, self.base_batch_size or size)
        if self.factor != 1.0:
            settings = self.factor, self.warmup_steps, self._warmup_done
            self._scalings = [LearningRateScaling(optimizer, *settings) for optimizer in trainer.optimizers]
        rank_zero_info(
            f"EffectiveBatchSize: {size} samples x {_ranks(trainer)} rank(s) x {self._chosen} batches = {self.target} "
            f"per step; learning rates x {self.factor:.4g}."
        )
        for logger in trainer.loggers:
            metrics = {"effective_batch_size": float(self.target), "lr_factor": self.factor}
            logger.log_metrics(metrics, step=trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hooks from the optimizers and the loop."""
        self._remove()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks from the optimizers and the loop."""
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the warm-up."""
        return {"warmup_done": max((scaling.done for scaling in self._scalings), default=self._warmup_done)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the progress of the warm-up.

        Args:
            state_dict: Result of ``state_dict``.
        """
        self._warmup_done = state_dict["warmup_done"]

    def _refuse_other_owners(self, trainer: Any, pl_module: LightningModule) -> None:
        scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
        accumulate = trainer.accumulate_grad_batches
        reasons = {
            "manual optimization sets its own windows. Remove the callback": not pl_module.automatic_optimization,
            "GradientAccumulationScheduler sets accumulate_grad_batches too. Keep one of the two": scheduled,
            f"Trainer(accumulate_grad_batches={accumulate}) sets it too. Leave it at 1": (
                accumulate not in (1, self._chosen)
            ),
        }
        for reason, applies in reasons.items():
            if applies:
                raise MisconfigurationException(f"EffectiveBatchSize(target={self.target}): {reason}.")

    def _set_early(self, trainer: Any) -> None:
        """Set the accumulation if the batch size is known and divides the target."""
        trainer.accumulate_grad_batches = 1
        if self in trainer.callbacks:
            with suppress(ValueError):  # on_train_start raises it
                self._set_accumulation(trainer)

    def _set_accumulation(self, trainer: Any) -> int:
        """Set the number of batches to accumulate, and return the batch size of a rank."""
        ranks, size = _ranks(trainer), self._find_size(trainer)
        if size is None:
            raise ValueError(
                "EffectiveBatchSize: expected a training loader with a batch_size, got "
                f"{type(trainer.train_dataloader).__name__} without one. Pass batch_size=... to EffectiveBatchSize."
            )
        accumulate, rest = divmod(self.target, size * ranks)
        if rest:
            raise ValueError(
                f"EffectiveBatchSize(target={self.target}): expected a multiple of {size * ranks}, with batches of "
                f"{size} on {ranks} rank(s), for example {(accumulate + 1) * size * ranks}."
            )
        trainer.accumulate_grad_batches = self._chosen = accumulate
        return size

    def _find_size(self, trainer: Any) -> int | None:
        """Return the number of samples in a batch of one rank, or None if it is not known yet."""
        loader = trainer.train_dataloader
        owners = (self, loader, getattr(loader, "batch_sampler", None))
        sizes = (getattr(owner, "batch_size", None) for owner in owners)
        return next((size for size in sizes if is_whole(size, 1)), None)

    def _remove(self) -> None:
        if self._replaced is not None:
            self._replaced.put_back()
            self._replaced = None
        for scaling in self._scalings:
            self._warmup_done = scaling.done
            scaling.remove()
        self._scalings = []


def _ranks(trainer: Trainer) -> int:
    """Return the number of ranks with different data: model parallelism has fewer than all ranks."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(sampler["num_replicas"]) if sampler else trainer.world_size
