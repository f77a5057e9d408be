"""``AugmentBatches``: augments the batches of a Trainer on its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_turbo._checks import check_switches, expect
from lightning_turbo._lightning import Callback, check_binding, rank_zero_warn
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.data.augment import BatchAugmentation, Indexed
from lightning_turbo.errors import NoEffectWarning

__all__ = ["AugmentBatches"]


class AugmentBatches(Callback):
    """Augment each training batch on the device, right before ``training_step``.

    The augmentation runs after the move to the device and after ``on_after_batch_transfer``, when the strategy returns
    the batch. Hooks from ``transfer_batch_to_device`` on, and the step, see batches without their indices. The epoch is
    the Trainer's, so a resumed run augments like one that never stopped. Several of these callbacks run in their order.

    Args:
        augmentation: The augmentation; its ``image``, ``mask`` and ``label`` name parts of the batch.
        training_only: ``False`` also augments the batches of validation, test and prediction.

    Raises:
        TypeError: If an argument has the wrong type.

    Warns:
        NoEffectWarning: At the end of ``fit``, if the strategy moved no batch, for example because ``training_step``
            takes a ``dataloader_iter``.

    Example:
        >>> from lightning_turbo import AugmentBatches, augment
        >>> steps = [augment.RandomFlip(), augment.RandomGamma()]
        >>> callback = AugmentBatches(augment.BatchAugmentation(steps, seed=0, image="image", mask="mask"))
    """

    def __init__(self, augmentation: BatchAugmentation, *, training_only: bool = True) -> None:
        check_binding("AugmentBatches")
        what = "a BatchAugmentation"
        expect(isinstance(augmentation, BatchAugmentation), "augmentation", augmentation, what, TypeError)
        check_switches(training_only=training_only)
        self.augmentation = augmentation
        self.training_only = training_only
        self._replaced: ReplacedMethod | None = None
        self._was_called = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the strategy, which moves batches to the device, augment them there."""
        self._end()
        self._was_called = False
        # Only one callback can take the indices off a batch: the first one runs all of them.
        together = [each for each in trainer.callbacks if isinstance(each, AugmentBatches)]
        if together[0] is not self:
            return

        def to_device(move: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
            index, data = batch if isinstance(batch, Indexed) else (None, batch)
            data = move(data, *args, **kwargs)
            for each in together:
                data = each._augment(trainer, index, data)
            return data

        self._replaced = ReplacedMethod(trainer.strategy, "batch_to_device", to_device)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the strategy."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the strategy."""
        self._end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Warn if there was nothing to augment."""
        if trainer.global_step and not self._was_called:
            rank_zero_warn(
                "AugmentBatches has no effect: the strategy moved no batch in this run. Call the "
                "BatchAugmentation in training_step.",
                category=NoEffectWarning,
            )

    def _end(self) -> None:
        if self._replaced is not None:
            self._replaced.put_back()
            self._replaced = None

    def _augment(self, trainer: Any, index: list[int] | None, data: Any) -> Any:
        if self.training_only and not trainer.training:
            return data
        # Set for each batch, because Lightning skips on_train_epoch_start when it resumes inside an epoch.
        self._was_called = True
        self.augmentation.set_epoch(trainer.current_epoch)
        return self.augmentation(data, index)
