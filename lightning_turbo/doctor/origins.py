"""Where the tensors of a step on the CPU would come from on a GPU: the host or the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lightning_turbo.doctor.names import find_tensors, is_host

__all__ = ["Origins"]


class Origins:
    """Tracks the tensors of one step of a run on the CPU that is examined as if it were on a GPU.

    A ``StepWatch`` creates it for each step. It keeps no tensor alive. A tensor that the step creates without a device
    would be on the host, and the batch would not.
    """

    def __init__(self) -> None:
        self.made = WeakIdKeyDictionary()

    def are_on_host(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether there are tensors and all of them would be on the host in a run on a GPU."""
        return bool(tensors) and all(each in self.made for each in tensors)

    def follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], result: Any
    ) -> bool:
        """Track a call of torch's function ``name`` from ``tensors`` to the tensor ``result``.

        Returns:
            Whether the call moves a tensor that was created on, or copied to, the host back to the device.
        """
        if tensors and self._moves(name, args, kwargs):
            moved = tensors[0] in self.made
            self.made.pop(result, None)
            return moved
        if name == "cpu" or self._makes_on_host(kwargs, tensors):
            self.made[result] = True
        return False

    def _moves(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        targets = (*args[1:], kwargs.get("device"), kwargs.get("other"))
        if name == "type_as":
            return not self.are_on_host(find_tensors(targets, {}))
        return name == "cuda" or (name == "to" and any(map(_is_target, targets)))

    def _makes_on_host(self, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> bool:
        return self.are_on_host(tensors) if tensors else is_host(kwargs.get("device"))


def _is_target(value: Any) -> bool:
    return isinstance(value, (torch.device, str, torch.Tensor)) or type(value) is int
