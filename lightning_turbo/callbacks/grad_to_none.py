"""Callback that releases gradients before the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from lightning_turbo._checks import inherits
from lightning_turbo._lightning import (
    Callback,
    LightningModule,
    MisconfigurationException,
    Trainer,
    check_binding,
    is_overridden,
    rank_zero_warn,
)
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo._trainer import callbacks_named
from lightning_turbo.errors import NoEffectWarning

__all__ = ["GradToNone", "no_effect_reason", "release_before_forward"]


class GradToNone(Callback):
    """Release gradients before the forward pass that follows ``optimizer.step()``, not between forward and backward.

    Lightning sets gradients to ``None`` between forward and backward, so they occupy memory while the activations grow.
    With this callback, the activations can use that memory. The results do not change, including with accumulation and
    clipping, and every hook between the step and the next ``training_step`` sees the same gradients.

    Raises:
        MisconfigurationException: In ``setup``, if the strategy clears gradients itself.

    Warns:
        NoEffectWarning: If gradients are views of DDP's buckets, ``StochasticWeightAveraging`` reads them again, a hook
            ``on_before_zero_grad`` of the module or a callback reads them after the forward pass, the module decides
            when to clear them (manual optimization, ``optimizer_zero_grad``), or an optimizer runs no hooks.

    Note:
        In ``training_step`` the gradients of the previous step are gone.

    Example:
        >>> from lightning_turbo import GradToNone
        >>> callback = GradToNone()

    Source: PyTorch Performance Tuning Guide, set_to_none.
    """

    def __init__(self) -> None:
        check_binding("GradToNone")
        self._cleanup = ExitStack()  # undoes what on_train_start changes

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a spawned process, has nothing to undo.
        return {**vars(self), "_cleanup": ExitStack()}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an error if the strategy manages gradients itself."""
        if stage == "fit" and trainer.strategy.handles_gradient_accumulation:
            raise MisconfigurationException(
                f"GradToNone: {type(trainer.strategy).__name__} keeps and clears gradients itself. Remove the callback."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to release gradients."""
        self._cleanup.close()
        # Not in setup: only now has DDP wrapped the module, which tells whether gradients are views of its buckets.
        if reason := no_effect_reason(trainer):
            rank_zero_warn(f"GradToNone has no effect: {reason}. Remove it.", category=NoEffectWarning)
        else:
            self._cleanup.callback(release_before_forward(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop releasing gradients."""
        self._cleanup.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop releasing gradients."""
        self._cleanup.close()


def release_before_forward(trainer: Any) -> Callable[[], None]:
    """Make a Trainer's optimizers release their gradients before the ``training_step`` that follows a step.

    This is after the last hook that sees the gradients, except for ``on_before_zero_grad``.

    Returns:
        A function that stops it; call it once.
    """
    undo = ExitStack()
    stepped = dict[Optimizer, None]()

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped[optimizer] = None

    def training_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        while stepped:
            stepped.popitem()[0].zero_grad()
        return step(*args, **kwargs)

    for optimizer in trainer.optimizers:
        undo.callback(optimizer.register_step_post_hook(note).remove)
    undo.callback(ReplacedMethod(trainer.strategy, "training_step", training_step).put_back)
    return undo.close


def no_effect_reason(trainer: Any) -> str:
    """Return why a Trainer's optimizers must not or need not release their gradients, or an empty string."""
    if getattr(trainer.model, "gradient_as_bucket_view", False):
        return "gradients are views of DDP's buckets, which stay in memory"
    averaging = callbacks_named("StochasticWeightAveraging")
    if any(isinstance(callback, averaging) for callback in trainer.callbacks):
        return "StochasticWeightAveraging uses the last gradients in one more step"
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "manual optimization clears gradients itself: call optimizer.zero_grad() right after optimizer.step()"
    if is_overridden("optimizer_zero_grad", module):
        return f"{type(module).__name__}.optimizer_zero_grad decides when gradients are cleared"
    return _who_reads_late(trainer) or _who_runs_no_hooks(trainer.optimizers)


def _who_reads_late(trainer: Any) -> str:
    """Return which hook reads the gradients after the forward pass, or an empty string."""
    owners = [(trainer.lightning_module, LightningModule), *((callback, Callback) for callback in trainer.callbacks)]
    for owner, base in owners:
        if getattr(owner, "on_before_zero_grad", None) and not inherits(owner, base, ("on_before_zero_grad",)):
            return f"{type(owner).__name__}.on_before_zero_grad reads the gradients after the forward pass"
    return ""


def _who_runs_no_hooks(optimizers: list[Any]) -> str:
    """Return which optimizer runs no hooks after its steps, or an empty string."""
    for optimizer in optimizers:
        # A wrapper that subclasses Optimizer without calling its constructor.
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            return f"{type(optimizer).__name__} does not call Optimizer.__init__, so it runs no hooks after its steps"
    return ""
