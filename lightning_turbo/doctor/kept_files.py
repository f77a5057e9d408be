"""Files that a program writes at a moment that it would not have come to: put back as they were."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_turbo._replaced import ReplacedMethod

__all__ = ["KeptFiles"]

WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC | os.O_CREAT


class KeptFiles:
    """Keeps a copy of each file that Python code or ``torch.save`` is about to write, replace or remove.

    Who starts it: ``ShortEpochs``, behind the last step that was watched, as the hooks at the end of an epoch that was
    cut short would save what it came to. What ends it: ``put_back``. What always holds: until then each file that was
    touched has a copy from before, or is known to be new. An audit hook of Python, which lasts as long as the process,
    tells of the files, and does nothing afterwards.

    Note:
        Files that libraries write by themselves, in C or in another process, are not seen.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="lightning-turbo-kept-")
        self._copies: dict[str, str | None] = {}  # of files and folders; None of one that was not there
        self._is_busy = False  # whether this object itself is at a file
        self._save: ReplacedMethod | None = None

    def begin(self) -> None:
        """Begin to keep files."""
        self._save = ReplacedMethod(torch, "save", self._on_save)
        sys.addaudithook(self._hear)

    def put_back(self) -> None:
        """Put all files back as they were, and remove those that were not there."""
        self._is_busy = True
        if self._save is not None:
            self._save.put_back()
        for path, copy in self._copies.items():
            # One file that cannot be put back is no reason to leave the others.
            with contextlib.suppress(OSError):
                _remove(path)
                if copy is not None:
                    shutil.move(copy, path)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _on_save(self, save: Callable[..., Any], obj: Any, f: Any, *given: Any, **more: Any) -> Any:
        # It opens the file in C++, of which no audit hook hears.
        if isinstance(f, (str, os.PathLike)):
            self._keep(f)
        return save(obj, f, *given, **more)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_busy:
            return
        if event == "open":
            path, mode, flags = args
            writes = any(each in mode for each in "wax+") if isinstance(mode, str) else bool((flags or 0) & WRITES)
            if writes:
                self._keep(path)
        elif event in ("os.remove", "shutil.rmtree", "os.truncate"):
            self._keep(args[0])
        elif event in ("os.rename", "os.link", "os.symlink", "shutil.move"):
            self._keep(args[0])
            self._keep(args[1])

    def _keep(self, path: Any) -> None:
        if self._is_busy or not isinstance(path, (str, bytes, os.PathLike)):
            return
        self._is_busy = True
        try:
            name = os.path.abspath(os.fsdecode(path))
            there = os.path.lexists(name)
            if name in self._copies or name.startswith((self._folder, "/dev/", "/proc/")):
                return
            if there and not (os.path.isfile(name) or os.path.isdir(name)):
                return
            copy = str(Path(self._folder) / str(len(self._copies)))
            if os.path.isdir(name):
                shutil.copytree(name, copy, symlinks=True)
            elif there:
                shutil.copy2(name, copy, follow_symlinks=False)
            self._copies[name] = copy if there else None
        except OSError:
            pass  # what cannot be read cannot be lost by reading it: the program has its own error, if there is one
        finally:
            self._is_busy = False


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)
