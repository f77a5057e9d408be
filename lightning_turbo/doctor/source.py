"""The user's own source: which frames are theirs, and which line sets what."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import site
import sysconfig
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType

import torch
from torch import nn

from lightning_turbo._lightning import Callback, LightningDataModule, LightningModule
from lightning_turbo.doctor.facts import Site

__all__ = ["Sources"]

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARIES = tuple(
    path + os.sep
    for path in {
        *(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)
# What these do for themselves is no habit of the user's.
_MACHINERY = tuple(_TORCH + part + os.sep for part in ("optim", "amp", "utils" + os.sep + "data"))
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_SHRINKING = "clear|pop|popleft|popitem|remove|discard|detach|item"
_BASES = {*LightningModule.__mro__, *LightningDataModule.__mro__, *Callback.__mro__}


class Sources:
    """Tells the user's own files from libraries and finds lines in them.

    Own is every file outside of the standard library, the site packages, torch, Lightning and this package. A library
    file that defines one of ``objects`` is adopted: its lines count where no own line is on the stack.

    Args:
        objects: The LightningModule, the DataModule and the user's callbacks.
        parts: Further objects whose own files belong to the run, such as submodules.
    """

    def __init__(self, objects: Iterable[object], parts: Iterable[object] = ()) -> None:
        self._adopted: set[str] = set()
        self.files: list[str] = []
        for each in objects:
            files = {_file_of(cls) for cls in type(each).__mro__ if cls not in _BASES}
            self._adopted.update(file for file in files if file and not file.startswith((_TORCH, _HERE)))
        for each in (*objects, *parts):
            self._add_files(_file_of(cls) for cls in type(each).__mro__)

    def add_callers(self, frame: FrameType | None) -> None:
        """Count the own files on the stack, such as the script that calls ``fit``, among the run's."""
        self._add_files(each.f_code.co_filename for each in _stack(frame))

    def _add_files(self, files: Iterable[str | None]) -> None:
        for file in files:
            if file and file not in self.files and (file in self._adopted or kind_of(file) == "own"):
                self.files.append(file)

    def site(self, frame: FrameType | None, *, through: bool = False) -> Site | None:
        """Return the innermost own line on the stack from ``frame`` outward, else the innermost adopted one.

        ``None`` if Lightning or torch's optimizers, scalers or loaders come first, whose business it then is; they
        are passed over with ``through``.
        """
        adopted = None
        for each in _stack(frame):
            file = each.f_code.co_filename
            kind = kind_of(file)
            if kind == "own":
                return _site_of(each)
            if file in self._adopted:
                adopted = adopted or _site_of(each)
            elif kind == "machinery" and not through:
                break
        return adopted

    def library(self, frame: FrameType | None) -> str:
        """Return the library between ``frame`` and the user's line; empty if the line itself is the caller."""
        found = ""
        for each in _stack(frame):
            file = each.f_code.co_filename
            if kind_of(file) != "library" or file in self._adopted:
                break
            found = _library_of(file, str(each.f_globals.get("__name__"))) or found
        return found

    def owns(self, cls: type) -> bool:
        """Whether a class is the user's."""
        file = _file_of(cls)
        return file is not None and (file in self._adopted or kind_of(file) == "own")

    def is_readable(self, cls: type) -> bool:
        """Whether the methods of a class are in a file that can be read."""
        methods = [each for each in vars(cls).values() if inspect.isfunction(each)]
        return not methods or any(_source_of(inspect.unwrap(each).__code__)[0] for each in methods)

    def layer(self, root: nn.Module, path: str) -> Site | None:
        """Return the line that makes the submodule or parameter at ``path``, as in ``named_modules``."""
        owner, _, name = path.rpartition(".")
        site = self._find(type(root.get_submodule(owner)), rf"SELF\.{re.escape(name)}\b[^=(]*=[^=]")
        return site or (self.layer(root, owner) if owner else None)

    def change(self, cls: type, name: str) -> Site | None:
        """Return the line that changes ``self.name`` outside of ``__init__``: an append, an assignment, a call."""
        pattern = rf"SELF\.{re.escape(name)}\b(?!\.({_SHRINKING})\b)\s*([\[.(]|,.*=|[-+*/|&]?=[^=])"
        return self._find(cls, pattern, skip="__init__")

    def call(self, cls: type, method: str, *names: str) -> Site | None:
        """Return the line in an own method that calls one of ``names``, else the line of the method itself."""
        return self._find(cls, _called(names), only=method) or self._find(cls, rf"def {method}\b", only=method)

    def setting(self, *names: str, off: bool = False) -> Site | None:
        """Return the first own line that gives one of ``names`` as a keyword, calls it or assigns it.

        What is switched off, by ``False`` or ``None``, does not count; with ``off``, nothing else does.
        """
        switch = r"\s*(False|None)\b" if off else r"(?!\s*(False\b|None\b|\)))"
        found = self._search(rf"\b({'|'.join(names)})[\"']?\s*[=:(]{switch}")
        return found[0] if found else None

    def call_anywhere(self, *names: str) -> Site | None:
        """Return the only own line that calls one of ``names``; ``None`` if there are none or several."""
        found = self._search(_called(names))
        return found[0] if len(found) == 1 else None

    def _search(self, pattern: str) -> list[Site]:
        files = ((file, linecache.getlines(file)) for file in self.files)
        return [Site(file=file, line=n) for file, lines in files for n in _matches(pattern, lines)]

    def _find(self, cls: type, pattern: str, only: str = "", skip: str = "") -> Site | None:
        """Return the first line of the methods of an own class and its own bases that matches.

        SELF in ``pattern`` is what the method calls its object.
        """
        for base in filter(self.owns, cls.__mro__):
            for name, method in vars(base).items():
                if inspect.isfunction(method) and only in ("", name) and name != skip:
                    code = inspect.unwrap(method).__code__
                    lines, start = _source_of(code)
                    own = code.co_varnames[0] if code.co_argcount else "self"
                    for n in _matches(pattern.replace("SELF", rf"\b{own}"), lines):
                        return Site(file=code.co_filename, line=start + n - 1, function=name)
        return None


