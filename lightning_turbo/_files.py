"""Atomic writes of files: the one way in which this package writes what somebody may read meanwhile."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["whole_file"]

# Locks may be known to one machine only, so that a machine removes nothing of another one.
_MACHINE = re.sub(r"\W+", "-", platform.node())
_UNFINISHED = re.compile(rf"\..+\.{re.escape(_MACHINE)}-[0-9a-f]{{32}}\.partial")


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], *, follow_link: bool = True) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` when the block succeeds, and is removed when it fails.

    A full disk, an error or a kill thus leaves the old file intact: the new one is brought to the disk (``fsync``)
    before it takes its place. Each write has a temporary name of its own, ``.NAME.MACHINE-NUMBER.partial``, so that two
    programs that write one file at a time both succeed, and the last one counts. The next write into the folder removes
    what killed processes of this machine have left there.

    Args:
        path: The file to write.
        follow_link: If ``path`` is a link, replace the file that it points to, and write directly to anything but a
            file, as ``/dev/stdout``. ``False`` replaces a link itself.
    """
    target = Path(path).resolve() if follow_link else Path(path)
    if follow_link and target.exists() and not target.is_file():
        yield target
        return
    _remove_leftovers(target.parent)
    partial, file = _begin(target)
    try:
        with file:
            yield partial
            os.fsync(file.fileno())
            if fcntl is not None:  # in its place before the lock ends, and with it the protection from others
                os.replace(partial, target)
        if fcntl is None:  # Windows moves no open file
            os.replace(partial, target)
    except OSError as error:
        if error.filename in (None, str(partial)):  # the caller does not know the temporary name
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _begin(target: Path) -> tuple[Path, BinaryIO]:
    """Make an unfinished file beside its target, in whose file system alone a rename is atomic, and lock it.

    The lock ends with the process, so that an unfinished file without one is known to be left over.
    """
    while True:
        partial = target.with_name(f".{target.name}.{_MACHINE}-{uuid.uuid4().hex}.partial")
        try:
            file = open(partial, "xb")  # noqa: SIM115 - the caller closes it
        except OSError as error:  # which names the target, as no user knows the unfinished file
            raise type(error)(error.errno, error.strerror, str(target)) from None
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks: nobody can lock, and so remove, the file
                fcntl.flock(file, fcntl.LOCK_EX)
        if partial.exists():
            return partial, file
        file.close()  # another process looked for leftovers before it was locked


def _remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files in a folder that no process holds."""
    if fcntl is None:
        return
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            # An error: its process lives, or has just ended it, or the file is somebody else's.
            with contextlib.suppress(OSError), open(path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _sync_folder(folder: Path) -> None:
    """Bring a new name in a folder to the disk."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
