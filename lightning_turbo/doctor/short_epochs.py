"""A fit whose epochs are cut short, so that a border between two of them is seen after a few steps."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from lightning_turbo._replaced import ReplacedMethod

__all__ = ["ShortEpochs"]

VALIDATED = 4
"""Batches of a validation that are enough to see what one takes."""


class ShortEpochs:
    """Cuts the epochs of a Trainer short, for a program that ends before it would miss what was left out.

    Who starts it: a ``Doctor`` that ends the program, as the training begins. What ends it: the end of the process.
    What always holds: Lightning's checkpoints go to a temporary folder, and none that was there before is removed.

    Args:
        trainer: The Trainer, which is about to train.
        steps: Batches of an epoch.
    """

    def __init__(self, trainer: Any, steps: int) -> None:
        self.trainer = trainer
        self.steps = steps
        self._folder = tempfile.TemporaryDirectory(prefix="lightning-turbo-doctor-")

    def begin(self) -> None:
        """Cut the epochs short."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        self._put_saves_aside()
        # The lengths that its loops have counted are lists and numbers of the Trainer's; its arguments, which a script
        # can read, stay.
        loop.max_batches = min(loop.max_batches, self.steps)
        if trainer.val_check_batch is not None:
            trainer.val_check_batch = min(trainer.val_check_batch, loop.max_batches)
        if trainer.check_val_every_n_epoch is not None:
            trainer.check_val_every_n_epoch = 1
        limits = trainer.num_val_batches
        limits[:] = [min(each, VALIDATED) for each in limits]

    def close(self) -> None:
        """Remove the temporary folder."""
        self._folder.cleanup()

    def _put_saves_aside(self) -> None:
        path = os.path.join(self._folder.name, "checkpoint.ckpt")

        def save(method: Any, checkpoint: Any, filepath: Any, *given: Any, **more: Any) -> None:
            method(checkpoint, path, *given, **more)

        ReplacedMethod(self.trainer.strategy, "save_checkpoint", save)
        ReplacedMethod(self.trainer.strategy, "remove_checkpoint", lambda method, filepath: None)
        for each in self.trainer.checkpoint_callbacks:
            if hasattr(each, "_link_checkpoint"):
                ReplacedMethod(each, "_link_checkpoint", lambda method, *given: None)
