"""How a user writes the calls that synchronize with the device, by the names of torch's functions.

In a run on a GPU, torch itself reports which calls wait, and the names only say how they are written. On a CPU none of
them waits; the names alone tell what would, where the tensors are on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = [
    "copied_array",
    "fetch",
    "find_tensors",
    "generic_name",
    "is_host",
    "is_training_norm",
    "upload",
]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# Functions that copy a value to the host.
_FETCHES = {
    "__array__": "numpy.asarray(tensor)",
    "__bool__": "`if tensor`",
    "__complex__": "complex(tensor)",
    "__contains__": "`x in tensor`",
    "__float__": "float(tensor)",
    "__format__": "a tensor in an f-string",
    "__getitem__": "tensor[mask]",
    "__index__": "a tensor as an index of a list",
    "__int__": "int(tensor)",
    "__repr__": "print(tensor)",
    "__setitem__": "tensor[mask] = values",
    "cpu": ".cpu()",
    "item": ".item()",
    "numpy": ".numpy()",
    "one_hot": "one_hot without num_classes",
    "repeat_interleave": "repeat_interleave without output_size",
    "to": ".to('cpu')",
    "tolist": ".tolist()",
    "where": "torch.where with one argument",
    **{
        name: f"torch.{name}"
        for name in (
            *("allclose", "argwhere", "bincount", "equal", "gaussian_nll_loss", "is_nonzero", "masked_select"),
            *("nonzero", "unique", "unique_consecutive"),
        )
    },
}
# Functions that copy a list, a number or an array to the device.
_UPLOADS = {
    "__getitem__": "a list as an index",
    "__setitem__": "a list as an index",
    "as_tensor": "torch.as_tensor(..., device=...)",
    "asarray": "torch.asarray(..., device=...)",
    "new_tensor": ".new_tensor(...)",
    "tensor": "torch.tensor(..., device=...)",
}


def fetch(name: str, args: Args, kwargs: Kwargs) -> str:
    """Return how the user writes a call that copies values to the host, or would on a GPU; empty for other calls."""
    fetches = args and name in _FETCHES and (name not in _CONDITIONS or _CONDITIONS[name](args, kwargs))
    return _FETCHES[name] if fetches else ""


def upload(name: str, args: Args, kwargs: Kwargs) -> str:
    """Return how the user writes a call that copies a list, number or array to the device; empty for other calls."""
    if name in ("__getitem__", "__setitem__"):
        uploads = _has_list(args[1])
    elif name == "new_tensor":
        uploads = not is_host(kwargs.get("device", "the tensor's"))
    else:
        there = isinstance(_value(name, args, kwargs), torch.Tensor) or is_host(kwargs.get("device"))
        uploads = name in _UPLOADS and not there
    return _UPLOADS[name] if uploads else ""


def copied_array(name: str, args: Args, kwargs: Kwargs) -> str:
    """Return how the user writes a call that copies a NumPy array on the host; empty for other calls."""
    copied = name == "tensor" and isinstance(_value(name, args, kwargs), np.ndarray) and is_host(kwargs.get("device"))
    return "torch.tensor(array)" if copied else ""


def generic_name(name: str) -> str:
    """Return how the user may have written a call that waits but is in no table."""
    return "tensor[index]" if name in ("__getitem__", "__setitem__") else f"torch.{name}"


def is_host(device: Any) -> bool:
    """Return whether a function with this device argument creates a tensor on the host, even in a run on a GPU."""
    return device is None or device == "cpu"  # a torch.device("cpu") may come from the module, a string does not


def is_training_norm(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return whether a call normalizes with the mean of its input, so that a bias before it has no effect."""
    if name == "batch_norm":
        return bool(_argument(5, "training", args, kwargs))
    return name == "instance_norm" and bool(_argument(5, "use_input_stats", args, kwargs, True))


def _argument(position: int, name: str, args: Args, kwargs: Kwargs, default: Any = None) -> Any:
    """Return an argument passed by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def _value(name: str, args: Args, kwargs: Kwargs) -> Any:
    """Return the value from which a function creates a tensor."""
    return _argument(0, "obj" if name == "asarray" else "data", args, kwargs)


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _has_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, (list, np.ndarray)) for part in parts)


def _scatters(args: Args, kwargs: Kwargs) -> bool:
    return _has_mask(args[1]) and isinstance(args[2], torch.Tensor) and args[2].numel() > 1


def _repeats_by_tensor(args: Args, kwargs: Kwargs) -> bool:
    repeats = _argument(1, "repeats", args, kwargs, args[0])
    return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None


_CONDITIONS: dict[str, Callable[[Args, Kwargs], bool]] = {
    "__getitem__": lambda args, kwargs: _has_mask(args[1]),
    "__setitem__": _scatters,
    "one_hot": lambda args, kwargs: _argument(1, "num_classes", args, kwargs, -1) == -1,
    "repeat_interleave": _repeats_by_tensor,
    "to": lambda args, kwargs: args[0].is_cuda,
    "where": lambda args, kwargs: len(args) + len(kwargs) == 1,
}


def find_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments, including those in lists and tuples."""
    flat: list[Any] = []
    for value in (*args, *kwargs.values()):
        flat += value if isinstance(value, (list, tuple)) else [value]
    return [each for each in flat if isinstance(each, torch.Tensor)]
