"""``cache_transforms``: what a dataset returns, packed once and found again as long as it follows from the same."""

from __future__ import annotations

import copyreg
import hashlib
import os
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_turbo._checks import expect
from lightning_turbo._random import GENERATORS, GeneratorWatch
from lightning_turbo.data.packed.packing import Packing, Progress, digest_of, stamp_of

__all__ = ["cache_transforms"]

PLAIN = (bool, int, float, complex, bytes, type(None), type(...))
CONTAINERS = (list, tuple, dict, set, frozenset)


def cache_transforms(
    dataset: Any,
    folder: str | os.PathLike[str],
    *,
    foreground: str | None = None,
    compress: bool | Sequence[int] = False,
    num_workers: int = 0,
    version: str = "",
    progress: Progress | None = None,
) -> Path:
    """Return a folder with the samples of ``dataset``, packed now or in an earlier run, for ``PackedDataset``.

    The deterministic part of a pipeline, which reads, resamples and normalises, runs once; random transforms follow as
    ``sample_transform`` of ``PackedDataset`` or ``transform`` of ``PatchDataset``. The folder's name is a digest of
    what the samples follow from: all that the dataset and its transforms hold (files by path, size and time of writing,
    arrays by their content), the code of their classes and functions with the functions and constants of the same
    module that these name, but not lists and dictionaries of a module, and the versions of the packages. When something
    of it changes, another folder is filled; old ones stay until they are removed.

    Several processes may call it at once, as the ranks of a run do: one packs, while the others wait. It takes
    a folder of its own on each node, or one that the nodes share. What is interrupted goes on with the next call.

    Args:
        dataset: Has ``__getitem__`` and ``__len__``; its samples are those that ``pack`` takes, without random numbers.
        folder: Where the packed folders lie.
        foreground: As for ``pack``.
        compress: As for ``pack``.
        num_workers: Number of processes that load samples.
        version: What else the samples follow from, such as the version of a helper module; change it to pack again.
        progress: Called with the number of finished samples and of all samples.

    Raises:
        TypeError: If the dataset holds something of which no digest can be made, such as an open file.
        ValueError: If loading a sample draws random numbers.

    Example:
        >>> import tempfile
        >>> from lightning_turbo.data import PackedDataset
        >>> folder = tempfile.mkdtemp()
        >>> cached = cache_transforms([torch.ones(2), torch.ones(3)], folder)
        >>> cached == cache_transforms([torch.ones(2), torch.ones(3)], folder), PackedDataset(cached)[1]
        (True, tensor([1., 1., 1.]))
    """
    described = _Digest()
    described.add(dataset)
    # The instructions of one source differ between versions of Python.
    key = digest_of(described.hexdigest(), sys.version_info[:2], version, foreground, compress)
    packing = Packing(Path(folder) / key[:32], compress, num_workers, progress=progress, exist_ok=True)
    if not packing.target.exists():
        with GeneratorWatch(dataset) as watch:
            dataset[0]
        what = "a dataset without random numbers; move random transforms behind the cache"
        expect(not watch.drew, "dataset", " and ".join(watch.drew), what)
        contents = {"classes": list(getattr(dataset, "classes", ())), "foreground": foreground}
        packing.write(dataset, key, contents, catch=False)
    return packing.target


