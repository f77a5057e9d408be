"""Walks over the tensors of a batch, whatever its structure."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["can_move", "map_batch", "move_batch", "pin_batch", "tensors_in"]

_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


def map_batch(batch: Any, function: Callable[[Any], Any], method: str) -> Any:
    """Return a batch of the same structure with ``function`` called on its parts.

    Args:
        batch: Tensors, mappings, lists, tuples, named tuples, dataclasses and objects with ``method``, in any nesting.
            It is not changed.
        function: Called on tensors and on objects that have ``method``. Everything else stays as it is.
        method: Name of the method that tells that an object is a part, for example ``"to"``.
    """
    if isinstance(batch, Tensor) or (callable(getattr(batch, method, None)) and not isinstance(batch, type)):
        return function(batch)
    if isinstance(batch, Mapping):
        moved = {key: map_batch(value, function, method) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return moved
        twin = copy.copy(batch)
        twin.update(moved)
        return twin
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_batch(value, function, method) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_batch(value, function, method) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name)
            object.__setattr__(twin, field.name, map_batch(value, function, method))
        return twin
    return batch


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in a batch, those in the attributes of objects with ``.to`` included.

    A sparse tensor comes as the strided ones that it is made of: its memory is theirs.
    """
    if isinstance(batch, Tensor):
        parts = _SPARSE.get(batch.layout)
        if parts is None:
            yield batch
        else:
            yield from (getattr(batch, name)() for name in parts)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors_in(getattr(batch, field.name))
    elif hasattr(batch, "to") and hasattr(batch, "__dict__"):
        for value in vars(batch).values():
            if value is not batch:
                yield from tensors_in(value)


def can_move(batch: Any) -> bool:
    """Tell whether any part of a batch is a tensor or an object with ``.to``."""
    parts: list[Any] = []
    map_batch(batch, parts.append, "to")
    return bool(parts)


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` on ``device``; copies from pinned memory do not wait for one another."""

    def move(part: Any) -> Any:
        if isinstance(part, Tensor) or _takes_non_blocking(type(part)):
            return part.to(device, non_blocking=True)
        return part.to(device)

    return map_batch(batch, move, "to")


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

    return map_batch(batch, pin, "pin_memory")
