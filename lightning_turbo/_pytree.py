"""Walks over the tensors of a batch, whatever its structure."""

from __future__ import annotations

import functools
import inspect
from abc import ABC
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

__all__ = [
    "movable_in",
    "move_batch",
    "pin_batch",
]


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