class _Digest:
    """A digest of objects by what their behaviour follows from; the same in each process and run."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, tuple[int, Any]] = {}  # objects too: an id is taken again when they are gone

    def hexdigest(self) -> str:
        """Return the digest of what was added."""
        return self._hash.hexdigest()

    def _tell(self, *parts: Any) -> None:
        self._hash.update(f"{parts!r}\n".encode())

    def add(self, value: Any) -> None:
        """Add a value with all that it holds."""
        if isinstance(value, (str, os.PathLike)):
            self._add_text(os.fspath(value))
        elif isinstance(value, PLAIN):
            self._tell(type(value).__name__, value)
        # Seen before, or around itself: told by its number, so that two that are one differ from two that are equal.
        elif id(value) in self._seen:
            self._tell("again", self._seen[id(value)][0])
        else:
            self._seen[id(value)] = len(self._seen), value
            self._add_parts(value)

    def _add_text(self, text: str) -> None:
        self._tell("str", stamp_of(Path(text)) if len(text) < 4096 and os.path.isfile(text) else text)

    def _add_parts(self, value: Any) -> None:
        if isinstance(value, (torch.Tensor, np.ndarray)) and value.dtype != object:
            self._add_array(value)
        elif type(value) in CONTAINERS:
            self._add_all(type(value).__name__, _items_of(value))
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.ModuleType):
            self._tell("module", value.__name__, _version_of(value.__name__))
        elif not isinstance(value, GENERATORS):  # whose state no sample follows from
            self._add_object(value)

    def _add_array(self, value: Any) -> None:
        kind, shape = str(value.dtype), tuple(value.shape)
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._tell("array", kind, shape, hashlib.sha256(value.tobytes()).hexdigest())

    def _add_all(self, kind: Any, parts: Any) -> None:
        self._tell(kind, len(parts))
        for part in parts:
            self.add(part)

    def _add_object(self, value: Any) -> None:
        """Add an object as it would be pickled: its class, and its state; or a name, as of a built-in function."""
        reducer = copyreg.dispatch_table.get(type(value))
        try:
            reduced = value.__reduce_ex__(4) if reducer is None else reducer(value)
        except Exception as error:  # objects raise what they like
            what = "parameters and files, of which a digest can be made"
            raise TypeError(f"dataset: expected {what}, got {type(value).__name__} ({error}).") from error
        self.add(type(value))
        self._add_all("object", [reduced] if isinstance(reduced, str) else [_listed(part) for part in reduced])

    def _add_class(self, kind: type) -> None:
        """Add the code and the constants of a class and its parents."""
        for each in kind.__mro__[:-1]:
            self._tell("class", each.__module__, each.__qualname__, _version_of(each.__module__))
            for name, part in sorted(vars(each).items()):
                for inside in ("__func__", "fget", "func"):  # of a method of the class, a property, a cached one
                    part = getattr(part, inside, part)
                # Python 3.14 keeps annotations as a function, which holds the whole class.
                is_code = name != "__annotate_func__" and isinstance(part, (types.FunctionType, str, *PLAIN))
                # Python's own containers there, as annotations, say nothing of samples.
                is_container = type(part) in CONTAINERS and not name.startswith("__")
                if is_code or is_container:
                    self._tell(name)
                    self.add(part)

    def _add_function(self, function: types.FunctionType) -> None:
        """Add a function: its code, what it holds, and the functions and constants of its module that it names."""
        self._tell("function", function.__module__, function.__qualname__, _version_of(function.__module__))
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        self._add_all("holds", [*cells, function.__defaults__, function.__kwdefaults__])
        for name in self._add_code(function.__code__):
            part = function.__globals__.get(name)
            own = isinstance(part, (types.FunctionType, type)) and part.__module__ == function.__module__
            if own or (name in function.__globals__ and isinstance(part, (str, *PLAIN, tuple))):
                self._tell(name)
                self.add(part)

    def _add_code(self, code: types.CodeType) -> list[str]:
        """Add the instructions of a function, and return the names in it, also of functions inside."""
        self._tell("code", code.co_code, code.co_names, code.co_varnames, code.co_freevars)
        names = list(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names += self._add_code(constant)
            else:
                self.add(constant)
        return names


def _items_of(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return sorted(container, key=repr) if isinstance(container, (set, frozenset)) else list(container)


def _listed(part: Any) -> Any:
    """Return the iterators in what ``__reduce_ex__`` returns, over the items of a container, as lists."""
    return list(part) if hasattr(part, "__next__") else dict(part) if isinstance(part, Mapping) else part


def _is_filled(cell: types.CellType) -> bool:
    try:
        return bool([cell.cell_contents])
    except ValueError:
        return False


def _version_of(module: str) -> str:
    return str(getattr(sys.modules.get(module.partition(".")[0]), "__version__", ""))
