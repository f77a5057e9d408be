"""Memory format of 2D and 3D networks."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_turbo._checks import expect

__all__ = ["LAST", "MemoryFormatName", "format_name", "has_format", "set_memory_format"]

MemoryFormatName = Literal["channels_last", "contiguous"]
_NAMES: dict[Any, MemoryFormatName] = {
    "channels_last": "channels_last",
    torch.channels_last: "channels_last",
    torch.channels_last_3d: "channels_last",
    "contiguous": "contiguous",
    torch.contiguous_format: "contiguous",
}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions of the weight


def set_memory_format(module: nn.Module, memory_format: MemoryFormatName | torch.memory_format) -> int:
    """Convert the weights of 2D and 3D layers to a memory format, in place.

    ``"channels_last"`` converts 4D weights to ``torch.channels_last`` and 5D weights to ``torch.channels_last_3d``. A
    convolution then returns the format of its weight for any format of its input. Values, names and shapes do not
    change.

    Args:
        module: Any module on any device. Call this before DDP wraps it.
        memory_format: ``"channels_last"`` or ``"contiguous"``, or torch's objects; both channels-last objects apply to
            2D and 3D.

    Returns:
        The number of 4D and 5D weights.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If the format is unknown.

    Example:
        >>> net = nn.Conv2d(3, 8, 3)
        >>> set_memory_format(net, "channels_last")
        1
        >>> net.weight.is_contiguous(memory_format=torch.channels_last)
        True
    """
    expect(isinstance(module, nn.Module), "module", module, "a torch.nn.Module", TypeError)
    name = format_name(memory_format)
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.ndim in LAST]
    for tensor in tensors:
        _convert(tensor, LAST[tensor.ndim] if name == "channels_last" else torch.contiguous_format)
    return len(tensors)


def format_name(memory_format: Any) -> MemoryFormatName:
    """Return the name of a memory format given by name or as torch's object.

    Raises:
        ValueError: If it is unknown; the message says which command compares the formats.
    """
    if not isinstance(memory_format, (str, torch.memory_format)) or memory_format not in _NAMES:
        raise ValueError(
            f"memory_format: expected 'channels_last' or 'contiguous', got {memory_format!r}. To find out which one is "
            "faster, run lightning-turbo tune train.py --only channels-last."
        )
    return _NAMES[memory_format]


def _convert(tensor: Tensor, memory_format: torch.memory_format) -> None:
    # Through .data, so that the parameter stays the object that optimizers and hooks refer to.
    tensor.data = tensor.data.contiguous(memory_format=memory_format)
    # torch's fast optimizer steps need a parameter and its gradient in the same format.
    if tensor.grad is not None:
        tensor.grad = tensor.grad.contiguous(memory_format=memory_format)


def has_format(module: nn.Module) -> bool:
    """Return whether a module has 4D or 5D weights."""
    return any(parameter.ndim in LAST for parameter in module.parameters())
