"""The callback that reaches a wanted batch size by accumulation and fits the learning rate to it."""

from __future__ import annotations

import math
from typing import Any, Literal

from lightning_turbo._checks import expect
from lightning_turbo._lightning import (
    Callback,
    GradientAccumulationScheduler,
    LightningModule,
    MisconfigurationException,
    Trainer,
    check_binding,
    lower_found_batch_size,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_turbo.errors import TurboWarning
from lightning_turbo.optim.lr_scaling import LearningRateScaling, lr_factor

__all__ = ["EffectiveBatchSize"]

# Where torch's schedules keep for how many steps they were made.
SCHEDULE_LENGTHS = ("total_steps", "T_max", "total_iters")


class EffectiveBatchSize(Callback):
    """Reach a number of samples per optimizer step by accumulation, and scale the learning rate to it.

    ``accumulate_grad_batches`` becomes ``target / (batch size * ranks)``. Every optimizer step is made with learning
    rates multiplied by ``target / base_batch_size`` or its square root, whatever schedule sets them: see
    ``lightning_turbo.optim.LearningRateScaling``. Hyper-parameters, schedules and checkpoints keep the rates without
    the factor. The callback logs ``effective_batch_size`` and ``lr_factor``.

    Args:
        target: Samples per optimizer step, over all ranks, at least 1.
        lr_rule: ``"linear"`` (for SGD), ``"sqrt"`` (for Adam and LAMB), or ``None``: leave the learning rate alone.
        warmup_steps: Optimizer steps over which the factor rises from 1, at least 0.
        base_batch_size: Samples per step for which the learning rate was chosen; ``None`` means the loader's batch
            size.
        batch_size: Samples in a batch of one rank, for loaders without a ``batch_size``, and for code that reads
            ``accumulate_grad_batches`` before any loader is there.

    Raises:
        TypeError: If a number is not an int.
        ValueError: If a number is out of range or the rule is unknown; at the start of training, if the target
            cannot be reached with this batch size and these ranks, or the batch size is unknown.
        MisconfigurationException: In ``setup``, if something else sets ``accumulate_grad_batches`` too.

    Warns:
        TurboWarning: At the start of training, if a schedule is as long as the run would be without accumulation.

    Note:
        ``trainer.estimated_stepping_batches`` counts the accumulation, in ``configure_optimizers`` and later.
        With Lightning's BatchSizeFinder the target is kept: the size found is lowered to the next one that divides
        it. Monitors of the learning rate show it without the factor.

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
        _check_number("target", target, 1)
        _check_number("warmup_steps", warmup_steps, 0)
        _check_number("base_batch_size", 1 if base_batch_size is None else base_batch_size, 1)
        _check_number("batch_size", 1 if batch_size is None else batch_size, 1)
        lr_factor(lr_rule, 1, 1)
        self.target, self.warmup_steps = target, warmup_steps
        self.lr_rule: Literal["linear", "sqrt"] | None = lr_rule
        self.base_batch_size, self.batch_size = base_batch_size, batch_size
        self.effective_batch_size: int | None = None
        self.factor = 1.0
        self._chosen: int | None = None
        self._scalings: list[LearningRateScaling] = []
        self._warmup_done = 0

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second owner of ``accumulate_grad_batches``, and choose it as soon as the batch size is known."""
        if stage != "fit":
            return
        self._warmup_done = 0  # of a checkpoint that was only tested, and of a run before
        self._refuse_other_owners(trainer, pl_module)
        self._choose_early(trainer)
        set_up = trainer.fit_loop.setup_data

        def setup_data() -> None:
            set_up()
            self._choose_early(trainer)

        # ``estimated_stepping_batches`` sets the loaders up, and then divides by the accumulation.
        trainer.fit_loop.setup_data = setup_data

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the accumulation and scale the learning rates, once the loader and the optimizers are ready."""
        self._remove(trainer)
        size, accumulate = self._choose(trainer)
        trainer.accumulate_grad_batches = self._chosen = accumulate
        self.effective_batch_size = self.target
        self.factor = lr_factor(self.lr_rule, self.target, self.base_batch_size or size)
        if self.factor != 1.0:
            self._scalings = [
                LearningRateScaling(optimizer, self.factor, self.warmup_steps, self._warmup_done)
                for optimizer in trainer.optimizers
            ]
        _warn_of_long_schedules(trainer)
        rank_zero_info(
            f"EffectiveBatchSize: {size} samples x {_ranks(trainer)} rank(s) x {accumulate} batches = {self.target} "
            f"per step; learning rates x {self.factor:.4g}."
        )
        for logger in trainer.loggers:
            metrics = {"effective_batch_size": float(self.target), "lr_factor": self.factor}
            logger.log_metrics(metrics, step=trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop following the optimizers and the loop."""
        self._remove(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop following the optimizers and the loop."""
        self._remove(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the warm-up."""
        return {"warmup_done": max((scaling.done for scaling in self._scalings), default=self._warmup_done)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the progress of the warm-up.

        Args:
            state_dict: What ``state_dict`` returned.

        Raises:
            ValueError: If the learning rates in the checkpoint carry a factor.
        """
        if state_dict.get("factor", 1.0) != 1.0:
            raise ValueError(
                "EffectiveBatchSize: this checkpoint is of an earlier lightning-turbo, which saved learning rates "
                f"times {state_dict['factor']}. Start from its weights alone, with load_from_checkpoint."
            )
        self._warmup_done = state_dict["warmup_done"]

    def _refuse_other_owners(self, trainer: Any, pl_module: LightningModule) -> None:
        kinds = [type(callback) for callback in trainer.callbacks]
        reasons = {
            "manual optimization accumulates gradients itself. Remove the callback": (
                not pl_module.automatic_optimization
            ),
            "GradientAccumulationScheduler sets accumulate_grad_batches too. Keep one of the two": any(
                issubclass(kind, GradientAccumulationScheduler) for kind in kinds
            ),
            "the Trainer has several of them. Keep one": kinds.count(EffectiveBatchSize) > 1,
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) sets it too. Leave that at 1": (
                trainer.accumulate_grad_batches not in (1, self._chosen)
            ),
        }
        for reason, applies in reasons.items():
            if applies:
                raise MisconfigurationException(f"EffectiveBatchSize(target={self.target}): {reason}.")

    def _choose_early(self, trainer: Any) -> None:
        """Set the accumulation if the batch size is known and fits, except in the trials of Lightning's finders."""
        trainer.accumulate_grad_batches = 1
        if self not in trainer.callbacks or (size := self._size(trainer)) is None:
            return
        accumulate, rest = divmod(self.target, size * _ranks(trainer))
        if not rest:
            trainer.accumulate_grad_batches = self._chosen = accumulate

    def _choose(self, trainer: Any) -> tuple[int, int]:
        """Return the batch size of a rank and the accumulation."""
        ranks, size = _ranks(trainer), self._size(trainer)
        if size is None:
            raise ValueError(
                f"EffectiveBatchSize: the training loader {type(trainer.train_dataloader).__name__} has no batch_size. "
                "Pass batch_size=... to EffectiveBatchSize."
            )
        if self.target % (size * ranks) and self.batch_size is None:
            size = self._lower(trainer, size)
        accumulate, rest = divmod(self.target, size * ranks)
        if rest:
            near = [n * size * ranks for n in (accumulate, accumulate + 1) if n]
            raise ValueError(
                f"EffectiveBatchSize(target={self.target}): expected a multiple of {size * ranks}, with batches of "
                f"{size} on {ranks} rank(s). The nearest: {' and '.join(map(str, near))}."
            )
        return size, accumulate

    def _lower(self, trainer: Any, size: int) -> int:
        """Lower a size that BatchSizeFinder has found to the next one that divides the target; return the size."""
        lower = max((d for d in range(1, size) if self.target % (d * _ranks(trainer)) == 0), default=0)
        return lower if lower and lower_found_batch_size(trainer, lower) else size

    def _size(self, trainer: Any) -> int | None:
        """Return the number of samples in a batch of one rank, or None while it is unknown."""
        loader = trainer.train_dataloader
        sizes = [getattr(owner, "batch_size", None) for owner in (self, loader, getattr(loader, "batch_sampler", None))]
        size = next((size for size in sizes if size is not None), None)
        return size if isinstance(size, int) and size >= 1 else None

    def _remove(self, trainer: Any) -> None:
        vars(trainer.fit_loop).pop("setup_data", None)
        for scaling in self._scalings:
            self._warmup_done = scaling.done
            scaling.remove()
        self._scalings = []


def _check_number(name: str, value: Any, least: int) -> None:
    argument = f"EffectiveBatchSize({name})"
    expect(isinstance(value, int) and not isinstance(value, bool), argument, value, "an int", TypeError)
    expect(value >= least, argument, value, f"at least {least}")


def _ranks(trainer: Trainer) -> int:
    """Return over how many ranks the data is spread, which model parallelism makes fewer than all."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(sampler["num_replicas"]) if sampler else trainer.world_size


def _warn_of_long_schedules(trainer: Trainer) -> None:
    """Warn of a schedule that was made for all batches of the run, where a step takes several of them."""
    batches, epochs, accumulate = (
        trainer.num_training_batches,
        trainer.max_epochs or -1,
        trainer.accumulate_grad_batches,
    )
    for config in trainer.lr_scheduler_configs:
        lengths = [getattr(config.scheduler, name, None) for name in SCHEDULE_LENGTHS]
        if accumulate > 1 and batches * epochs in lengths:
            rank_zero_warn(
                f"EffectiveBatchSize: {type(config.scheduler).__name__} was made for {batches * epochs} steps, as if "
                f"each batch were one, but with accumulate_grad_batches={accumulate} the run makes "
                f"{math.ceil(batches / accumulate) * epochs}. Take the number from trainer.estimated_stepping_batches "
                "in configure_optimizers.",
                category=TurboWarning,
            )
