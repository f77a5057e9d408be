"""Atomic writes of files."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["whole_file"]


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` when the block succeeds, and is removed when it fails.

    A full disk thus leaves the old file intact. The temporary name is unique, so that two programs that write to one
    folder do not remove each other's files.

    Args:
        path: The file to write. For a link, its target is replaced. Anything but a file, such as ``/dev/stdout``, is
            written to directly.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        yield target
        return
    # In the same folder: a rename is atomic within one file system only.
    partial = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
    try:
        yield partial
        os.replace(partial, target)
    except OSError as error:
        if error.filename in (None, str(partial)):  # the caller does not know the temporary name
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
