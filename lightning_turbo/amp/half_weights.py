"""O3: weights that are half precision during a run."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_turbo._pytree import map_tensors
from lightning_turbo.amp.half_call import attributes_with_weights, needs_cast
from lightning_turbo.amp.half_forward import HalfForward
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.amp.run_hooks import add_run_hooks, remove_run_hooks
from lightning_turbo.errors import AmpUsageError

__all__ = ["HalfWeights", "cast_state", "refuse_fused_sgd"]


class HalfWeights:
    """The weights of O3: half precision until ``restore``, with a float32 ``state_dict``.

    What a module that computes in float32 also holds stays float32, and so does every buffer of a module without
    weights, such as the class weights of a loss, which may be called outside the network; ``forward`` casts those
    during its calls.

    Args:
        forward: Decides which modules are cast, and to which dtype.
        models: Models whose parameters and buffers are cast in place; the ``Parameter`` objects stay the same.
        step_owner: The only model, if its training step is not a call of it. Its own tensors, which the step uses, stay
            float32 too.
    """

    def __init__(self, forward: HalfForward, models: Iterable[nn.Module], step_owner: nn.Module | None = None) -> None:
        self.dtype = forward.dtype
        forward.has_half_weights = True
        roots = list(models)
        everywhere = {id(part): part for root in roots for part in root.modules()}
        # Names of tensors that were half before the run and stay half, for example in a frozen encoder.
        self._half_before: Any = WeakIdKeyDictionary()
        self._half_before.update((part, names) for part in everywhere.values() if (names := _half_names(part)))
        # Id of a half tensor -> its state and its float32 copy, which lives while a copy of the module is being made.
        self._wide: dict[int, tuple[Any, weakref.ref[Tensor]]] = {}
        modules = [module for root in roots for module in forward.cast_modules(root)]
        of_calls = {id(module): module for module in modules if module is not step_owner}
        self._make_all_half(of_calls.values(), [part for key, part in everywhere.items() if key not in of_calls])
        save = functools.partial(self._save_float32)  # torch sets an attribute on it
        self._handles: Any = WeakIdKeyDictionary()
        for module in modules:
            handle = self._handles[module] = module.register_state_dict_post_hook(save)
            add_run_hooks(module, handle, plain_attributes=self._wide_attributes)

    def _make_all_half(self, modules: Iterable[nn.Module], others: Iterable[nn.Module]) -> None:
        kept = {param for module in others for param in module.parameters(recurse=False)}
        for module in modules:
            self._make_half(module, kept)

    def _make_half(self, module: nn.Module, kept: set[nn.Parameter]) -> None:
        own = set(module.parameters(recurse=False))
        buffers = module.buffers(recurse=False) if own else ()
        for tensor in (*(own - kept), *buffers):
            if needs_cast(tensor, self.dtype):
                tensor.data = tensor.data.to(self.dtype)
                tensor.grad = None
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()

    def restore(self, optimizers: Iterable[Optimizer]) -> None:
        """Give modules, including later additions, and optimizers their float32 tensors back."""
        modules = [*self._handles]
        for module, handle in self._handles.items():
            remove_run_hooks(module, [handle])
        for part in {id(part): part for module in modules for part in module.modules()}.values():
            before = self._half_before.get(part, ())
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and tensor.dtype is self.dtype and name not in before:
                    tensor.data = tensor.data.float()
                    tensor.grad = None
        for optimizer in optimizers:
            cast_state(optimizer)

    # What leaves the run: the module's state dict, and copies of the module

    def _save_float32(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        below = module.named_modules(prefix=prefix.removesuffix(".")) if self._half_before else ()
        before = {f"{name}.{own}".removeprefix(".") for name, part in below for own in self._half_before.get(part, ())}
        for name, tensor in state.items():
            is_below = name.startswith(prefix) and name not in before
            if is_below and isinstance(tensor, Tensor) and tensor.dtype in HALF_DTYPES:
                state[name] = tensor.float()

    def _wide_attributes(self, module: nn.Module) -> dict[str, Any]:
        before = self._half_before.get(module, ())
        wide: dict[str, Any] = {
            holder: {
                name: each if name in before else self._wide_of(each) for name, each in vars(module)[holder].items()
            }
            for holder in ("_parameters", "_buffers")
        }
        if isinstance(module, nn.RNNBase):
            wide["_flat_weights"] = [self._wide_of(weight) for weight in module._flat_weights]
            wide["_flat_weight_refs"] = [each if each is None else weakref.ref(each) for each in wide["_flat_weights"]]
            return wide
        if names := attributes_with_weights(module):
            stay = self._ids_of_half_before()
            for name in names:
                wide[name] = map_tensors(vars(module)[name], lambda w: w if id(w) in stay else self._wide_of(w))
        return wide

    def _ids_of_half_before(self) -> set[int]:
        """Return the ids of the tensors that were half before the run."""
        return {
            id(tensor)
            for part, names in self._half_before.items()
            for name, tensor in (*part._parameters.items(), *part._buffers.items())
            if name in names
        }

    def _wide_of(self, tensor: Any) -> Any:
        """Return a tensor in float32, always the same object, so that shared weights stay shared in a copy."""
        if tensor is None or tensor.dtype is not self.dtype:
            return tensor
        state = (tensor._version, tensor.data_ptr())
        made_of, reference = self._wide.get(id(tensor), (None, None))
        wide = None if reference is None or made_of != state else reference()
        if wide is None:
            wide = tensor.detach().float()
            if isinstance(tensor, nn.Parameter):
                wide = nn.Parameter(wide, tensor.requires_grad)
            self._wide[id(tensor)] = state, weakref.ref(wide)
        return wide


def _half_names(module: nn.Module) -> set[str]:
    tensors = (*module._parameters.items(), *module._buffers.items())
    return {name for name, tensor in tensors if tensor is not None and tensor.dtype in HALF_DTYPES}


def cast_state(optimizer: Optimizer) -> None:
    """Cast an optimizer's state to the dtype of its parameters, as torch does when it loads a state."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def refuse_fused_sgd(optimizer: Optimizer) -> None:
    """Raise an error for torch's fused SGD on a CPU if it ignores half weights, as in torch 2.13 (issue 191763).

    Raises:
        AmpUsageError: If the optimizer is a fused SGD and this version of torch has the bug.
    """
    fused = [group for group in optimizer.param_groups if group.get("fused")] if type(optimizer) is SGD else []
    params = (param for group in fused for param in group["params"])
    if any(param.device.type == "cpu" and param.dtype in HALF_DTYPES for param in params) and not _moves_half_weights():
        raise AmpUsageError(
            "O3: expected an SGD that updates half weights on a CPU, got SGD(fused=True), which ignores them in torch "
            f"{torch.__version__}. Leave out fused=True, or use O2."
        )


@functools.cache
def _moves_half_weights() -> bool:
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    SGD([weight], lr=1.0, fused=True).step()
    return not weight.any()
