"""The callback that releases gradients right after the optimizer's step."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

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
from lightning_turbo.optim.gradients import GradientRelease, ReleaseState, release_after_steps, release_gradients

__all__ = ["GradToNone", "release_in"]


class GradToNone(Callback):
    """Release gradients right after ``optimizer.step()`` instead of just before the next backward.

    Lightning clears gradients to ``None`` between forward and backward, so that they lie idle through the whole
    forward pass and validation. Released early, their memory serves for activations. The numbers stay the same, with
    accumulation, clipping, several optimizers, manual optimization and float32 masters.

    The first step of each optimizer is only watched: where the loop itself does not replace the gradients before the
    second step, it may go on from the old ones on purpose, and nothing is released.

    Args:
        parameters: ``"optimizers"``: those of the optimizers, and the half-precision weights behind masters;
            ``"all"``: also those outside any optimizer, whose gradients Lightning never clears.

    Raises:
        ValueError: If ``parameters`` is neither.
        MisconfigurationException: In ``setup``, if the strategy clears gradients itself.

    Warns:
        NoEffectWarning: If there is nothing to gain: gradients are views of DDP's buckets, the loop has released them
            before the next batch already, or it keeps the same gradients from step to step.

    Note:
        Hooks that run after the step, such as ``on_train_batch_end`` and ``on_before_zero_grad``, see no gradients;
        look at them in ``on_before_optimizer_step``. A parameter that belongs to several optimizers is left alone.

    Example:
        >>> from lightning_turbo import GradToNone
        >>> callback = GradToNone()

    Source: PyTorch Performance Tuning Guide, set_to_none.
    """

    def __init__(self, parameters: Literal["optimizers", "all"] = "optimizers") -> None:
        check_binding("GradToNone")
        if parameters not in ("optimizers", "all"):
            raise ValueError(
                f"GradToNone(parameters={parameters!r}); accepted are 'optimizers' and 'all'. Take 'all' where "
                "parameters outside of any optimizer get gradients."
            )
        self.parameters = parameters
        self._releases: list[GradientRelease] = []
        self._outside: list[Tensor] = []
        self._told = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy whose gradients are not the optimizer's to release."""
        if stage == "fit" and trainer.strategy.handles_gradient_accumulation:
            raise MisconfigurationException(
                f"GradToNone: {type(trainer.strategy).__name__} keeps and clears gradients itself; accepted are "
                "strategies that leave them to the optimizer. Remove the callback."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow the steps of every optimizer."""
        self._stop()
        self._told = False
        if getattr(trainer.model, "gradient_as_bucket_view", False):
            self._tell("gradients are views of DDP's buckets, which live as long as DDP does")
            return
        owned = {id(p) for o in trainer.optimizers for group in o.param_groups for p in group["params"]}
        own = {id(parameter) for parameter in pl_module.parameters()}
        outside: list[Tensor] = [parameter for parameter in pl_module.parameters() if id(parameter) not in owned]
        # An optimizer that holds tensors which are not the module's holds masters of its half-precision weights.
        weights = outside if any(key not in own for key in owned) else []
        self._releases = release_in(trainer)
        self._outside = outside if self.parameters == "all" else weights

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look whether gradients are held at all when a forward pass begins."""
        for release in self._releases:
            if release.state is ReleaseState.WATCHING and release.watched and not release.holding():
                release.remove()
                self._tell("the training loop has released the gradients by itself when the next batch begins")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Release what no optimizer of its own releases, once all of them have made their steps."""
        for release in self._releases:
            if release.state is ReleaseState.OFF and not self._told:
                self._tell("the training loop keeps the same gradients from one step to the next")
        if self._outside and self._releases and not any(release.holding() for release in self._releases):
            release_gradients(self._outside)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the optimizers."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the optimizers."""
        self._stop()

    def _tell(self, reason: str) -> None:
        if not self._told:
            rank_zero_warn(f"GradToNone changes nothing here: {reason}. Remove it.", category=NoEffectWarning)
        self._told = True

    def _stop(self) -> None:
        for release in self._releases:
            release.remove()
        self._releases, self._outside = [], []


def release_in(trainer: Any) -> list[GradientRelease]:
    """Release the gradients of a Trainer's optimizers after their steps.

    Not from the last epoch of ``StochasticWeightAveraging`` on: the epoch that it adds steps once more with them.
    """
    averaging = [c for c in trainer.callbacks if isinstance(c, callbacks_named("StochasticWeightAveraging"))]

    def ends() -> bool:
        return any(trainer.current_epoch >= callback.swa_end for callback in averaging)

    return release_after_steps(trainer.optimizers, unless=ends if averaging else None)
