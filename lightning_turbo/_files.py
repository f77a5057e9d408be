"""Atomic file writes: the only way in which this package writes files that others may read meanwhile."""

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

# File locks may be local to one machine, so a machine removes only its own leftovers.
_MACHINE = re.sub(r"\W+", "-", platform.node())
_UNFINISHED = re.compile(rf"\..+\.{re.escape(_MACHINE)}-[0-9a-f]{{32}}\.partial")


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], *, follow_link: bool = True) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` if the block succeeds and is removed if it fails.

    A full disk, an error or a kill leaves the old file intact: the new one is flushed to disk (``fsync``) before it
    takes its place. Each write has its own temporary name, ``.NAME.MACHINE-NUMBER.partial``, so if two programs write
    the same file, both succeed and the last one wins. The next write into the folder removes what killed processes of
    this machine left there.

    Args:
        path: The file to write.
        follow_link: If ``path`` is a link, replace the file that it points to; write directly to anything that is not
            a regular file, such as ``/dev/stdout``. ``False`` replaces the link itself.
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
            if fcntl is not None:  # while the lock still protects the file
                os.replace(partial, target)
        if fcntl is None:  # Windows cannot rename an open file
            os.replace(partial, target)
    except OSError as error:
        if error.filename in (None, str(partial)):  # the caller does not know the temporary name
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _begin(target: Path) -> tuple[Path, BinaryIO]:
    """Create and lock a temporary file beside its target, because a rename is atomic only within a file system.

    The lock ends with the process, so an unlocked temporary file is a leftover.
    """
    while True:
        partial = target.with_name(f".{target.name}.{_MACHINE}-{uuid.uuid4().hex}.partial")
        try:
            file = open(partial, "xb")  # noqa: SIM115 - the caller closes it
        except OSError as error:  # name the target: the user does not know the temporary name
            raise type(error)(error.errno, error.strerror, str(target)) from None
        if fcntl is not None:
            with contextlib.suppress(OSError):  # without locks nobody removes the file either
                fcntl.flock(file, fcntl.LOCK_EX)
        if partial.exists():
            return partial, file
        file.close()  # another process removed it as a leftover before it was locked


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files in a folder that no process has locked."""
    if fcntl is None:
        return
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            # On an error the writer is alive or has just finished, or the file belongs to somebody else.
            with contextlib.suppress(OSError), open(path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
