"""Walks over the tensors of a batch, whatever its structure."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from abc import ABC
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

__all__ = [
    "holders_in",
    "map_tensors",
    "move_batch",
    "pin_batch",
    "tensors_in",
]

_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}

# What holds no tensor, or leads away from the batch.
_LEAVES = (
    str, bytes, int, float, complex, type(None), type, np.ndarray, np.generic, torch.device, torch.dtype,
    ModuleType, FunctionType, BuiltinFunctionType, MethodType,
)  # fmt: skip
# Where the search behind an object ends: one that knows its dataset or its Trainer leads to everything there is.
MOST_PARTS = 10_000


class _Movable(ABC):  # noqa: B024  # its hook decides
    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return callable(getattr(kind, "to", None))


class _Pinnable(ABC):  # noqa: B024
    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return callable(getattr(kind, "pin_memory", None))


# Batches on their way to a device: Lightning's own walk, which takes an object with the method as a whole.


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` on ``device``.

    Copies from pinned memory do not wait for one another. Copies to a CPU are over when this returns.

    Raises:
        ValueError: If a part is a frozen dataclass, as in Lightning.
    """

    def move(part: Any) -> Any:
        if isinstance(part, Tensor) or _takes_non_blocking(type(part)):
            return part.to(device, non_blocking=device.type != "cpu")
        return part.to(device)

    return apply_to_collection(batch, _Movable, move)


@functools.cache
def _takes_non_blocking(kind: type) -> bool:
    try:
        parameters = inspect.signature(getattr(kind, "to", kind)).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "non_blocking" or p.kind is p.VAR_KEYWORD for p in parameters)


def pin_batch(batch: Any) -> Any:
    """Return ``batch`` in page-locked memory, from which copies to a CUDA device can overlap with other work."""

    def pin(part: Any) -> Any:
        if isinstance(part, Tensor) and (part.device.type != "cpu" or part.layout != torch.strided or part.is_pinned()):
            return part
        return part.pin_memory()

    return apply_to_collection(batch, _Pinnable, pin)


# What is behind objects: neither torch's nor Lightning's walk looks into their attributes.


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``change`` applied to its tensors, in any structure.

    Structures are mappings, lists, tuples, deques, dataclasses and their subclasses, and objects with a method ``to``,
    whose attributes count. ``value`` itself, and all that it holds, stays as it is: where a tensor changes, a shallow
    copy takes the position of what holds it.

    Args:
        value: Anything.
        change: Returns the tensor that it is given, or another one.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (*_LEAVES, torch.nn.Module)):
        return value
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is list:
        return [map_tensors(item, change) for item in value]
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    return _map_object(value, change)


def _map_object(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Do the same for a container of a class of its own, and for an object with attributes."""
    parts = _parts_of(value)
    changed = {key: new for key, part in parts.items() if (new := map_tensors(part, change)) is not part}
    if not changed:
        return value
    # A mapping that cannot be changed becomes a dict, as nobody knows how its class is made.
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return {**parts, **changed}
    twin: Any = copy.copy(value)
    for key, new in changed.items():
        if isinstance(value, (Mapping, list, deque)):
            twin[key] = new
        else:
            # Past the __setattr__ of a frozen dataclass: nobody else knows the twin yet.
            object.__setattr__(twin, str(key), new)
    return twin


def _parts_of(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, (list, deque)):
        return dict(enumerate(value))
    return _attributes(value) if dataclasses.is_dataclass(value) or isinstance(value, _Movable) else {}


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in a batch, those in the attributes of objects and of what these hold included.

    A sparse tensor comes as the strided ones that it is made of: its memory is theirs.
    """
    return (part for part in holders_in(batch) if isinstance(part, Tensor))


def holders_in(batch: Any) -> Iterator[Any]:
    """Yield what ``tensors_in`` does, and every object with ``.to``.

    Such an object may keep tensors where Python does not see them. Each comes once, and what is near comes first.
    """
    seen: dict[int, Any] = {}  # the parts themselves, because a part that is gone leaves its id to another
    waiting = deque([batch, *(batch.values() if isinstance(batch, Mapping) else ())])
    while waiting:
        part = waiting.popleft()
        if isinstance(part, _LEAVES) or id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, Tensor):
            yield from _strided(part)
            continue
        if isinstance(part, _Movable):
            yield part
        if len(seen) < MOST_PARTS:
            waiting.extend(_directly_in(part))


def _strided(tensor: Tensor) -> list[Tensor]:
    parts = _SPARSE.get(tensor.layout)
    return [tensor] if parts is None else [getattr(tensor, name)() for name in parts]


def _directly_in(part: Any) -> Iterator[Any]:
    """Yield the items of a container, and the values of an object's attributes; no lazy mapping is read."""
    if isinstance(part, dict):
        yield from dict.values(part)
    elif isinstance(part, (list, tuple, set, frozenset, deque)):
        yield from part
    yield from _attributes(part).values()


def _attributes(value: Any) -> dict[str, Any]:
    """Return what an object keeps in slots and in its ``__dict__``; no property is read."""
    own = getattr(value, "__dict__", None)
    slots = {slot.__name__: slot.__get__(value) for slot in _slots(type(value)) if hasattr(value, slot.__name__)}
    return slots | own if isinstance(own, dict) else slots


@functools.cache
def _slots(kind: type) -> tuple[MemberDescriptorType, ...]:
    return tuple(
        value for base in kind.__mro__ for value in vars(base).values() if isinstance(value, MemberDescriptorType)
    )
