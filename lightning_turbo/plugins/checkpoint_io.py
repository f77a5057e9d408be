"""Checkpoints of a Trainer: written whole or not at all, and scaler state of old ones found by ``ApexAMP``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from lightning_turbo._checks import expect
from lightning_turbo._lightning import CheckpointIO, TorchCheckpointIO, WrappingCheckpointIO, check_binding
from lightning_turbo.amp.convert import OWN_KEY, find_scaler_state, to_torch_adam

__all__ = ["AmpCheckpointIO", "AtomicCheckpointIO"]


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


class AmpCheckpointIO(WrappingCheckpointIO):
    """Lets ``ApexAMP`` continue from the checkpoints of Lightning 1.x, of apex's FusedAdam as well.

    Give both to the Trainer: ``Trainer(plugins=[ApexAMP("O1"), AmpCheckpointIO()])``. Lightning 2 deletes
    ``amp_scaling_state``, which Lightning 1.x wrote under apex, before any plugin sees it; here the scaler state of
    every version is moved to where Lightning looks for ``ApexAMP``'s, and FusedAdam's step counts to where
    ``torch.optim.AdamW(fused=True)`` looks for them. All else is left to ``checkpoint_io``.

    Args:
        checkpoint_io: What reads and writes files; ``AtomicCheckpointIO`` by default, in a wrapper such as
            ``AsyncCheckpointIO()`` as well.

    Raises:
        TypeError: If ``checkpoint_io`` is none.
        LightningMismatchError: If the program uses the other import name of Lightning.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo import AmpCheckpointIO, ApexAMP
        >>> trainer = Trainer(accelerator="cpu", plugins=[ApexAMP("O1"), AmpCheckpointIO()], logger=False)
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        check_binding("AmpCheckpointIO")
        valid = checkpoint_io is None or isinstance(checkpoint_io, CheckpointIO)
        expect(valid, "checkpoint_io", checkpoint_io, "a CheckpointIO of Lightning or None", TypeError)
        super().__init__(checkpoint_io)
        self.checkpoint_io = AtomicCheckpointIO()  # Lightning's setter: taken where there is none, in a wrapper too

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, with scaler state under ``ApexAMP``'s key and FusedAdam's as torch's AdamW reads it."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        state, key = find_scaler_state(checkpoint)
        if key is not None:
            del checkpoint[key]
            checkpoint[OWN_KEY] = state
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = [to_torch_adam(state) for state in checkpoint["optimizer_states"]]
        return checkpoint

    def teardown(self) -> None:
        """End what ``checkpoint_io`` has open."""
        if self.checkpoint_io is not None:
            self.checkpoint_io.teardown()
