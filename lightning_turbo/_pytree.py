"""Walks over the tensors of a batch, whatever its structure."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from abc import ABC
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from types import MemberDescriptorType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

__all__ = [
    "map_tensors",
    "movable_in",
    "move_batch",
    "pin_batch",
    "tensors_in",
]

# Common types in batches that hold no tensors, and modules, which lead away from the batch.
_LEAVES = (str, bytes, int, float, type(None), type, torch.nn.Module)


class _Movable(ABC):  # noqa: B024  # its hook decides
    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return callable(getattr(kind, "to", None))


class _Pinnable(ABC):  # noqa: B024
    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return callable(getattr(kind, "pin_memory", None))


# Batches on their way to a device: Lightning's own walk, which treats an object that has the method as a leaf.


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` on ``device``.

    Copies from pinned memory are asynchronous. Copies to the CPU are complete when this returns.

    Raises:
        ValueError: If a part is a frozen dataclass, as in Lightning.
    """

    def move(part: Any) -> Any:
        if isinstance(part, Tensor) or _takes_non_blocking(type(part)):
            return part.to(device, non_blocking=device.type != "cpu")
        return part.to(device)

    return apply_to_collection(batch, _Movable, move)


def movable_in(batch: Any) -> list[Any]:
    """Return what ``move_batch`` moves: tensors and objects with ``.to``, without looking inside those objects."""
    found: list[Any] = []

    def note(part: Any) -> Any:
        found.append(part)
        return part  # the walk rebuilds each container, and some classes check their items

    apply_to_collection(batch, _Movable, note)
    return found


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


# Tensors inside objects: neither torch's nor Lightning's walk visits attributes.


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``change`` applied to its tensors, in any structure.

    Structures are mappings, lists, tuples, deques, dataclasses, their subclasses, and objects with a method ``to``,
    whose attributes are visited. Objects may refer back to themselves, like tree nodes that know their parents.
    ``value`` and everything in it stays unchanged: where a tensor changes, its containers are replaced by shallow
    copies.

    Args:
        value: Anything.
        change: Returns its argument or another tensor.
    """
    return _map(value, change, {})


def _map(value: Any, change: Callable[[Tensor], Tensor], objects: dict[int, _Mapped]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, tuple):
        items = [_map(item, change, objects) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is list:
        return [_map(item, change, objects) for item in value]
    if type(value) is dict:
        return {key: _map(item, change, objects) for key, item in value.items()}
    if id(value) in objects:
        return objects[id(value)].result()
    return _map_object(value, change, objects)


class _Mapped:
    """A visited object and its replacement: the object itself, or a copy once something in it has changed.

    A reference from within the object's own parts gets a copy, because it is not known yet whether they will change.
    """

    def __init__(self, value: Any) -> None:
        self.value = value  # kept alive, so that its id is not reused
        self.is_complete = False
        self.twin: Any = None

    def result(self) -> Any:
        if self.twin is None and not self.is_complete:
            self.twin = copy.copy(self.value)
        return self.value if self.twin is None else self.twin


def _map_object(value: Any, change: Callable[[Tensor], Tensor], objects: dict[int, _Mapped]) -> Any:
    """Map a container of a custom class, or an object with attributes."""
    mapped = objects[id(value)] = _Mapped(value)
    parts = _parts_of(value)
    changed = {key: new for key, part in parts.items() if (new := _map(part, change, objects)) is not part}
    # An immutable mapping becomes a dict, because nothing is known about how to build its class.
    if changed and isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        mapped.twin = {**parts, **changed}
    elif changed:
        _set_parts(mapped.result(), changed)
    mapped.is_complete = True
    return mapped.result()


def _set_parts(twin: Any, changed: dict[Any, Any]) -> None:
    for key, new in changed.items():
        if isinstance(twin, (MutableMapping, list, deque)):
            twin[key] = new
        else:
            # Bypasses the __setattr__ of a frozen dataclass; nobody else has seen the copy yet.
            object.__setattr__(twin, str(key), new)


def _parts_of(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, (list, deque)):
        return dict(enumerate(value))
    return _attributes(value) if dataclasses.is_dataclass(value) or isinstance(value, _Movable) else {}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in any structure that ``map_tensors`` visits."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's slots and ``__dict__`` without evaluating properties."""
    own = getattr(value, "__dict__", None)
    slots = {slot.__name__: slot.__get__(value) for slot in _slots(type(value)) if hasattr(value, slot.__name__)}
    return slots | own if isinstance(own, dict) else slots


@functools.cache
def _slots(kind: type) -> tuple[MemberDescriptorType, ...]:
    return tuple(
        value for base in kind.__mro__ for value in vars(base).values() if isinstance(value, MemberDescriptorType)
    )
