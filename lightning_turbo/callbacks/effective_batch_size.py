"""The callback that reaches a wanted batch size by accumulation and fits the learning rate to it."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

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
from lightning_turbo.optim.large_batch import LearningRateWarmup, every_schedule, lr_factor, scale_learning_rates

__all__ = ["EffectiveBatchSize"]

# Where the schedules of torch keep how many steps they are for.
SCHEDULE_LENGTHS = ("total_steps", "T_max", "total_iters")


class EffectiveBatchSize(Callback):
    """Reach a number of samples per optimizer step by accumulation, and scale the learning rate to it.

    ``accumulate_grad_batches`` becomes ``target / (batch size * ranks)``. The learning rates of the optimizers, and
    of the schedulers built on them, are multiplied by ``target / base_batch_size`` or its square root; the module's
    own hyper-parameters stay as they are. The callback logs ``effective_batch_size``, and holds it as an attribute.

    Args:
        target: Samples per optimizer step, over all ranks, at least 1.
        lr_rule: ``"linear"`` (for SGD), ``"sqrt"`` (for Adam and LAMB), or ``None``: leave the learning rate alone.
        warmup_steps: Optimizer steps over which the learning rate rises from unscaled to scaled, at least 0.
        base_batch_size: Samples per step for which the learning rate was chosen; ``None`` means the loader's batch
            size.
        batch_size: Samples in a batch of one rank, for loaders that do not tell, and for code that reads
            ``accumulate_grad_batches`` before any loader is there.

    Raises:
        TypeError: If a number is no whole number.
        ValueError: If a number is out of range or the rule is unknown; at the start of training, if the target
            cannot be reached with this batch size and these ranks, or the batch size is unknown.
        MisconfigurationException: In ``setup``, if something else sets ``accumulate_grad_batches`` too.

    Warns:
        TurboWarning: At the start of training, if a schedule is as long as the run would be without accumulation.

    Note:
        ``trainer.estimated_stepping_batches`` counts the accumulation, in ``configure_optimizers`` and later.
        With Lightning's BatchSizeFinder the target is kept: the size found is lowered to the next one that divides
        it. During the warm-up the learning rate is lowered for the time of the step alone, so monitors show the
        scaled rate. A run that goes on from a checkpoint goes on with its learning rates and warm-up; if the ranks
        or sizes have changed, the rates change by their ratio.

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
        for name, value, least in (
            ("target", target, 1),
            ("warmup_steps", warmup_steps, 0),
            ("base_batch_size", base_batch_size, 1),
            ("batch_size", batch_size, 1),
        ):
            if value is None and name in ("base_batch_size", "batch_size"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"EffectiveBatchSize({name}={value!r}); accepted is a whole number. Give an int.")
            if value < least:
                raise ValueError(f"EffectiveBatchSize({name}={value!r}); accepted is at least {least}. Give more.")
        lr_factor(lr_rule, 1, 1)
        self.target, self.warmup_steps = target, warmup_steps
        self.lr_rule: Literal["linear", "sqrt"] | None = lr_rule
        self.base_batch_size, self.batch_size = base_batch_size, batch_size
        self.effective_batch_size: int | None = None
        self.factor = 1.0
        self._loaded: dict[str, Any] | None = None
        self._chosen: int | None = None
        self._estimates: set[int] = set()
        self._warmups: list[LearningRateWarmup] = []
        self._warmup_done = 0

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second owner of ``accumulate_grad_batches``, and choose it as soon as the batch size is known."""
        if stage != "fit":
            return
        # Of a checkpoint that was only tested, and of a run before: the finders save the state before training starts.
        self._loaded, self.factor, self._warmup_done = None, 1.0, 0
        reason = None
        if not pl_module.automatic_optimization:
            reason = "manual optimization accumulates gradients itself. Remove the callback"
        elif any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
            reason = "GradientAccumulationScheduler sets accumulate_grad_batches too. Keep one of the two"
        elif sum(isinstance(callback, EffectiveBatchSize) for callback in trainer.callbacks) > 1:
            reason = "the Trainer has several of them. Keep one"
        elif trainer.accumulate_grad_batches not in (1, self._chosen):
            reason = f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) sets it too. Leave that at 1"
        if reason is not None:
            raise MisconfigurationException(f"EffectiveBatchSize(target={self.target}): {reason}.")
        self._estimates = set()
        self._choose_early(trainer)
        set_up = trainer.fit_loop.setup_data

        def setup_data() -> None:
            set_up()
            self._choose_early(trainer)

        # ``estimated_stepping_batches`` sets the loaders up, and goes on to divide by the accumulation.
        trainer.fit_loop.setup_data = setup_data

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the accumulation and scale the learning rates, once the loader and the optimizers are ready."""
        self._remove(trainer)
        ranks = _ranks(trainer)
        size = self._size(trainer)
        if size is None:
            raise ValueError(
                f"EffectiveBatchSize: the training loader {type(trainer.train_dataloader).__name__} does not tell its "
                "batch size; accepted are loaders with a batch_size. Give batch_size=... yourself."
            )
        if self.target % (size * ranks):
            lower = max((d for d in range(1, size) if self.target % (d * ranks) == 0), default=0)
            if lower and self.batch_size is None and lower_found_batch_size(trainer, lower):
                size = lower
        accumulate, rest = divmod(self.target, size * ranks)
        if rest:
            near = [n * size * ranks for n in (accumulate, accumulate + 1) if n]
            raise ValueError(
                f"EffectiveBatchSize(target={self.target}) cannot be reached with batches of {size} on {ranks} "
                f"rank(s); accepted are multiples of {size * ranks}. The nearest: {' and '.join(map(str, near))}."
            )
        trainer.accumulate_grad_batches = self._chosen = accumulate
        _warn_of_long_schedules(trainer, self._estimates)
        self.effective_batch_size = self.target
        self.factor = lr_factor(self.lr_rule, self.target, self.base_batch_size or size)
        before = self._loaded["factor"] if self._loaded is not None else 1.0
        if self.factor != before:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            scale_learning_rates(trainer.optimizers, schedulers, self.factor / before)
        self._warmup_done = self._loaded["warmup_done"] if self._loaded is not None else 0
        if self.warmup_steps and self.factor != 1.0:
            self._warmups = [
                LearningRateWarmup(optimizer, self.factor, self.warmup_steps, self._warmup_done)
                for optimizer in trainer.optimizers
            ]
        self._loaded = None
        rank_zero_info(
            f"EffectiveBatchSize: {size} samples x {ranks} rank(s) x {accumulate} batches = {self.target} per step; "
            f"learning rates x {self.factor:.4g}."
        )
        for logger in trainer.loggers:
            logger.log_metrics({"effective_batch_size": float(self.target)}, step=trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the optimizers and of the loop."""
        self._remove(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the optimizers and of the loop."""
        self._remove(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the factor that the saved learning rates carry, and the progress of the warm-up."""
        done = max((warmup.done for warmup in self._warmups), default=self._warmup_done)
        return {"factor": self.factor, "warmup_done": done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for the start of training.

        Args:
            state_dict: What ``state_dict`` returned.
        """
        self._loaded = dict(state_dict)

    def _choose_early(self, trainer: Any) -> None:
        """Set the accumulation if the batch size is known and fits, but for the trials of Lightning's finders."""
        trainer.accumulate_grad_batches = 1
        if self not in trainer.callbacks:
            return
        if (steps := _steps(trainer)) is not None:
            self._estimates.add(steps)
        if (size := self._size(trainer)) is not None:
            accumulate, rest = divmod(self.target, size * _ranks(trainer))
            if not rest:
                trainer.accumulate_grad_batches = self._chosen = accumulate

    def _size(self, trainer: Any) -> int | None:
        """Return the number of samples in a batch of one rank, or None while nothing tells it."""
        loader = trainer.train_dataloader
        for owner in (self, loader, getattr(loader, "batch_sampler", None)):
            size = getattr(owner, "batch_size", None)
            if size is not None:
                break
        return size if isinstance(size, int) and size >= 1 else None

    def _remove(self, trainer: Any) -> None:
        vars(trainer.fit_loop).pop("setup_data", None)
        for warmup in self._warmups:
            self._warmup_done = warmup.done
            warmup.remove()
        self._warmups = []


def _ranks(trainer: Trainer) -> int:
    """Return over how many ranks the data is spread, which model parallelism makes fewer than all."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(sampler["num_replicas"]) if sampler else trainer.world_size


def _steps(trainer: Trainer) -> int | None:
    """Return the number of steps in the run, or None if it is unknown or endless."""
    batches, epochs, most = trainer.num_training_batches, trainer.max_epochs, trainer.max_steps
    if trainer.train_dataloader is None or epochs is None or epochs < 0 or not math.isfinite(batches):
        return None
    steps = math.ceil(batches / trainer.accumulate_grad_batches) * epochs
    return steps if most < 0 else min(steps, most)


def _warn_of_long_schedules(trainer: Trainer, estimates: set[int]) -> None:
    """Say that a schedule was made for all batches of the run, where a step takes several of them."""
    made = _steps(trainer)
    wrong = {steps for steps in estimates if made is not None and steps > made}
    for schedule in every_schedule(config.scheduler for config in trainer.lr_scheduler_configs):
        lengths = [getattr(schedule, name, None) for name in SCHEDULE_LENGTHS]
        for function in getattr(schedule, "lr_lambdas", ()):
            lengths += function.keywords.values() if isinstance(function, functools.partial) else ()
        for steps in wrong.intersection(length for length in lengths if isinstance(length, int)):
            rank_zero_warn(
                f"EffectiveBatchSize: {type(schedule).__name__} was made for {steps} steps, as if each batch were one, "
                f"but with accumulate_grad_batches={trainer.accumulate_grad_batches} the run makes {made}: it ends far "
                "from the schedule's end. Take the number from trainer.estimated_stepping_batches in "
                "configure_optimizers, and with BatchSizeFinder begin with a batch size that divides the target.",
                category=TurboWarning,
            )
