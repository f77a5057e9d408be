"""Checkpoints of a Trainer that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from lightning_turbo._lightning import TorchCheckpointIO, check_binding

__all__ = ["AtomicCheckpointIO"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint whole or not at all: ``Trainer(plugins=[AtomicCheckpointIO()])``.

    Lightning writes into the system's temporary folder and moves the file. Where that folder lies on another disk than
    the checkpoints, the move is a copy, and a process that is killed in the middle of it, or a disk that fills up,
    leaves half a file in place of the last checkpoint. Here the file is written beside its place under another name,
    ``.NAME.partial``, brought to the disk (``fsync``), and then takes its place in one step.

    The next checkpoint of the same name writes over what a killed process left of such a file. Paths with a protocol,
    as ``s3://``, are left to Lightning: object stores show a file when it is complete.

    Raises:
        LightningMismatchError: If the program uses the other import name of Lightning.

    Note:
        ``fsync`` waits for the disk. All else is as in Lightning's ``TorchCheckpointIO``, and so are the files.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo import AtomicCheckpointIO
        >>> trainer = Trainer(accelerator="cpu", plugins=[AtomicCheckpointIO()], logger=False)
    """

    def __init__(self) -> None:
        super().__init__()
        check_binding(type(self).__name__)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint; until it is complete, what was at its path stays there.

        Args:
            checkpoint: What ``torch.save`` takes.
            path: Of the file; folders above it are made.
            storage_options: As in Lightning: refused.

        Raises:
            OSError: If it cannot be written, for example because the disk is full.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path).expanduser()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _replace(target, checkpoint)
        except (OSError, RuntimeError) as error:
            cause = _system_error(error)
            if cause is None:
                raise
            raise OSError(
                cause.errno,
                f"the checkpoint {str(target)!r} could not be written ({cause.strerror}); those written before are as "
                "they were. Free space or give ModelCheckpoint another dirpath, and continue with ckpt_path='last'",
            ) from error


def _replace(target: Path, checkpoint: dict[str, Any]) -> None:
    partial = target.with_name(f".{target.name}.partial")  # Lightning looks for files that end in .ckpt
    try:
        with open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the new name as well has to reach the disk
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _system_error(error: BaseException | None) -> OSError | None:
    """The system's error behind an error: torch ends a file that it could not write with one of its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
