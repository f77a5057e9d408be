"""Callback that releases gradients right after the optimizer's step."""

from __future__ import annotations

from itertools import chain
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

    Lightning sets gradients to ``None`` between forward and backward, so that they occupy memory during validation and
    the next forward pass. With this callback, activations can use that memory. The results do not change, also with
    accumulation, clipping, several optimizers and manual optimization.

    The first step of each optimizer is only watched. If the gradients at the second step are the same tensors, the loop
    may reuse them on purpose, and the callback releases nothing.

    Args:
        parameters: ``"optimizers"``: parameters of the optimizers; ``"all"``: also the other parameters, whose
            gradients Lightning never clears.

    Raises:
        ValueError: If ``parameters`` is another value.
        MisconfigurationException: In ``setup``, if the strategy clears gradients itself.

    Warns:
        NoEffectWarning: If the callback saves no memory: gradients are views of DDP's buckets, the loop clears them
            before the next batch or keeps them from step to step, or ``StochasticWeightAveraging`` reads them again.

    Note:
        Hooks after the step, such as ``on_train_batch_end`` and ``on_before_zero_grad``, see no gradients: read them in
        ``on_before_optimizer_step``. A parameter of several optimizers keeps its gradient.

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
        self._warned = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy that keeps the gradients itself."""
        if stage == "fit" and trainer.strategy.handles_gradient_accumulation:
            raise MisconfigurationException(
                f"GradToNone: {type(trainer.strategy).__name__} keeps and clears gradients itself. Remove the callback."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observe the steps of every optimizer."""
        self._stop()
        self._warned = False
        if getattr(trainer.model, "gradient_as_bucket_view", False):
            self._warn("gradients are views of DDP's buckets, which stay in memory")
            return
        self._releases = release_in(trainer)
        if len(self._releases) < len(trainer.optimizers):
            self._warn("StochasticWeightAveraging makes one more step with the last gradients")
        elif self.parameters == "all":
            self._outside = _find_outside(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Warn if the loop itself has released the gradients before the forward pass."""
        for release in self._releases:
            if release.watched and not release.holding():
                release.remove()
                self._warn("the training loop clears the gradients before the next batch")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Release the gradients outside the optimizers after all optimizers made their steps."""
        if any(release.state is ReleaseState.OFF for release in self._releases):
            self._warn("the training loop keeps the same gradients from one step to the next")
        if self._releases and not any(release.holding() for release in self._releases):
            release_gradients(self._outside)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop observing the optimizers."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop observing the optimizers."""
        self._stop()

    def _warn(self, reason: str) -> None:
        if not self._warned:
            rank_zero_warn(f"GradToNone has no effect: {reason}. Remove it.", category=NoEffectWarning)
        self._warned = True

    def _stop(self) -> None:
        for release in self._releases:
            release.remove()
        self._releases, self._outside = [], []


def _find_outside(trainer: Trainer, pl_module: LightningModule) -> list[Tensor]:
    """Return the parameters of the module that are in no optimizer."""
    groups = chain.from_iterable(optimizer.param_groups for optimizer in trainer.optimizers)
    owned = {id(parameter) for group in groups for parameter in group["params"]}
    return [parameter for parameter in pl_module.parameters() if id(parameter) not in owned]


def release_in(trainer: Any) -> list[GradientRelease]:
    """Release the gradients of a Trainer's optimizers after their steps.

    Return no release with ``StochasticWeightAveraging``: its additional epoch makes a step with the last gradients.
    """
    averaging = callbacks_named("StochasticWeightAveraging")
    if any(isinstance(callback, averaging) for callback in trainer.callbacks):
        return []
    return release_after_steps(trainer.optimizers)