def kind_of(file: str) -> str:
    """Return ``"own"``, ``"machinery"`` (whose doings are not the user's) or ``"library"``."""
    if file.startswith(("<", _HERE)):
        return "library"
    if file.startswith(_TORCH):
        return "machinery" if file.startswith(_MACHINERY) else "library"
    if file.startswith(_LIBRARIES):
        return "machinery" if any(f"{os.sep}{name}{os.sep}" in file for name in _LIGHTNING) else "library"
    return "own"


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _site_of(frame: FrameType) -> Site:
    return Site(file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name)


def _library_of(file: str, module: str) -> str:
    """The name by which a user knows a library's file; empty for torch's own calls of functions and modules."""
    if file.startswith(_TORCH):
        layer = "nn.modules." in module and not module.endswith("modules.module")
        parts = [part for part in ("torch.distributions", "torch.utils.tensorboard") if module.startswith(part)]
        return parts[0] if parts else "a layer of torch" if layer else ""
    return module.partition(".")[0] if "site-packages" in file and not file.startswith(_HERE) else ""


def _file_of(cls: type) -> str | None:
    """The file of a class's own methods; classes made by exec have no other."""
    for value in vars(cls).values():
        function = inspect.unwrap(value) if inspect.isfunction(value) else None
        if (
            function is not None
            and not function.__code__.co_filename.startswith("<")
            and (function.__module__ == cls.__module__)
        ):
            return function.__code__.co_filename
    try:
        return inspect.getsourcefile(cls)
    except (TypeError, OSError):
        return None


def _source_of(code: CodeType) -> tuple[list[str], int]:
    """The lines of a function and the number of the first; none of code that is in no file."""
    try:
        return inspect.getsourcelines(code)
    except (OSError, TypeError, IndexError):
        return [], 0


def _called(names: Iterable[str]) -> str:
    return rf"\b({'|'.join(names)})\("


def _matches(pattern: str, lines: list[str]) -> Iterator[int]:
    """The numbers, from 1, of lines that match outside of comments."""
    return (n for n, line in enumerate(lines, 1) if re.search(pattern, line.partition("#")[0]))
