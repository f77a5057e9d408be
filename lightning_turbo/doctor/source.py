"""The user's own source: which frames are theirs, and which line sets what."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import site
import sysconfig
from collections.abc import Iterable, Iterator
from types import FrameType

import torch
from torch import nn

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
_LAYERS = _TORCH + os.path.join("nn", "modules") + os.sep
_LIGHTNING = tuple(f"{os.sep}{name}{os.sep}" for name in ("lightning", "pytorch_lightning", "lightning_fabric"))


class Sources:
    """Tells the user's own files from libraries and finds lines in them.

    Own is every file outside of the standard library, the site packages, torch, Lightning and this package, and the
    files that define ``objects``, wherever they are.

    Args:
        objects: The LightningModule, the DataModule and the callbacks of the run.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._kinds: dict[str, str] = {}
        self._trees: dict[str, ast.Module | None] = {}
        self._classes: list[type] = []
        self.files: list[str] = []
        for each in objects:
            for cls in type(each).__mro__:
                file = _file_of(cls)
                if file and cls is type(each) and not file.startswith((_TORCH, _HERE)):
                    self._kinds[file] = "own"
                if self.owns(cls) and cls not in self._classes:
                    self._classes.append(cls)
                if file and self.kind(file) == "own" and file not in self.files:
                    self.files.append(file)

    def kind(self, file: str) -> str:
        """Return ``"own"``, ``"machinery"`` (whose doings are not the user's) or ``"library"``."""
        kind = self._kinds.get(file)
        if kind is None:
            kind = self._kinds[file] = _kind(file)
        return kind

    def site(self, frame: FrameType | None, *, through: bool = False) -> Site | None:
        """Return the innermost own line on the stack from ``frame`` outward.

        ``None`` if Lightning or torch's optimizers, scalers or loaders come first, whose business it then is; they
        are passed over with ``through``.
        """
        while frame is not None:
            kind = self.kind(frame.f_code.co_filename)
            if kind == "own":
                return Site(file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name)
            if kind == "machinery" and not through:
                return None
            frame = frame.f_back
        return None

    def in_a_layer(self, frame: FrameType | None) -> bool:
        """Whether one of torch's own layers is on the stack before an own line."""
        while frame is not None and self.kind(frame.f_code.co_filename) != "own":
            if frame.f_code.co_filename.startswith(_LAYERS):
                return True
            frame = frame.f_back
        return False

    def add_callers(self, frame: FrameType | None) -> None:
        """Count the own files on the stack, such as the script that calls ``fit``, among the run's."""
        while frame is not None:
            file = frame.f_code.co_filename
            if self.kind(file) == "own" and file not in self.files:
                self.files.append(file)
            frame = frame.f_back

    def owns(self, cls: type) -> bool:
        """Whether a class is the user's."""
        file = _file_of(cls)
        return file is not None and self.kind(file) == "own"

    def unreadable(self) -> list[str]:
        """Say which methods of the run's own classes cannot be read, and why: a sentence for each of their files."""
        methods: dict[str, list[str]] = {}
        for cls in self._classes:
            for name, file in _written(cls):
                if self.kind(file) == "own" and self.tree(file) is None:
                    methods.setdefault(file, []).append(f"{cls.__qualname__}.{name}")
        return [
            f"the code of {', '.join(names)} cannot be read, because "
            + (
                f"it was typed at a prompt, piped in or made by exec ({file})"
                if file.startswith("<")
                else f"{file} is not there or no Python source"
            )
            + ": findings there have no diff, and what is found by reading code is not found. "
            "Put it in a file"
            for file, names in methods.items()
        ]

    def tree(self, file: str) -> ast.Module | None:
        """Return the file's syntax tree, or ``None`` if it cannot be read or parsed."""
        if file not in self._trees:
            lines = linecache.getlines(file)
            try:
                self._trees[file] = ast.parse("".join(lines)) if lines else None
            except (SyntaxError, ValueError):
                self._trees[file] = None
        return self._trees[file]

    def class_node(self, cls: type) -> tuple[str, ast.ClassDef] | None:
        """Return an own class's file and syntax tree."""
        file = _file_of(cls)
        if file is None or self.kind(file) != "own":
            return None
        tree = self.tree(file)
        found = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == cls.__name__] if tree else []
        return (file, found[-1]) if found else None

    def assignment(self, cls: type, name: str) -> tuple[str, ast.AST, ast.AST] | None:
        """Find ``self.name = value`` in an own class or its own bases; returns file, statement and value."""
        for base in cls.__mro__:
            node = self.class_node(base)
            for method, own in _methods(node[1]) if node is not None else ():
                for statement in ast.walk(method):
                    targets, value = _assigned(statement)
                    if node is not None and value is not None and any(_is_own(target, own, name) for target in targets):
                        return node[0], statement, value
        return None

    def layer(self, root: nn.Module, path: str) -> Site | None:
        """Return the line that makes the submodule or parameter at ``path``, as in ``named_modules``."""
        parts = path.split(".")
        for i in reversed(range(len(parts))):
            found = self.assignment(type(root.get_submodule(".".join(parts[:i]))), parts[i])
            if found is not None:
                file, _, value = found
                for part in parts[i + 1 :]:
                    if not (isinstance(value, ast.Call) and part.isdigit() and int(part) < len(value.args)):
                        break
                    if any(isinstance(arg, ast.Starred) for arg in value.args[: int(part) + 1]):
                        break
                    value = value.args[int(part)]
                return Site(file=file, line=getattr(value, "lineno", 1))
        return None

    def change(self, cls: type, name: str) -> Site | None:
        """Return the line that changes ``self.name`` outside of ``__init__``: an append, an assignment, ``+=``."""
        for base in cls.__mro__:
            node = self.class_node(base)
            for method, own in _methods(node[1]) if node is not None else ():
                if method.name != "__init__":
                    for statement in ast.walk(method):
                        if node is not None and _changes(statement, own, name):
                            return Site(file=node[0], line=statement.lineno, function=method.name)  # type: ignore[attr-defined]
        return None

    def setting(self, *names: str, off: bool = False) -> Site | None:
        """Return the first own line that gives one of ``names`` as a keyword, calls it or assigns it.

        What is switched off, by ``False`` or ``None``, does not count; with ``off``, nothing else does.
        """
        for file in self.files:
            for node in ast.walk(self.tree(file) or ast.Module(body=[], type_ignores=[])):
                for name, where, value in _settings(node):
                    switched_off = isinstance(value, ast.Constant) and value.value in (False, None)
                    if name in names and switched_off is off:
                        return Site(file=file, line=where.lineno)
        return None

    def call(self, cls: type, method: str, *names: str) -> Site | None:
        """Return the line in an own method that calls one of ``names``, else the line of the method itself."""
        for base in cls.__mro__:
            node = self.class_node(base)
            for function in node[1].body if node else ():
                if isinstance(function, ast.FunctionDef) and function.name == method and node is not None:
                    for each in ast.walk(function):
                        if isinstance(each, ast.Call) and _last_name(each.func) in names:
                            return Site(file=node[0], line=each.lineno, function=method)
                    return Site(file=node[0], line=function.lineno, function=method)
        return None

    def call_anywhere(self, *names: str) -> Site | None:
        """Return the only own line that calls one of ``names``; ``None`` if there are none or several."""
        found = [
            Site(file=file, line=node.lineno)
            for file in self.files
            for node in ast.walk(self.tree(file) or ast.Module(body=[], type_ignores=[]))
            if isinstance(node, ast.Call) and _last_name(node.func) in names
        ]
        return found[0] if len(found) == 1 else None


