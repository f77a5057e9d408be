"""What the transforms of a batch share: the tensors that they change, and checks of arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_turbo._checks import expect, is_list, is_number
from lightning_turbo.data.augment.draws import Draws

__all__ = ["Parts", "Range", "Transform", "along_axes", "check_probability", "check_range", "per_sample"]

Range = float | Sequence[float]


@dataclass
class Parts:
    """The tensors of a batch that transforms change; each transform replaces them.

    Attributes:
        images: float32 of shape ``(n, channels, *space)``, where ``space`` has 2 or 3 axes.
        masks: Of shape ``(n, channels, *space)``, of any dtype.
        label: int64 of shape ``(n,)``, or a floating-point tensor of shape ``(n, classes)``.
    """

    images: list[Tensor]
    masks: list[Tensor]
    label: Tensor | None

    @property
    def space(self) -> torch.Size:
        """The size of the space, 2 or 3 integers."""
        return self.images[0].shape[2:]


class Transform(ABC):
    """Base of the transforms for ``BatchAugmentation``.

    Args:
        p: Probability that a sample is changed, from 0 to 1.
    """

    def __init__(self, p: float) -> None:
        self.p = check_probability(self, p)

    @abstractmethod
    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Transform the parts of a batch."""


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Return one value per sample in a shape that broadcasts with ``like``, on its device and in its dtype."""
    return values.to(like.device, like.dtype, non_blocking=True).view(-1, *[1] * (like.dim() - 1))


def along_axes(image: Tensor, matrix_of: Callable[[int], Tensor]) -> Tensor:
    """Multiply each axis of space by a matrix, which may differ between samples: a filter or a resampling.

    Args:
        image: ``(n, channels, *space)``.
        matrix_of: Returns the matrix for an axis with this many voxels, ``(n or 1, new size, size)``.
    """
    # One matrix product per axis, with all other axes as columns: this is what devices are fast at.
    for axis in range(2, image.dim()):
        lines = image.movedim(axis, 1)
        done = matrix_of(image.shape[axis]) @ lines.flatten(2)
        image = done.unflatten(2, lines.shape[2:]).movedim(1, axis)
    return image.contiguous()


def check_probability(owner: Any, p: Any, name: str = "p") -> float:
    """Return ``p`` if it is a number from 0 to 1."""
    expect(is_number(p) and 0 <= p <= 1, f"{type(owner).__name__}: {name}", p, "a probability from 0 to 1")
    return float(p)


def check_range(owner: Any, name: str, value: Any, least: float | None = None) -> tuple[float, float]:
    """Return a range as its two ends, each ``least`` or more; without ``least``, one number ``x`` means (-x, x)."""
    ends: Any = (-abs(value), abs(value)) if is_number(value) and least is None else value
    valid = is_list(ends) and len(ends) == 2 and all(is_number(end) for end in ends) and ends[0] <= ends[1]
    what = "two numbers (low, high)" + ("" if least is None else f" of {least} or more")
    what += ", low not above high" + (", or one number x for (-x, x)" if least is None else "")
    expect(valid and (least is None or ends[0] >= least), f"{type(owner).__name__}: {name}", value, what)
    return float(ends[0]), float(ends[1])
