"""O2 and O3: a model's weights in half precision, and the float32 masters that an optimizer updates in their place."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.amp.model_casts import castable_tensors

__all__ = ["HalfWeights"]


class HalfWeights:
    """Casts weights to half, keeps float32 masters of them, and gives back what it took.

    The model's ``Parameter`` objects stay the same objects; only what they hold changes. ``state_dict`` of the
    model is float32 at all times: the masters where there are any, else the half values widened. Loading a
    ``state_dict`` fills the masters too, so that a checkpoint loses no digit.

    Args:
        modules: The modules whose own parameters and buffers are cast, without their submodules'.
        dtype: The dtype to cast to. float32 is allowed (O0, where it turns float64 weights into float32).
        keep_batchnorm_fp32: Whether affine batch norm keeps float32.
        masters: Whether the optimizers shall update float32 masters.
        exact: Whether the masters are the float32 weights as they were. ``False`` rounds them to half first, as
            apex does; the ``state_dict`` then holds the widened half weights, as apex's does.
        without_buffers: One of the modules, whose buffers are left as they are.

    Note:
        Exact masters keep float32 copies of frozen weights as well, so that they come back unrounded.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        dtype: torch.dtype,
        *,
        keep_batchnorm_fp32: bool,
        masters: bool,
        exact: bool = True,
        without_buffers: nn.Module | None = None,
    ) -> None:
        self.dtype = dtype
        self.with_masters = masters
        self.exact = exact and masters
        self._masters: dict[Tensor, Parameter] = {}
        self._cast: dict[Tensor, torch.dtype] = {}
        self._buffers: list[tuple[nn.Module, str, torch.dtype]] = []
        self._optimizers: list[Optimizer] = []
        self._pairs: dict[int, list[tuple[Tensor, Parameter]]] = {}
        self._handles: list[Any] = []
        self._owners: dict[nn.Module, list[str]] = {}
        self._folded: set[Tensor] | None = None
        self._wide = False
        for module, name, tensor in castable_tensors(
            modules, keep_batchnorm_fp32=keep_batchnorm_fp32, without_buffers=without_buffers
        ):
            if tensor not in self._cast:
                if tensor.dtype is dtype:
                    continue
                self._cast[tensor] = tensor.dtype
                old = tensor.data
                tensor.data = old.to(dtype)
                tensor.grad = None
                if masters and isinstance(tensor, Parameter) and (exact or tensor.requires_grad):
                    # A master needs a gradient unless an optimizer's owner switches it off, as toggle_optimizer does.
                    self._masters[tensor] = Parameter((old if exact else tensor.data).to(torch.float32))
            if name in module._buffers:
                self._buffers.append((module, name, self._cast[tensor]))
            self._owners.setdefault(module, []).append(name)
        if dtype in HALF_DTYPES:
            for module, names in self._owners.items():
                self._hook(module, tuple(names))
        for module in self._owners:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()

    def _hook(self, module: nn.Module, names: tuple[str, ...]) -> None:
        tensors = {name: getattr(module, name) for name in names}
        self._handles.append(module.register_state_dict_post_hook(_Saving(tensors, self._masters, self.exact)))
        self._handles.append(module.register_load_state_dict_pre_hook(_Loading(tensors, self._masters, self.exact)))

    def to_devices(self) -> None:
        """Move each master to where its weight is now."""
        for weight, master in self._masters.items():
            if master.device != weight.device:
                master.data = master.data.to(weight.device)

    def masters(self, *, trained: bool = False) -> Iterator[Parameter]:
        """Yield every master, or only those that backward passes make gradients for now."""
        for weight, master in self._masters.items():
            if not trained or (weight.requires_grad and master.requires_grad):
                yield master

    @contextlib.contextmanager
    def widened(self) -> Iterator[None]:
        """Put the masters into the model in the place of its half weights.

        Inside, the model's parameters are float32, and those that the optimizers hold. What is changed in them stays.
        """
        if self._wide:
            yield
            return
        places = [
            (module, name, weight)
            for module, names in self._owners.items()
            for name in names
            if (weight := module._parameters.get(name)) is not None
            and (weight in self._masters or weight in self._cast)
        ]
        for _, _, weight in places:
            if weight not in self._masters:  # frozen, and not exact
                with torch.inference_mode(False):  # a validation may be running
                    self._masters[weight] = Parameter(weight.detach().float())
        on = [(weight, master) for weight, master in self._masters.items() if master.requires_grad]
        for weight, master in on:
            master.requires_grad_(weight.requires_grad)
        versions = {weight: self._masters[weight]._version for _, _, weight in places}
        try:
            self._wide = True
            for module, name, weight in places:
                module._parameters[name] = self._masters[weight]
            yield
        finally:
            self._wide = False
            for module, name, weight in places:
                module._parameters[name] = weight
            for weight, master in on:
                weight.requires_grad_(master.requires_grad)
                master.requires_grad_(True)
                self._fold_as_produced(weight)
            self._pairs.clear()
            # What autograd has seen no change in, it shall see none in either: a backward pass may be yet to come.
            self._round(
                [
                    (weight if self._masters[weight]._version != version else weight.data, self._masters[weight])
                    for weight, version in versions.items()
                ]
            )

    def attach(self, optimizer: Optimizer) -> None:
        """Put masters in the place of half weights in an optimizer.

        The state that it has gathered goes with them, in the dtype of what it updates from now on.
        """
        for group in optimizer.param_groups:
            self.attach_group(group)
        self._move_state(optimizer, {**{tensor: tensor for tensor in self._cast}, **self._masters})
        self._optimizers.append(optimizer)

    def attach_group(self, group: dict[str, Any]) -> None:
        """Put masters in the place of half weights in a parameter group, in place.

        A half weight that needs a gradient and is unknown as yet gets a master. A frozen one stays half if the
        masters are rounded as in apex; an exact one may be thawed later.
        """
        self._pairs.clear()
        for weight in group["params"]:
            new = weight not in self._masters and weight.requires_grad and weight.dtype in HALF_DTYPES
            if new and self.with_masters:
                self._masters[weight] = Parameter(weight.detach().float())
            if weight in self._masters:
                self._fold_as_produced(weight)
        group["params"] = [self._masters.get(weight, weight) for weight in group["params"]]

    @staticmethod
    def _move_state(optimizer: Optimizer, places: Mapping[Any, Tensor]) -> None:
        for old, new in places.items():
            if old in optimizer.state:
                optimizer.state[new] = {
                    key: value.to(new.dtype)
                    if isinstance(value, Tensor) and value.is_floating_point() and value.shape == new.shape
                    else value
                    for key, value in optimizer.state.pop(old).items()
                }

    def pairs(self, optimizer: Optimizer) -> list[tuple[Tensor, Parameter]]:
        """Return the ``(weight, master)`` pairs whose master this optimizer updates."""
        if id(optimizer) not in self._pairs:
            held = {id(param) for group in optimizer.param_groups for param in group["params"]}
            self._pairs[id(optimizer)] = [(w, m) for w, m in self._masters.items() if id(m) in held]
        return self._pairs[id(optimizer)]

    def fold(self, weight: Tensor) -> None:
        """Add a weight's half gradient to its master's float32 gradient, and release it.

        Where the master's gradient is switched off, it is only released.
        """
        master = self._masters[weight]
        if weight.grad is not None and master.requires_grad:
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad.add_(weight.grad)
        weight.grad = None

    def fold_as_produced(self) -> None:
        """Fold every gradient as soon as the backward pass has accumulated it, also of weights thawed later."""
        self._folded = set()
        for weight in self._masters:
            self._fold_as_produced(weight)

    def _fold_as_produced(self, weight: Tensor) -> None:
        if self._folded is not None and weight.requires_grad and weight not in self._folded:
            self._folded.add(weight)
            self._handles.append(weight.register_post_accumulate_grad_hook(self.fold))

    def fold_all(self) -> None:
        """Fold every gradient that waits on a weight."""
        for weight in self._masters:
            self.fold(weight)

    @torch.no_grad()
    def copy_to_model(self, optimizer: Optimizer) -> None:
        """Copy an optimizer's masters into the half weights, rounding to nearest."""
        self._round(self.pairs(optimizer))

    @staticmethod
    @torch.no_grad()
    def _round(pairs: Sequence[tuple[Tensor, Parameter]]) -> None:
        if pairs:
            torch._foreach_copy_([weight for weight, _ in pairs], [master for _, master in pairs])

    def restore(self) -> None:
        """Give the model its old dtypes back: exact where there are masters, else the half values widened.

        What was changed in a half weight itself, by a callback say, is kept.

        Optimizers get the model's own parameters back, with their state.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for tensor, dtype in self._cast.items():
            master = self._masters.get(tensor)
            tensor.data = _float_value(tensor, master).to(dtype)
            tensor.grad = None
            if master is not None:
                master.data = tensor.data  # so that no more than one of the two fills memory
        for module, name, dtype in self._buffers:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.dtype is self.dtype:  # another tensor since the module moved to a device
                buffer.data = buffer.data.to(dtype)
        self._buffers.clear()
        weight_of: dict[Parameter, Tensor] = {master: weight for weight, master in self._masters.items()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [weight_of.get(param, param) for param in group["params"]]
            self._move_state(optimizer, {**{tensor: tensor for tensor in self._cast}, **weight_of})
        self._optimizers.clear()
        self._pairs.clear()
        self._masters.clear()
        self._cast.clear()
        self._owners.clear()


def _float_value(tensor: Tensor, master: Tensor | None) -> Tensor:
    """Return what a half tensor stands for in float32: its master, but for entries changed in the tensor itself."""
    wide = tensor.detach().float()
    if master is None:
        return wide
    own = master.detach().to(tensor.device)
    return torch.where(own.to(tensor.dtype) == tensor, own, wide)


class _FloatState:
    """A module's part in float32 state: a hook that a copy of the module takes along with copies of its masters."""

    def __init__(self, tensors: Mapping[str, Tensor], masters: dict[Tensor, Parameter], exact: bool) -> None:
        self.tensors = tensors
        self.masters = masters
        self.exact = exact

    def __deepcopy__(self, memo: dict[int, Any]) -> _FloatState:
        tensors = {name: copy.deepcopy(tensor, memo) for name, tensor in self.tensors.items()}
        masters = {
            tensors[name]: copy.deepcopy(self.masters[tensor], memo)
            for name, tensor in self.tensors.items()
            if tensor in self.masters
        }
        return type(self)(tensors, masters, self.exact)


class _Saving(_FloatState):
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in self.tensors:
            if prefix + name in state:
                tensor = getattr(module, name)
                state[prefix + name] = _float_value(tensor, self.masters.get(tensor) if self.exact else None)


class _Loading(_FloatState):
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        with torch.no_grad():
            for name in self.tensors:
                value, weight = state.get(prefix + name), getattr(module, name)
                master = self.masters.get(weight)
                if value is not None and master is not None and value.shape == master.shape:
                    master.copy_(value if self.exact else value.to(weight.dtype))