def _file_of(cls: type) -> str | None:
    for _, file in _written(cls):
        return file
    try:
        return inspect.getsourcefile(cls)
    except (TypeError, OSError):
        return None


def _written(cls: type) -> Iterator[tuple[str, str]]:
    """The methods that a class's author wrote, and their files; those that ``dataclass`` made have none."""
    made = "__dataclass_fields__" in vars(cls)
    for name, value in vars(cls).items():
        if inspect.isfunction(value) and not (made and name.startswith("__")):
            function = inspect.unwrap(value)
            # Run by exec among names without a __name__, a function has no module and a class that of the built-ins.
            if (function.__module__ or "builtins") == cls.__module__:
                yield name, function.__code__.co_filename


def _kind(file: str) -> str:
    if file.startswith("<"):
        return "library"
    if file.startswith(_HERE):
        return "library"
    if file.startswith(_TORCH):
        return "machinery" if file.startswith(_MACHINERY) else "library"
    if file.startswith(_LIBRARIES):
        return "machinery" if any(name in file for name in _LIGHTNING) else "library"
    return "own"


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _methods(node: ast.ClassDef) -> Iterator[tuple[ast.FunctionDef, str]]:
    """The methods of a class, each with what it calls its object: its first argument, ``self`` or otherwise."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef):
            arguments = [*method.args.posonlyargs, *method.args.args]
            free = any(_last_name(each) == "staticmethod" for each in method.decorator_list)
            yield method, arguments[0].arg if arguments and not free else ""


def _is_own(node: ast.AST, own: str, name: str) -> bool:
    """Whether a node is the attribute ``name`` of the object that is called ``own``."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == own
    )


def _assigned(node: ast.AST) -> tuple[list[ast.expr], ast.expr | None]:
    if isinstance(node, ast.Assign):
        return node.targets, node.value
    if isinstance(node, ast.AnnAssign):
        return [node.target], node.value
    return [], None


def _changes(node: ast.AST, own: str, name: str) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        return (
            isinstance(function, ast.Attribute)
            and function.attr in ("append", "extend", "add", "insert", "appendleft", "setdefault", "update")
            and (_is_own(function.value, own, name) or _is_item_of(function.value, own, name))
        ) or _is_own(function, own, name)
    if isinstance(node, ast.AugAssign):
        return _is_own(node.target, own, name) or _is_item_of(node.target, own, name)
    targets, _ = _assigned(node)
    flat = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return any(_is_own(target, own, name) or _is_item_of(target, own, name) for target in flat)


def _is_item_of(node: ast.AST, own: str, name: str) -> bool:
    return isinstance(node, ast.Subscript) and _is_own(node.value, own, name)


def _settings(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.expr | None]]:
    if isinstance(node, ast.Call):
        first = node.args[0] if node.args else None
        yield _last_name(node.func), node, first
        for keyword in node.keywords:
            if keyword.arg:
                yield keyword.arg, keyword.value, keyword.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                yield target.attr, node, node.value
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, value, value
