"""The start of worker processes that are not forked: long lists cross once in a file, and modules are there already."""

from __future__ import annotations

import contextlib
import io
import itertools
import mmap
import multiprocessing
import operator
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import reduction
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["LongLists", "StartedWith", "has_long_lists", "preload"]

# Items. A shorter list is sent to each process as it is.
LONG = 10_000
# Of a dataset's parts, how many are looked at: some ten milliseconds.
MOST_PARTS = 100_000
_IMMUTABLE = frozenset({str, int, float, bool, bytes, complex, type(None)})


class LongLists:
    """The long lists of a loader's dataset in a file, which each worker process reads for itself.

    A loader keeps one. The file is written when the first process starts, and again when a list has changed since then:
    items cannot change in themselves, so that a list is the same where its items are the same objects. The file has no
    name: nothing of it is left when the processes that hold it open have ended, however that was.
    """

    def __init__(self) -> None:
        self._file: Any = None
        # By the list's id: the list, which keeps its id its own, its items as they were written, and their place.
        self._known: dict[int, tuple[list[Any], list[Any], tuple[int, int]]] = {}
        self._is_stale = False

    def begin(self) -> None:
        """Begin an epoch, for all of whose processes there is one file: a new one, if there are old lists in it."""
        if self._is_stale:
            self._file, self._known, self._is_stale = None, {}, False

    def handle(self) -> Any:
        """Return the file for a process that is being started; ``None`` if there is none."""
        return None if self._file is None else reduction.DupFd(self._file.fileno())

    def place(self, items: list[Any]) -> tuple[int, int] | None:
        """Return where in the file a list is, in bytes; ``None`` for one that crosses as it is."""
        known = self._known.get(id(items))
        if known is not None and len(known[1]) == len(items) and all(map(operator.is_, known[1], items)):
            return known[2]
        self._is_stale = self._is_stale or known is not None
        if not all(map(_is_immutable, items)):
            return None
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this object
        begin = self._file.seek(0, os.SEEK_END)
        pickle.dump(items, self._file, 5)
        self._file.flush()
        place = begin, self._file.tell()
        self._known[id(items)] = items, list(items), place
        return place


class StartedWith:
    """Stands for an object among the arguments of a process, and arrives there as the object.

    Args:
        value: The object; it is pickled when the process starts, as it is without this.
        lists: Where its long lists go.
    """

    def __init__(self, value: Any, lists: LongLists) -> None:
        lists.begin()
        self._value, self._lists = value, lists

    def __reduce__(self) -> Any:
        # Called while the process starts, when locks and shared memory may be given to it.
        data = io.BytesIO()
        _Cutter(data, self._lists).dump(self._value)
        return _join, (data.getvalue(), self._lists.handle())


class _Cutter(reduction.ForkingPickler):
    """Pickles an object without its long lists."""

    def __init__(self, file: Any, lists: LongLists) -> None:
        super().__init__(file, 5)
        self._lists = lists

    def persistent_id(self, obj: Any) -> Any:
        """Return the place of a long list, which is pickled in place of it."""
        return self._lists.place(obj) if type(obj) is list and len(obj) >= LONG else None


class _Joiner(pickle.Unpickler):
    """Reads an object, and its long lists out of the file."""

    def __init__(self, data: bytes, lists: Any) -> None:
        super().__init__(io.BytesIO(data))
        self._lists, self._read = lists, {}

    def persistent_load(self, pid: tuple[int, int]) -> list[Any]:
        """Return the list at a place: the same one, where an object holds it twice."""
        if pid not in self._read:
            self._read[pid] = pickle.loads(self._lists[slice(*pid)])
        return self._read[pid]


def _join(data: bytes, handle: Any) -> Any:
    if handle is None:
        return _Joiner(data, None).load()
    with open(handle.detach(), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lists:
        return _Joiner(data, memoryview(lists)).load()


def _is_immutable(item: Any) -> bool:
    kind = type(item)
    return kind in _IMMUTABLE or (kind is tuple and all(map(_is_immutable, item)))


def has_long_lists(value: Any) -> bool:
    """Whether an object holds a list that is worth a file, and the system has files without names."""
    return os.name == "posix" and any(type(part) is list and len(part) >= LONG for part in _parts_of(value))


def preload(values: Sequence[Any]) -> None:
    """Have the server of ``forkserver`` import torch and the modules of what its processes are started with.

    A server that runs already stays as it is. What the program itself asked for is imported too.
    """
    from multiprocessing import forkserver

    parts = itertools.chain.from_iterable(map(_parts_of, values))
    names = {each.__module__ if isinstance(each, FunctionType) else type(each).__module__ for each in parts}
    found = sorted(name for name in names if name in sys.modules and name not in ("__main__", "builtins"))
    server = getattr(forkserver.set_forkserver_preload, "__self__", None)
    asked = getattr(server, "_preload_modules", ["__main__"])
    multiprocessing.set_forkserver_preload(list(dict.fromkeys([*asked, "torch", __name__, *found])))


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield an object and what it holds, without a look into long containers and without asking an object anything."""
    waiting, seen = [value], dict[int, Any]()
    while waiting and len(seen) < MOST_PARTS:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        yield part
        kind = type(part)
        if issubclass(kind, (dict, list, tuple)):
            inside = dict.values(part) if issubclass(kind, dict) else part
            waiting += inside if len(inside) < LONG else ()
        elif not issubclass(kind, (type, ModuleType)):
            with contextlib.suppress(AttributeError):
                waiting.append(object.__getattribute__(part, "__dict__"))
