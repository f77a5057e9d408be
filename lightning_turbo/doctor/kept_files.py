"""Restores files that a program writes at a point that it would normally not have reached."""

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

    ``ShortEpochs`` starts it after the last watched step, because the hooks at the end of a shortened epoch would save
    their results; ``put_back`` ends it. Until then, every file that is touched either has a copy or is known to be new:
    what cannot be copied, as on a full disk, is not written either, and the program gets the error. A Python audit hook
    reports the files; it cannot be removed, but does nothing afterwards.

    Note:
        Files that libraries write themselves, in C or in another process, are not seen.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="lightning-turbo-kept-")
        self._copies: dict[str, str | None] = {}  # copies of files and folders; None if there was none
        self._is_busy = False  # whether this object itself is accessing a file
        self._save: ReplacedMethod | None = None

    def begin(self) -> None:
        """Start keeping files."""
        self._save = ReplacedMethod(torch, "save", self._on_save)
        sys.addaudithook(self._hear)

    def put_back(self) -> None:
        """Restore all files, and remove those that did not exist before."""
        self._is_busy = True
        if self._save is not None:
            self._save.put_back()
        for path, copy in self._copies.items():
            # If one file cannot be restored, the others still are.
            with contextlib.suppress(OSError):
                _remove(path)
                if copy is not None:
                    shutil.move(copy, path)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _on_save(self, save: Callable[..., Any], obj: Any, f: Any, *given: Any, **more: Any) -> Any:
        # torch.save opens the file in C++, which audit hooks do not see.
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
        finally:
            self._is_busy = False


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)
