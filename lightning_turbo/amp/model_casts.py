"""O2 and O3: casts where data enters and leaves a model whose weights are in half precision."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections import UserDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["Boundary", "cast_floats", "castable_tensors", "first_tensor_of", "parts_of"]


def first_tensor_of(model: nn.Module, dtypes: Iterable[torch.dtype]) -> str | None:
    """Return the name of the model's first parameter or buffer in one of ``dtypes``, or ``None``."""
    wanted = set(dtypes)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype in wanted:
            return name
    return None


def castable_tensors(
    modules: Iterable[nn.Module], *, keep_batchnorm_fp32: bool, without_buffers: nn.Module | None = None
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the floating parameters and buffers that these modules hold themselves.

    Args:
        modules: Modules, without their submodules; one that comes twice counts once.
        keep_batchnorm_fp32: Leave out affine batch norm, synchronised too. Other norms are cast, as in apex.
        without_buffers: One of them, whose buffers are left out.

    Yields:
        The owning module, the tensor's name in it, and the tensor. A parameter shared by several modules comes
        once for each.
    """
    for module in dict.fromkeys(modules):
        if keep_batchnorm_fp32 and isinstance(module, _BatchNorm) and module.affine:
            continue
        buffers = {} if module is without_buffers else module._buffers
        for name, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is not None and tensor.is_floating_point():
                yield module, name, tensor


def parts_of(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return which modules' weights are cast, and at which modules' calls data is, for a LightningModule.

    Children without parameters, as losses and metrics, stay as they are.

    Args:
        module: Whose training step calls what it holds.
    """
    inner = [m for child in module.children() if any(True for _ in child.parameters()) for m in child.modules()]
    guarded = [m for m in dict.fromkeys(inner) if any(True for _ in m.parameters())]
    return [module, *inner], [module, *guarded]


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating tensors cast, also in containers, dataclasses and batch classes.

    An object that is none of these and has a method ``to`` is trusted to cast itself when given a dtype.

    Args:
        value: Anything that a model takes or returns. It is not changed itself.
        dtype: The dtype to cast to.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not dtype else value
    if isinstance(value, tuple):
        items = [cast_floats(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is list:
        return [cast_floats(item, dtype) for item in value]
    if type(value) is dict:
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if value is None or isinstance(value, (str, bytes, int, float, nn.Module, type)):
        return value
    if hasattr(value, "to") and callable(value.to):
        return value.to(dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: cast_floats(getattr(value, f.name), dtype) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changes)
    if isinstance(value, (dict, UserDict, list, deque)):  # of a class that may remember more than its items
        items = enumerate(value) if isinstance(value, (list, deque)) else value.items()
        changes = {key: new for key, item in items if (new := cast_floats(item, dtype)) is not item}
        if changes:
            value = copy.copy(value)
            for key, item in changes.items():
                value[key] = item
    return value


class _Depth(threading.local):
    """How many guarded calls a thread is in: DataParallel calls a model's replicas in threads of their own."""

    def __init__(self) -> None:  # is called once on each thread
        self.calls = 0

    def __reduce__(self) -> Any:
        return _Depth, ()


class Boundary:
    """Casts the floats that a guarded module is called with, and at the outermost call its outputs back.

    Any guarded module may so be called on its own or as part of another, and a tensor that was promoted to float32
    between two of them comes back to half.

    Args:
        dtype: Dtype of the arguments inside, keyword arguments too.
        output_dtype: Dtype of what comes out, nested structures too.
        step_owner: A module whose calls are a training step while it has another ``forward`` than it has now, as DDP is
            handed one by Lightning.
    """

    def __init__(self, dtype: torch.dtype, output_dtype: torch.dtype, step_owner: nn.Module | None = None) -> None:
        self.dtype = dtype
        self.output_dtype = output_dtype
        self._step_owner = step_owner
        self._forward = None if step_owner is None else step_owner.forward
        self._depth = _Depth()
        self._repeating = 0  # on any thread: backward passes have threads of their own
        self._lifted = False
        self._handles: list[Any] = []

    def guard(self, modules: Iterable[nn.Module]) -> None:
        """Watch the calls of these modules."""
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Within this context every call counts as a call within a call.

        For the backward pass, in which activation checkpointing calls the insides of the model again.
        """
        self._repeating += 1
        try:
            yield
        finally:
            self._repeating -= 1

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Within this context nothing is cast."""
        before, self._lifted = self._lifted, True
        try:
            yield
        finally:
            self._lifted = before

    def reset(self) -> None:
        """Forget calls that never came to their end."""
        self._depth.calls = 0

    def _is_outermost(self) -> bool:
        return self._depth.calls == 0 and self._repeating == 0

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._lifted:
            return None
        if self._is_outermost() and module is self._step_owner and module.forward != self._forward:
            return None
        self._depth.calls += 1
        return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._lifted or self._depth.calls == 0:
            return None
        self._depth.calls -= 1
        return cast_floats(output, self.output_dtype) if self._is_outermost() else None
