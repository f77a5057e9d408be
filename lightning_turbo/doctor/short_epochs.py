"""Shortens the epochs of a fit, so that the end of one is seen after a few steps."""

from __future__ import annotations

from typing import Any

from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.doctor.clock import Listener
from lightning_turbo.doctor.fit_timing import Length
from lightning_turbo.doctor.kept_files import KeptFiles

__all__ = ["ShortEpochs"]

VALIDATED = 4
"""Number of validation batches that suffice to measure one, without worker processes."""


class ShortEpochs(Listener):
    """Shortens the epochs of a Trainer, for a program that ends before it would miss the rest.

    A ``Doctor`` that ends the program creates it and shortens the epochs when training starts; ``close`` ends it before
    the report is written. A fit no longer than the planned steps is not shortened. Whatever hooks, loggers and
    checkpoints write after the last of these steps is undone.

    Args:
        trainer: The Trainer, whose fit begins.
        steps: Batches per epoch.
    """

    def __init__(self, trainer: Any, steps: int) -> None:
        self.trainer = trainer
        self.steps = steps
        self._cuts = False
        self._files: KeptFiles | None = None

    def cut(self, length: Length) -> None:
        """Shorten the epochs when training starts, if the fit is longer than the planned steps."""
        trainer = self.trainer
        loop = self.trainer.fit_loop
        self._cuts = self.steps < length.batches * length.epochs
        if not self._cuts:
            return
        # These are the lengths that the loops have counted; the Trainer's arguments, which a script can read, stay
        # unchanged.
        loop.max_batches = min(loop.max_batches, self.steps)
        if trainer.val_check_batch is not None:
            trainer.val_check_batch = min(trainer.val_check_batch, loop.max_batches)
        if trainer.check_val_every_n_epoch is not None:
            trainer.check_val_every_n_epoch = 1
        # The first batches of all workers arrive together; later ones show the rate.
        enough = max(VALIDATED, 2 + _validation_workers(trainer))
        limits = trainer.num_val_batches
        limits[:] = [min(each, enough) for each in limits]

    def end_step(self, step: int) -> None:
        """Keep files after the last step, because what follows would normally come after many more steps."""
        if self._cuts and step + 1 >= self.steps and self._files is None:
            self._files = KeptFiles()
            self._files.begin()
            for name in ("save_checkpoint", "remove_checkpoint"):
                ReplacedMethod(self.trainer.strategy, name, _unless_remote)

    def close(self) -> None:
        """Restore the files."""
        if self._files is not None:
            self._files.put_back()


def _validation_workers(trainer: Any) -> int:
    """Return the largest number of worker processes of any validation loader."""
    given: Any = trainer.val_dataloaders
    loaders = (
        list(given.values()) if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else [given]
    )
    return max((getattr(each, "num_workers", 0) for each in loaders), default=0)


def _unless_remote(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Skip checkpoints on other machines, which could not be restored."""
    if any("://" in str(each) for each in args if not isinstance(each, dict)):
        return None
    return method(*args, **kwargs)
