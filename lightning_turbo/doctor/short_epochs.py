"""A fit whose epochs are cut short, so that a border between two of them is seen after a few steps."""

from __future__ import annotations

from typing import Any

from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.doctor.clock import Listener
from lightning_turbo.doctor.fit_timing import Length
from lightning_turbo.doctor.kept_files import KeptFiles

__all__ = ["ShortEpochs"]

VALIDATED = 4
"""Batches of a validation that are enough to see what one takes, where no worker processes load."""


class ShortEpochs(Listener):
    """Cuts the epochs of a Trainer short, for a program that ends before it would miss what was left out.

    Who starts it: a ``Doctor`` that ends the program; it cuts as the training begins. What ends it: ``close``, before
    the report is written. What always holds: a fit of no more steps than are looked at is not cut; and what hooks,
    loggers and checkpoints write behind the last of these steps is taken back.

    Args:
        trainer: The Trainer, whose fit begins.
        steps: Batches of an epoch.
    """

    def __init__(self, trainer: Any, steps: int) -> None:
        self.trainer = trainer
        self.steps = steps
        self._cuts = False
        self._files: KeptFiles | None = None

    def cut(self, length: Length) -> None:
        """Cut the epochs short, as the training begins, if the fit is longer than what is looked at."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        self._cuts = self.steps < length.batches * length.epochs
        if not self._cuts:
            return
        # The lengths that its loops have counted are lists and numbers of the Trainer's; its arguments, which a script
        # can read, stay.
        loop.max_batches = min(loop.max_batches, self.steps)
        if trainer.val_check_batch is not None:
            trainer.val_check_batch = min(trainer.val_check_batch, loop.max_batches)
        if trainer.check_val_every_n_epoch is not None:
            trainer.check_val_every_n_epoch = 1
        # The first batches of all workers come together: a later one tells how many come in a second.
        enough = max(VALIDATED, 2 + _validation_workers(trainer))
        limits = trainer.num_val_batches
        limits[:] = [min(each, enough) for each in limits]

    def end_step(self, step: int) -> None:
        """Keep files behind the last step: what comes now would have come after many more."""
        if self._cuts and step + 1 >= self.steps and self._files is None:
            self._files = KeptFiles()
            self._files.begin()
            for name in ("save_checkpoint", "remove_checkpoint"):
                ReplacedMethod(self.trainer.strategy, name, _unless_remote)

    def close(self) -> None:
        """Put files back."""
        if self._files is not None:
            self._files.put_back()


def _validation_workers(trainer: Any) -> int:
    """Return the most worker processes that a validation loader has."""
    given: Any = trainer.val_dataloaders
    loaders = (
        list(given.values()) if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else [given]
    )
    return max((getattr(each, "num_workers", 0) for each in loaders), default=0)


def _unless_remote(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave checkpoints on other machines alone, which could not be put back."""
    if any("://" in str(each) for each in args if not isinstance(each, dict)):
        return None
    return method(*args, **kwargs)
