"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["whole_file"]


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path beside ``path`` to write to, which takes its place when the block ends well, and goes if it does not.

    Until then what is there stays: a full disk costs nothing that was written before. Each writer has a name of its
    own, so that two programs with the same folder do not take each other's file away.

    Args:
        path: The file to write; a link's target is replaced, not the link. What is no file, as ``/dev/stdout``, is
            written to as it is.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        yield target
        return
    partial = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
    try:
        yield partial
        os.replace(partial, target)
    except OSError as error:
        if error.filename in (None, str(partial)):  # the reader knows the file by its own name
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
