"""Collectives on gradients and weights of any strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["on_dense"]


def on_dense(collective: Callable[..., Any], tensor: Tensor, **kwargs: Any) -> None:
    """Call a collective that changes a tensor in place, on a copy where NCCL refuses its strides."""
    dense = tensor.contiguous()
    collective(dense, **kwargs)
    if dense is not tensor:
        tensor.copy_(dense)
