"""Examines the user's source: which frames are the user's, and which line creates or changes what."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from lightning_turbo._lightning import Callback, LightningDataModule, LightningModule
from lightning_turbo.doctor.facts import Site

__all__ = ["LIGHTNING", "Sources", "kind_of", "package_of"]

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = tuple(sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib"))
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
"""A file of an installed package, in this environment or another one on the path, with the package's name."""
# What these do by themselves is not the user's doing.
_MACHINERY = tuple(_TORCH + part + os.sep for part in ("optim", "amp", os.path.join("utils", "data")))
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_PARTS_OF_TORCH = {
    "torch.distributions": "torch.distributions",
    "torch.utils.tensorboard": "torch.utils.tensorboard",
    "torch.nn.modules.module": "",
    "torch.nn.modules.": "a layer of torch",
}
_SHRINKING = "clear|pop|popleft|popitem|remove|discard|detach|item"
_BASES = {*LightningModule.__mro__, *LightningDataModule.__mro__, *Callback.__mro__}


class Sources:
    """Distinguishes the user's own files from libraries, and finds lines in them.

    Every file outside the standard library, site-packages, torch, Lightning and this package is the user's own. An
    installed package that defines one of ``objects`` is adopted: its lines count if no own line is on the stack.

    A ``Session`` creates it and drops it with itself. It reads files and frames, and changes nothing.

    Args:
        objects: The LightningModule, the DataModule and the user's callbacks.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        files = {_file_of(cls) for each in objects for cls in set(type(each).__mro__) - _BASES}
        self._first = {file for file in files if not file.startswith(("<", _TORCH, _HERE))}
        self.adopted = frozenset(map(package_of, self._first)) - {"", *LIGHTNING}

    def site(self, frame: FrameType | None) -> Site | None:
        """Return the innermost own line on the stack from ``frame`` outward, otherwise the innermost adopted one.

        ``None`` if Lightning or torch's optimizers, scalers or loaders come first, because they are then responsible.
        """
        # An own line wins over a nearer line of an adopted library, because the user can change it.
        adopted = None
        for each in _stack(frame):
            kind = self._kind_of(each.f_code.co_filename)
            if kind == "own":
                return _site_of(each)
            if kind == "adopted":
                adopted = adopted or _site_of(each)
            elif kind == "machinery":
                break
        return adopted

    def caller(self, frame: FrameType | None) -> FrameType | None:
        """Return the first own or adopted frame from ``frame`` outward, however near."""
        return next((each for each in _stack(frame) if self.owns_file(each.f_code.co_filename)), None)

    def library(self, frame: FrameType | None) -> str:
        """Return the library between ``frame`` and the user's line; empty if that line itself is the caller."""
        found = ""
        for each in _stack(frame):
            if self._kind_of(each.f_code.co_filename) != "library":
                break
            found = _library_of(each) or found
        return found

    def owns(self, cls: type) -> bool:
        """Return whether a class is the user's."""
        return self.owns_file(_file_of(cls))

    def owns_file(self, file: str) -> bool:
        """Return whether a file is the user's, or of an adopted package."""
        return self._kind_of(file) in ("own", "adopted")

    def layer(self, root: nn.Module, path: str) -> Site | None:
        """Return the line that creates the submodule or parameter at ``path``, as in ``named_modules``."""
        owner, _, name = path.rpartition(".")
        found = self._find(type(root.get_submodule(owner)), rf"SELF\.{re.escape(name)}\b[^=(]*=[^=]")
        return found or (self.layer(root, owner) if owner else None)

    def setting(self, name: str, caller: Site | None = None) -> Site | None:
        """Return the first line that passes or calls a setting, a regular expression, but not with ``False``.

        Searched are the files of ``objects`` and of ``caller``; if none has it, all own files, of which one must.
        """
        near = self._first | ({caller.file} if caller else set())
        if found := self._settings(near, name):
            return found[0]
        files = {str(getattr(each, "__file__", None)) for each in list(sys.modules.values())} - {"None"}
        found = self._settings(files, name)
        return found[0] if len(found) == 1 else None

    def change(self, cls: type, name: str) -> Site | None:
        """Return the line that changes ``self.name`` outside ``__init__``: an append, an assignment, a call."""
        pattern = rf"SELF\.{re.escape(name)}\b(?!\.({_SHRINKING})\b)\s*([\[.(]|,.*=|[-+*/|&]?=[^=])"
        return self._find(cls, pattern, skip="__init__")

    def call(self, cls: type, method: str, *names: str) -> Site | None:
        """Return the line in an own method that calls one of ``names``, otherwise the line of the method itself."""
        patterns = (rf"\b({'|'.join(names)})\(", rf"def {method}\b")
        found = (self._find(cls, pattern, only=method) for pattern in patterns)
        return next(filter(None, found), None)

    def method(self, owner: object, name: str) -> Site | None:
        """Return the first line of an own method."""
        return self.function(getattr(type(owner), name, None))

    def function(self, function: Any) -> Site | None:
        """Return the first line of an own function, or of the ``__call__`` of an own object."""
        function = getattr(function, "func", function)  # of a partial object
        code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
        if code is None or not self.owns_file(code.co_filename):
            return None
        return Site(file=code.co_filename, line=code.co_firstlineno, function=code.co_name)

    def _kind_of(self, file: str) -> str:
        kind = kind_of(file)
        return "adopted" if kind != "own" and package_of(file) in self.adopted else kind

    def _settings(self, files: Iterable[str], name: str) -> list[Site]:
        own = sorted(filter(self.owns_file, files))
        lines = {file: _find_setting("".join(linecache.getlines(file)), name) for file in own}
        return [Site(file=file, line=line) for file, line in lines.items() if line]

    def _find(self, cls: type, pattern: str, only: str = "", skip: str = "") -> Site | None:
        """Return the first matching line in the methods of an own class and its own bases.

        SELF in ``pattern`` stands for the method's name of its instance.
        """
        methods = chain.from_iterable(map(_methods, filter(self.owns, cls.__mro__)))
        codes = (each.__code__ for each in methods)
        found = (_search(code, pattern) for code in codes if only in ("", code.co_name) and code.co_name != skip)
        return next(filter(None, found), None)


