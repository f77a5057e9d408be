"""Checkpoints of a Trainer that are written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from lightning_turbo._checks import check_switches
from lightning_turbo._files import whole_file
from lightning_turbo._host_copy import HostCopier
from lightning_turbo._lightning import TorchCheckpointIO, check_binding, repr_with_copy

__all__ = ["AtomicCheckpointIO"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint whole or not at all: ``Trainer(plugins=[AtomicCheckpointIO()])``.

    Lightning writes into the system's temporary folder and moves the file. Where that folder lies on another disk than
    the checkpoints, the move is a copy, and a process that is killed in the middle of it, or a disk that fills up,
    leaves half a file in place of the last checkpoint. Here the file is written beside its place under a name of its
    own, ``.NAME.MACHINE-NUMBER.partial``, brought to the disk (``fsync``), and then takes its place in one step. Runs
    that save under one name at a time all succeed, and the last one counts.

    The next checkpoint in a folder removes what killed processes of the same machine left of such files. Paths with a
    protocol, as ``s3://``, are left to Lightning: object stores show a file when it is complete.

    Args:
        background: Write in a thread while training goes on. A save copies the checkpoint to memory of the host, which
            is kept for the next one, pinned for tensors of a CUDA device; later work on the device's stream waits for
            the copy, and the host does not. A save waits for the one before it, so that at most one is under way. Its
            error is raised by the next save, or at the end of the run, which waits for it, as the end of the process
            does. Files are removed after the saves before them, and stay if one of these fails. Saves outside of
            epochs, as ``trainer.save_checkpoint`` after ``fit`` or its error, are written at once; so are all into a
            folder that has a link to a file, as ``save_last="link"`` makes one: Lightning sets it before the thread is
            done, and a kill would leave it without its file.

    Raises:
        LightningMismatchError: If the program uses the other import name of Lightning.
        TypeError: If ``background`` is not a bool.

    Note:
        ``fsync`` waits for the disk. All else is as in Lightning's ``TorchCheckpointIO``, and so are the files; with
        ``background`` their tensors are on the CPU.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo import AtomicCheckpointIO
        >>> trainer = Trainer(accelerator="cpu", plugins=[AtomicCheckpointIO()], logger=False)
    """

    __repr__ = repr_with_copy

    def __init__(self, background: bool = False) -> None:
        super().__init__()
        check_binding(type(self).__name__)
        check_switches(background=background)
        self.background = background
        self._copier = HostCopier()
        # One thread, from the first save in the background until ``teardown``; Python's exit waits for it too.
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None  # what it does last of all that it was given
        # Batches at the first save after a teardown, -1 before that one, and None once a run has made others since.
        self._ended_at: int | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint; until it is complete, what was at its path stays there.

        Args:
            checkpoint: What ``torch.save`` takes.
            path: Of the file; folders above it are made.
            storage_options: As in Lightning: refused.

        Raises:
            OSError: If it cannot be written, for example because the disk is full; with ``background``, if the one
                before it could not.
        """
        self._wait()
        if not self._may_wait(checkpoint, path, storage_options):
            self._write(checkpoint, path, storage_options)
            return
        copy = self._copier.copy(checkpoint)

        def write() -> None:
            with copy as copied:
                self._write(copied, path, None)

        self._then(write)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, after those that are being written."""
        self._wait()
        return super().load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, once those that are being written are complete."""
        remove = super().remove_checkpoint
        if self._last is None:
            remove(path)
        else:
            self._then(lambda: remove(path))

    def teardown(self) -> None:
        """End the thread, and raise its error, if it has one that nobody knows."""
        try:
            self._wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread, self._last, self._copier = None, None, HostCopier()
            self._ended_at = -1

    def _may_wait(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> bool:
        """Whether a file may be written while training goes on."""
        in_background = self.background and storage_options is None and self._is_in_run(checkpoint)
        return in_background and not _has_links(Path(path).expanduser().parent)

    def _is_in_run(self, checkpoint: dict[str, Any]) -> bool:
        """Whether a checkpoint is from within an epoch of a run that goes on; any other may be read at once.

        An error leaves an epoch in its middle, so that after a teardown another run shows by its batches alone.
        """
        if not _is_in_epoch(checkpoint):
            return False
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
        if self._ended_at == -1:
            self._ended_at = batches
        elif self._ended_at != batches:
            self._ended_at = None
        return self._ended_at is None

    def _then(self, work: Callable[[], None]) -> None:
        """Have the thread do some work after all that it was given, if nothing of that failed."""
        before = self._last

        def work_after() -> None:
            if before is not None:
                before.result()  # raises the error of what was before, so that nothing after it is done
            work()

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lightning_turbo-save")
        self._last = self._thread.submit(work_after)

    def _wait(self) -> None:
        if self._last is not None:
            wait([self._last])  # an interrupt here leaves all as it is
            last, self._last = self._last, None
            last.result()

    def _write(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path).expanduser()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(target, follow_link=False) as partial, open(partial, "wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            cause = _system_error(error)
            if cause is None:
                raise
            raise OSError(
                cause.errno,
                f"the checkpoint {str(target)!r} could not be written ({cause.strerror}); those written before are as "
                "they were. Free space or give ModelCheckpoint another dirpath, and continue with ckpt_path='last'",
            ) from error


def _is_in_epoch(checkpoint: dict[str, Any]) -> bool:
    """Whether a checkpoint is from within an epoch; who makes one before or after them all may read it at once."""
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs = fit["epoch_progress"]["current"] if "epoch_progress" in fit else {"ready": 0, "completed": 0}
    return epochs["ready"] > epochs["completed"]


def _has_links(folder: Path) -> bool:
    """Whether there are links in a folder, whole or broken; there are none in one that has yet to be made."""
    return folder.is_dir() and any(path.is_symlink() for path in folder.iterdir())


def _system_error(error: BaseException | None) -> OSError | None:
    """The system's error behind an error: torch ends a file that it could not write with one of its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
