"""Checks, before worker processes start, that a dataset and its functions can be sent to them."""

from __future__ import annotations

import multiprocessing
import types
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

__all__ = ["check_workers_can_start", "error_of", "start_method"]

MAX_DEPTH = 20


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _Trial(ForkingPickler):
    """Pickles for nobody: the bytes of arrays and what only goes along while a process starts are left out.

    A process that is forked has all of its parent's memory. What it cannot use is what the system keeps for the parent,
    such as an open file, which cannot be pickled either; functions, classes and modules it can.
    """

    def __init__(self, forked: bool) -> None:
        super().__init__(_Nowhere(), 5)
        self._forked = forked

    def reducer_override(self, value: Any) -> Any:
        left_out = isinstance(value, (torch.Tensor, torch.UntypedStorage, torch.Generator)) or type(value) is np.ndarray
        is_code = isinstance(value, (types.FunctionType, types.ModuleType, type))
        passed = left_out or (self._forked and is_code) or "multiprocessing" in type(value).__module__
        # A call of len(""), as a function of Python or a class would come here itself.
        return (len, ("",)) if passed else NotImplemented


def start_method(context: Any = None) -> str:
    """How processes of a ``multiprocessing`` context start; the default of this process stays undecided where it is."""
    method = getattr(context, "get_start_method", lambda **_: None)(allow_none=True)
    return method or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def check_workers_can_start(loader: DataLoader[Any]) -> None:
    """Raise an error if worker processes that are not forked cannot be given what ``loader`` is made of.

    Raises:
        TypeError: If the dataset, ``collate_fn`` or ``worker_init_fn`` cannot be pickled; it names the attribute.
    """
    if not loader.num_workers or (method := start_method(loader.multiprocessing_context)) == "fork":
        return
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        value = getattr(loader, name)
        error = error_of(value)
        if error is not None:
            path, culprit = _culprit(name, value)
            raise TypeError(
                f"expected a {name} that can be pickled, as worker processes are started by {method!r}; got {path}, "
                f"{culprit!r} ({error}). Define functions and classes at the top of a module, open files and locks in "
                "the worker process, or pass num_workers=0: threads load without pickling."
            ) from error


def error_of(value: Any, *, forked: bool = False) -> Exception | None:
    """Return the error of giving ``value`` to a process, pickled or, if it is forked, as it is; ``None`` for none."""
    try:
        _Trial(forked).dump(value)
    except Exception as error:
        return error
    return None


def _culprit(path: str, value: Any) -> tuple[str, Any]:
    """Follow the parts that cannot be pickled down to one whose own parts can, or which has none."""
    for _ in range(MAX_DEPTH):
        found = next(((where, part) for where, part in _parts(path, value) if error_of(part) is not None), None)
        if found is None:
            break
        path, value = found
    return path, value


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{path}[{n}]", part) for n, part in enumerate(value))
    yield from ((f"{path}.{name}", part) for name, part in getattr(value, "__dict__", {}).items())
