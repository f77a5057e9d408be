"""Writes checkpoints of a Trainer completely or not at all."""

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
    """Writes each checkpoint completely or not at all: ``Trainer(plugins=[AtomicCheckpointIO()])``.

    Lightning writes into the system's temporary folder and moves the file. If that folder is on another disk than the
    checkpoints, the move is a copy, and a kill in the middle of it or a full disk leaves half a file in place of the
    last checkpoint. This plugin writes the file beside its destination under a temporary name,
    ``.NAME.MACHINE-NUMBER.partial``, flushes it to disk (``fsync``), and then renames it in one step. If several runs
    save under one name at the same time, all succeed and the last one wins.

    The next checkpoint in a folder removes temporary files that killed processes of the same machine left there. Paths
    with a protocol, such as ``s3://``, are left to Lightning: object stores only show complete files.

    Args:
        background: Write in a thread while training continues. A save copies the checkpoint to host memory, which is
            reused by the next one and pinned for CUDA tensors. Later work on the device's stream waits for the copy;
            the host does not. A save waits for the previous one, so at most one is in progress. An error is raised by
            the next save or at the end of the run. The end of the run, or of the process, waits for the save. Files are
            removed after the saves before them, and stay if one of these fails. Saves outside epochs, such as
            ``trainer.save_checkpoint`` after ``fit`` or an error, are written at once. So are all saves into a folder
            with a link to a file, as created by ``save_last="link"``: Lightning sets the link before the thread has
            finished, and a kill would leave it dangling.

    Raises:
        LightningMismatchError: If the program uses the other import name of Lightning.
        TypeError: If ``background`` is not a bool.

    Note:
        ``fsync`` waits for the disk. Everything else, including the files, is as with Lightning's
        ``TorchCheckpointIO``; with ``background``, the tensors in the files are on the CPU.

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
        # One thread, from the first background save until ``teardown``; Python also waits for it on exit.
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None  # the last work queued for it
        # Number of batches at the first save after a teardown; -1 before that save, None once a run has trained more
        # batches.
        self._ended_at: int | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint. An existing file stays in place until the new one is complete.

        Args:
            checkpoint: Anything that ``torch.save`` accepts.
            path: Path of the file; parent folders are created.
            storage_options: An error, as in Lightning.

        Raises:
            OSError: If the file cannot be written, for example because the disk is full; with ``background``, if the
                previous one could not.
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
        """Read a checkpoint, after those in progress are written."""
        self._wait()
        return super().load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, after those in progress are written."""
        remove = super().remove_checkpoint
        if self._last is None:
            remove(path)
        else:
            self._then(lambda: remove(path))

    def teardown(self) -> None:
        """End the thread, and raise its error unless that was raised before."""
        try:
            self._wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread, self._last, self._copier = None, None, HostCopier()
            self._ended_at = -1

    def _may_wait(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> bool:
        """Return whether a file may be written while training continues."""
        in_background = self.background and storage_options is None and self._is_in_run(checkpoint)
        return in_background and not _has_links(Path(path).expanduser().parent)

    def _is_in_run(self, checkpoint: dict[str, Any]) -> bool:
        """Return whether a checkpoint is from inside an epoch of a running fit; any other may be read at once.

        An error leaves an epoch unfinished, so after a teardown only the number of batches shows that another run has
        begun.
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
        """Queue work for the thread, to run after all previous work if none of that failed."""
        before = self._last

        def work_after() -> None:
            if before is not None:
                before.result()  # raises an earlier error, so that no later work runs
            work()

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "lightning_turbo-save")
        self._last = self._thread.submit(work_after)

    def _wait(self) -> None:
        if self._last is not None:
            wait([self._last])  # an interrupt here changes nothing
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
                f"the checkpoint {str(target)!r} could not be written ({cause.strerror}); earlier ones are unchanged. "
                "Free space or give ModelCheckpoint another dirpath, and resume with ckpt_path='last'",
            ) from error


def _is_in_epoch(checkpoint: dict[str, Any]) -> bool:
    """Return whether a checkpoint is from inside an epoch; any other may be read at once."""
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs = fit["epoch_progress"]["current"] if "epoch_progress" in fit else {"ready": 0, "completed": 0}
    return epochs["ready"] > epochs["completed"]


def _has_links(folder: Path) -> bool:
    """Return whether a folder contains links, valid or broken; ``False`` if the folder does not exist yet."""
    return folder.is_dir() and any(path.is_symlink() for path in folder.iterdir())


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the system error behind an exception: torch raises its own if a file could not be written."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
