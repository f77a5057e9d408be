"""A ``state_dict`` in float32 of modules whose weights are in half precision."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_turbo.amp.levels import HALF_DTYPES

__all__ = ["Loading", "Saving", "float_state", "float_value", "move_state"]


def float_value(tensor: Tensor, master: Tensor | None) -> Tensor:
    """Return what a half tensor stands for in float32: its master, but for entries changed in the tensor itself."""
    wide = tensor.detach().float()
    if master is None or master.shape != tensor.shape:
        return wide
    own = master.detach().to(tensor.device)
    return torch.where(own.to(tensor.dtype) == tensor, own, wide)


def float_state(weights: Mapping[str, Any], old: str = "", new: str = "") -> OrderedDict[str, Any]:
    """Return a ``state_dict`` with its half tensors in float32, and with another prefix to its names.

    Args:
        weights: Is not changed.
        old: What names begin with; those that do not keep all of theirs.
        new: What they begin with then.
    """
    wide = OrderedDict(
        (new + name.removeprefix(old), float_value(value, None) if _is_half(value) else value)
        for name, value in weights.items()
    )
    vars(wide)["_metadata"] = {  # the versions of modules, by path: some read their weights by them
        (new + (path and f"{path}.").removeprefix(old)).removesuffix("."): versions
        for path, versions in getattr(weights, "_metadata", {}).items()
    }
    return wide


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF_DTYPES


def move_state(optimizer: Optimizer, places: Mapping[Any, Tensor]) -> None:
    """Move what an optimizer has gathered from one parameter to another, in the other's dtype; counts keep their own.

    Args:
        optimizer: Changed in place.
        places: For each parameter of old the one that takes its place; may be itself.
    """
    for old, new in places.items():
        if old in optimizer.state:
            optimizer.state[new] = {
                key: value.to(new.dtype) if key != "step" and _is_like(value, new) else value
                for key, value in optimizer.state.pop(old).items()
            }


def _is_like(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == param.shape


class _FloatState:
    """A module's part in float32 state: a hook that a copy of the module takes along with copies of its masters."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        masters: dict[Tensor, Parameter],
        buffers: Mapping[str, Tensor],
        exact: bool,
    ) -> None:
        self.tensors = tensors
        self.masters = masters
        self.buffers = buffers
        self.exact = exact

    def __deepcopy__(self, memo: dict[int, Any]) -> _FloatState:
        tensors = {name: copy.deepcopy(tensor, memo) for name, tensor in self.tensors.items()}
        masters = {
            tensors[name]: copy.deepcopy(self.masters[tensor], memo)
            for name, tensor in self.tensors.items()
            if tensor in self.masters
        }
        return type(self)(tensors, masters, copy.deepcopy(self.buffers, memo), self.exact)

    def tensors_now(self, module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield the module's tensors by name: pruning gives them others, a parametrization moves them below it."""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield prefix + name, tensor
        for name, child in module._modules.items():
            if child is not None and not any(isinstance(hook, Saving) for hook in child._state_dict_hooks.values()):
                yield from self.tensors_now(child, f"{prefix}{name}.")

    def float_of(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return the float32 tensor behind a half one, if there is any."""
        return self.buffers[name] if name in self.buffers else self.masters.get(tensor)


class Saving(_FloatState):
    """A hook after ``state_dict``, which makes half tensors float32."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Change the state."""
        for name, tensor in self.tensors_now(module):
            if prefix + name in state and tensor.dtype in HALF_DTYPES:
                state[prefix + name] = float_value(tensor, self.float_of(name, tensor) if self.exact else None)


class Loading(_FloatState):
    """A hook before ``load_state_dict``, which fills masters and float32 buffers."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Read the state."""
        with torch.no_grad():
            for name, weight in self.tensors_now(module):
                value, own = state.get(prefix + name), self.float_of(name, weight)
                if value is not None and own is not None and value.shape == own.shape:
                    own.copy_(value if self.exact else value.to(weight.dtype))
