"""``plain``: a state without the classes of other libraries, which torch does not load safely."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """Return a value with the types of Python and torch in place of classes that others made of them.

    ``torch.load(weights_only=True)``, by which Lightning reads checkpoints, refuses an enum, a NumPy number and a
    MONAI ``MetaTensor``, which programs use as the name, the number and the tensor that they are. Containers are
    copied. Of other classes, and of NumPy arrays, nothing is known: they stay as they are.
    """
    kind = type(value)
    if kind is dict:
        return {plain(key): plain(each) for key, each in value.items()}
    if kind in (list, tuple, set):
        return kind(map(plain, value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        # A wrapper, such as DTensor, is no tensor without its class.
        is_wrapper = hasattr(kind, "__tensor_flatten__")
        return value if kind is torch.Tensor or is_wrapper else value.detach().as_subclass(torch.Tensor)
    if isinstance(value, str):
        return str.__str__(value)  # an enum has a str() of its own
    if isinstance(value, (int, float)) and kind is not bool:
        return (int if isinstance(value, int) else float)(value)
    return value
