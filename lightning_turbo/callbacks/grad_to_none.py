"""The callback that releases gradients right after the optimizer's step."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lightning_turbo._checks import expect
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
from lightning_turbo.optim.gradient_release import GradientRelease, ReleaseState, release_after_steps, release_gradients

__all__ = ["GradToNone", "release_in"]


class GradToNone(Callback):
    """Release gradients right after ``optimizer.step()`` instead of just before the next backward.

    Lightning clears gradients to ``None`` between forward and backward, so that they lie idle through the whole
    forward pass and validation. Released early, their memory serves for activations. The numbers stay the same, with
    accumulation, clipping, several optimizers and manual optimization.

    The first step of each optimizer is only watched: where the loop itself does not replace the gradients before the
    second step, it may continue from the old ones on purpose, and nothing is released.

    Args:
        parameters: ``"optimizers"``: the parameters of the optimizers; ``"all"``: also those outside any optimizer,
            whose gradients Lightning never clears.

    Raises:
        ValueError: If ``parameters`` is neither.
        MisconfigurationException: In ``setup``, if the strategy clears gradients itself.

    Warns:
        NoEffectWarning: If there is nothing to gain: gradients are views of DDP's buckets, the loop has released them
            before the next batch already or keeps the same ones from step to step, or ``StochasticWeightAveraging``
            steps once more with the last ones.

    Note:
        Hooks that run after the step, such as ``on_train_batch_end`` and ``on_before_zero_grad``, see no gradients;
        read them in ``on_before_optimizer_step``. A parameter that belongs to several optimizers is left alone.

    Example:
        >>> from lightning_turbo import GradToNone
        >>> callback = GradToNone()

    Source: PyTorch Performance Tuning Guide, set_to_none.
    """

    def __init__(self, parameters: Literal["optimizers", "all"] = "optimizers") -> None:
        check_binding("GradToNone")
        expect(parameters in ("optimizers", "all"), "GradToNone(parameters)", parameters, "'optimizers' or 'all'")
        self.parameters = parameters
        self._releases: list[GradientRelease] = []
        self._outside: list[Tensor] = []
        self._told = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy whose gradients are not the optimizer's to release."""
        if stage == "fit" and trainer.strategy.handles_gradient_accumulation:
            raise MisconfigurationException(
                f"GradToNone: {type(trainer.strategy).__name__} keeps and clears gradients itself. Remove the callback."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow the steps of every optimizer."""
        self._stop()
        self._told = False
        if getattr(trainer.model, "gradient_as_bucket_view", False):
            self._tell("gradients are views of DDP's buckets, which live as long as DDP does")
            return
        self._releases = release_in(trainer)
        if len(self._releases) < len(trainer.optimizers):
            self._tell("StochasticWeightAveraging makes one more step with the last gradients")
        elif self.parameters == "all":
            self._outside = _outside(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Warn if no gradients are held when a forward pass begins."""
        for release in self._releases:
            if release.watched and not release.holding():
                release.remove()
                self._tell("the training loop has released the gradients by itself when the next batch begins")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Release the gradients outside any optimizer, once all optimizers have made their steps."""
        if any(release.state is ReleaseState.OFF for release in self._releases):
            self._tell("the training loop keeps the same gradients from one step to the next")
        if self._releases and not any(release.holding() for release in self._releases):
            release_gradients(self._outside)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop following the optimizers."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop following the optimizers."""
        self._stop()

    def _tell(self, reason: str) -> None:
        if not self._told:
            rank_zero_warn(f"GradToNone changes nothing here: {reason}. Remove it.", category=NoEffectWarning)
        self._told = True

    def _stop(self) -> None:
        for release in self._releases:
            release.remove()
        self._releases, self._outside = [], []


def _outside(trainer: Trainer, pl_module: LightningModule) -> list[Tensor]:
    """Return the parameters of the module that are in no optimizer."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    owned = {id(parameter) for group in groups for parameter in group["params"]}
    return [parameter for parameter in pl_module.parameters() if id(parameter) not in owned]


def release_in(trainer: Any) -> list[GradientRelease]:
    """Release the gradients of a Trainer's optimizers after their steps.

    Nothing is released beside ``StochasticWeightAveraging``: the epoch that it adds steps once more with the last
    gradients.
    """
    averaging = callbacks_named("StochasticWeightAveraging")
    if any(isinstance(callback, averaging) for callback in trainer.callbacks):
        return []
    return release_after_steps(trainer.optimizers)
