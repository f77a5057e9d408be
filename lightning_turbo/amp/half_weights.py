"""O2 and O3: a model's weights in half precision, and the float32 masters that an optimizer updates in their place."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_turbo.amp.float_state import Loading, Saving, float_value, move_state
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.amp.model_casts import castable_tensors
from lightning_turbo.errors import AmpUsageError

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
        Exact masters keep float32 copies of frozen weights and of buffers as well, so that they come back unrounded.
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
        # Of buffers by place, as a module that moves to a device has others.
        self._float_buffers: dict[nn.Module, dict[str, Tensor]] = {}
        self._optimizers: list[tuple[Optimizer, type[Optimizer]]] = []
        self.following = False
        floats: dict[Tensor, Tensor] = {}
        self._pairs: dict[int, list[tuple[Tensor, Parameter]]] = {}
        self._handles: list[Any] = []
        self._owners: dict[nn.Module, list[str]] = {}
        self._folds = False
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
                if name in module._buffers:
                    floats[tensor] = old.to(torch.float32)
                elif masters and (exact or tensor.requires_grad):
                    # A master needs a gradient unless an optimizer's owner switches it off, as toggle_optimizer does.
                    self._masters[tensor] = Parameter((old if exact else tensor.data).to(torch.float32))
            if name in module._buffers:
                self._buffers.append((module, name, self._cast[tensor]))
                if self.exact:
                    self._float_buffers.setdefault(module, {})[name] = floats[tensor]
            self._owners.setdefault(module, []).append(name)
        if dtype in HALF_DTYPES:
            for module, names in self._owners.items():
                tensors = {name: getattr(module, name) for name in names}
                held = tensors, self._masters, self._float_buffers.get(module, {}), self.exact
                self._handles.append(module.register_state_dict_post_hook(Saving(*held)))
                self._handles.append(module.register_load_state_dict_pre_hook(Loading(*held)))
        for module in self._owners:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()

    def _modules(self) -> Iterable[nn.Module]:
        """Return the modules that have cast weights, and what is below them: a parametrization made since, say."""
        return dict.fromkeys(module for owner in self._owners for module in owner.modules())

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
        """Put the masters into the model in the place of its half weights, and float32 buffers for half ones.

        Inside, the model's parameters are float32, and those that the optimizers hold. What is changed in them stays.
        """
        if self._wide:
            yield
            return
        places = [
            (module, name, weight)
            for module in self._modules()
            for name, weight in module._parameters.items()
            if weight is not None and (weight in self._masters or weight in self._cast)
        ]
        # Frozen, and not exact: their masters stay if an optimizer gets them.
        passing = list(dict.fromkeys(weight for _, _, weight in places if weight not in self._masters))
        with torch.inference_mode(False):  # a validation may be running
            self._masters.update((weight, Parameter(weight.detach().float())) for weight in passing)
            for weight in {weight for _, _, weight in places if not weight.requires_grad}.difference(passing):
                self._masters[weight].data = float_value(weight, self._masters[weight])  # moved by an average, say
        on = [(weight, master) for weight, master in self._masters.items() if master.requires_grad]
        for weight, master in on:
            master.requires_grad_(weight.requires_grad)
        versions = {weight: self._masters[weight]._version for _, _, weight in places}
        buffers = self._widen_buffers()
        try:
            self._wide = True
            for module, name, weight in places:
                module._parameters[name] = self._masters[weight]
            yield
        finally:
            self._wide = False
            self._round_buffers(buffers)
            self._take_back(places)
            for weight, master in on:
                weight.requires_grad_(master.requires_grad)
                master.requires_grad_(True)
            self._pairs.clear()
            # What autograd has seen no change in, it shall see none in either: a backward pass may be yet to come.
            self._round(
                [
                    (weight if self._masters[weight]._version != version else weight.data, self._masters[weight])
                    for weight, version in versions.items()
                ]
            )
            held = {id(p) for optimizer, _ in self._optimizers for g in optimizer.param_groups for p in g["params"]}
            for weight in passing:
                if id(self._masters[weight]) in held:
                    self._fold_as_produced(weight)
                else:
                    del self._masters[weight]

    @torch.no_grad()
    def _take_back(self, places: Iterable[tuple[nn.Module, str, Tensor]]) -> None:
        """Put half weights back where their masters are still, or another parameter that was assigned meanwhile."""
        for module, name, weight in places:
            master, new = self._masters[weight], module._parameters.get(name)
            if new is not None and new is not master and new.shape == master.shape:
                new = master.copy_(new)
            if new is master:
                module._parameters[name] = weight  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def _widen_buffers(self) -> list[tuple[nn.Module, str, Tensor, Tensor, int]]:
        widened = []
        for module, floats in self._float_buffers.items():
            for name, own in floats.items():
                half = module._buffers.get(name)
                if half is not None and half.shape == own.shape:
                    own.data = float_value(half, own)
                    module._buffers[name] = own
                    widened.append((module, name, half, own, own._version))
        return widened

    @torch.no_grad()
    def _round_buffers(self, widened: Iterable[tuple[nn.Module, str, Tensor, Tensor, int]]) -> None:
        for module, name, half, own, version in widened:
            new = module._buffers.get(name)
            if new is None:  # taken away
                continue
            module._buffers[name] = half
            if new is not own and new.shape == own.shape:  # assigned, not changed in place
                own.copy_(new)
            # What was written through ``.data`` counts too, but is no change for autograd.
            (half if own._version != version else half.data).copy_(own)

    def attach(self, optimizer: Optimizer) -> None:
        """Put masters in the place of half weights in an optimizer, and follow what it does to them.

        The state that it has gathered goes with them, in the dtype of what it updates from now on. Its class becomes
        one of the same name until ``restore``: parameter groups that come later get masters too, and what a method
        of its own changes, as a schedule-free optimizer's ``eval`` or the ``first_step`` of SAM, reaches the model.

        Raises:
            AmpUsageError: If it wraps an optimizer that keeps the half weights, or is of no class of optimizers.
        """
        if self.with_masters and not issubclass(type(optimizer), Optimizer):
            raise AmpUsageError(
                f"O2 was given a {type(optimizer).__name__}, which wraps an optimizer and is none itself; accepted are "
                "instances of torch.optim.Optimizer. Pass the optimizer in it; for layer-wise rates take "
                "lightning_turbo.lars(model, lr); or take O0 or O1."
            )
        for group in optimizer.param_groups:
            self.attach_group(group)
        move_state(optimizer, {**{tensor: tensor for tensor in self._cast}, **self._masters})
        self._optimizers.append((optimizer, type(optimizer)))
        for inner in vars(optimizer).values():
            if isinstance(inner, Optimizer) and self.holds_masters_of(inner):
                raise AmpUsageError(
                    f"O2 was given a {type(optimizer).__name__}, which keeps the model's half weights in an optimizer "
                    "of its own; accepted are optimizers that update the parameters of their groups. Take O0, O1 or O3."
                )
        if self.with_masters:
            optimizer.__class__ = self._following(optimizer)

    def _following(self, optimizer: Optimizer) -> type[Optimizer]:
        base = type(optimizer)

        def add_param_group(self_: Any, param_group: dict[str, Any]) -> None:
            base.add_param_group(self_, param_group)
            self.attach_group(optimizer.param_groups[-1])

        def followed(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with self.copied_after(optimizer):
                    return method(*args, **kwargs)

            return wrapper

        def reduced(self_: Any, protocol: Any) -> Any:
            _, _, *state = base.__reduce_ex__(self_, protocol)
            return object.__new__, (base,), *state  # a copy or a pickle follows nothing

        members: dict[str, Any] = {
            "__module__": base.__module__,
            "add_param_group": add_param_group,
            "__reduce_ex__": reduced,
        }
        for name in dir(base):
            method = inspect.getattr_static(base, name)
            if isinstance(method, types.FunctionType) and not name.startswith("_") and not hasattr(Optimizer, name):
                members[name] = followed(method)
        return type(base.__name__, (base,), members)

    @contextlib.contextmanager
    def copied_after(self, optimizer: Optimizer) -> Iterator[None]:
        """At the end of the outermost such context, copy an optimizer's masters into the half weights."""
        if self.following:
            yield
            return
        self.following = True
        state = optimizer.state  # without frozen weights that it never updated, which an average may have moved
        pairs = [(w, m) for w, m in self.pairs(optimizer) if w.requires_grad or m.grad is not None or m in state]
        try:
            yield
        finally:
            self.following = False
            self._round(pairs)

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
                self._fold_as_produced(weight)
        group["params"] = [self._masters.get(weight, weight) for weight in group["params"]]

    def pairs(self, optimizer: Optimizer) -> list[tuple[Tensor, Parameter]]:
        """Return the ``(weight, master)`` pairs whose master this optimizer updates."""
        if id(optimizer) not in self._pairs:
            held = {id(param) for group in optimizer.param_groups for param in group["params"]}
            self._pairs[id(optimizer)] = [(w, m) for w, m in self._masters.items() if id(m) in held]
        return self._pairs[id(optimizer)]

    @torch.no_grad()
    def take_changes(self, before: Mapping[Tensor, Tensor]) -> None:
        """Let masters take the entries of half weights that are not what they were, and not the masters' own values.

        Args:
            before: The weights, with copies of what they were.
        """
        for weight, was in before.items():
            master = self._masters[weight]
            new = float_value(weight, master)
            if new.shape == master.shape and new.device == master.device:
                master.copy_(torch.where(weight != was, new, master))
            else:
                master.data = new

    def holds_masters_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds half weights that have masters, and so would never see their gradients."""
        if any(known is optimizer for known, _ in self._optimizers):  # asked at every step
            return False
        return any(param in self._masters for group in optimizer.param_groups for param in group["params"])

    def by_master(self) -> dict[Tensor, Tensor]:
        """Return each master's weight."""
        return {master: weight for weight, master in self._masters.items()}

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
        self._folds = True
        for weight in self._masters:
            self._fold_as_produced(weight)

    def _fold_as_produced(self, weight: Tensor) -> None:
        if self._folds:
            trained = weight.requires_grad
            weight.requires_grad_(True)  # a frozen one takes no hook
            self._handles.append(weight.register_post_accumulate_grad_hook(self.fold))
            weight.requires_grad_(trained)

    def fold_all(self) -> None:
        """Fold every gradient that waits on a weight."""
        for weight in self._masters:
            self.fold(weight)

    @staticmethod
    @torch.no_grad()
    def _round(pairs: Sequence[tuple[Tensor, Parameter]]) -> None:
        if pairs:
            torch._foreach_copy_([weight for weight, _ in pairs], [master for _, master in pairs])

    def restore(self) -> None:
        """Give the model its old dtypes back: exact where there are masters, else the half values widened.

        What was changed in a half weight itself, by a callback say, is kept; what was made of half weights since
        becomes float32.

        Optimizers get the model's own parameters back, with their state.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, name, dtype in self._buffers:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.dtype is self.dtype:
                buffer.data = float_value(buffer, self._float_buffers.get(module, {}).get(name)).to(dtype)
        self._buffers.clear()
        self._float_buffers.clear()
        for tensor, dtype in self._cast.items():
            master = self._masters.get(tensor)
            tensor.data = float_value(tensor, master).to(dtype)
            tensor.grad = None
            if master is not None:
                master.data = tensor.data  # so that no more than one of the two fills memory
        for module in self._modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.dtype is self.dtype and self.dtype in HALF_DTYPES:
                    tensor.data = tensor.data.float()
        weight_of = self.by_master()
        for optimizer, base in self._optimizers:
            optimizer.__class__ = base
            for group in optimizer.param_groups:
                group["params"] = [weight_of.get(param, param) for param in group["params"]]
            move_state(optimizer, {**{tensor: tensor for tensor in self._cast}, **weight_of})
        self._optimizers.clear()
        self._pairs.clear()
        self._masters.clear()
        self._cast.clear()
        self._owners.clear()
