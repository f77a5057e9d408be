"""Which calls fetch values to the host, by the name that the user would write."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["SYNC_OPERATIONS", "sync_name"]

_NAMES = {
    "__array__": "numpy.asarray(tensor)",
    "__bool__": "`if tensor`",
    "__complex__": "complex(tensor)",
    "__contains__": "`x in tensor`",
    "__float__": "float(tensor)",
    "__format__": "a tensor in an f-string",
    "__index__": "a tensor as an index of a list",
    "__int__": "int(tensor)",
    "__repr__": "print(tensor)",
    "allclose": "torch.allclose",
    "argwhere": "torch.argwhere",
    "cpu": ".cpu()",
    "equal": "torch.equal",
    "is_nonzero": "torch.is_nonzero",
    "item": ".item()",
    "masked_select": "masked_select",
    "nonzero": "nonzero",
    "numpy": ".numpy()",
    "tolist": ".tolist()",
    "unique": "torch.unique",
    "unique_consecutive": "torch.unique_consecutive",
}

_ATEN = torch.ops.aten
SYNC_OPERATIONS = {
    _ATEN._local_scalar_dense.default,
    _ATEN._unique2.default,
    _ATEN.bincount.default,
    _ATEN.equal.default,
    _ATEN.masked_select.default,
    _ATEN.nonzero.default,
    _ATEN.repeat_interleave.Tensor,
    _ATEN.unique_consecutive.default,
    _ATEN.unique_dim.default,
}
"""Operations that wait for the device, whichever function they are part of."""


def sync_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return what a call that fetches values would look like in the user's code.

    Args:
        name: The ``__name__`` of a function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The spelling, or ``None`` if the call fetches nothing.
    """
    if name == "where" and len(args) + len(kwargs) == 1:
        return "torch.where with one argument"
    if name == "__getitem__" and _has_mask(args[1]):
        return "tensor[mask]"
    if name == "__setitem__" and _has_mask(args[1]) and isinstance(args[2], torch.Tensor) and args[2].numel() > 1:
        return "tensor[mask] = values"
    if name == "to" and _leaves_cuda(args[0], args, kwargs):
        return ".to('cpu')"
    return _NAMES.get(name)


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _leaves_cuda(tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    if isinstance(target, torch.Tensor):
        target = target.device
    return tensor.is_cuda and isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"