@cache
def package_of(file: str) -> str:
    """Return the installed package that a file is of; empty for other files."""
    installed = _INSTALLED.search(file)
    if installed:
        return installed[1]
    return "torch" if file.startswith(_TORCH) else "lightning_turbo" if file.startswith(_HERE) else ""


@cache
def kind_of(file: str) -> str:
    """Return ``"own"``, ``"machinery"`` (not the user's doing) or ``"library"``."""
    installed = _INSTALLED.search(file)
    if file.startswith(_MACHINERY) or (installed and installed[1] in LIGHTNING):
        return "machinery"
    return "library" if installed or file.startswith(("<", _HERE, _TORCH, *_STANDARD)) else "own"


def _find_setting(source: str, name: str) -> int:
    """Return the first line that passes or calls a setting, but not with ``False``; 0 if there is none."""
    pattern = rf"\b{name}(\s*[=(]|['\"]\s*:)(?!\s*(\w+=)?False\b)"
    lines = enumerate(source.splitlines(), 1)
    return next((number for number, line in lines if re.search(pattern, line.partition("#")[0])), 0)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _site_of(frame: FrameType) -> Site:
    return Site(file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name)


def _library_of(frame: FrameType) -> str:
    """Return the name by which a user knows the library of a frame; empty for torch's own plumbing."""
    file = frame.f_code.co_filename
    module = str(frame.f_globals.get("__name__"))
    if file.startswith(_TORCH):
        found = (name for start, name in _PARTS_OF_TORCH.items() if module.startswith(start))
        return next(found, "")
    return module.partition(".")[0] if _INSTALLED.search(file) or file.startswith(_STANDARD) else ""


def _methods(cls: type) -> Iterator[Any]:
    return map(inspect.unwrap, filter(inspect.isfunction, vars(cls).values()))


def _file_of(cls: type) -> str:
    """Return the file of a class's own methods, otherwise of its module; "<unknown>" if there is no file."""
    files = (each.__code__.co_filename for each in _methods(cls) if getattr(each, "__module__", "") == cls.__module__)
    module = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return next((file for file in files if not file.startswith("<")), module or "<unknown>")


def _search(code: CodeType, pattern: str) -> Site | None:
    """Return the first matching line of a function, outside comments; none for code without a file."""
    try:
        lines, start = inspect.getsourcelines(code)
    except (OSError, TypeError, IndexError):
        return None
    own = code.co_varnames[0] if code.co_argcount else "self"
    pattern = pattern.replace("SELF", rf"\b{own}")
    for number, line in enumerate(lines, start):
        if re.search(pattern, line.partition("#")[0]):
            return Site(file=code.co_filename, line=number, function=code.co_name)
    return None
