"""O2 and O3: a network computes in half precision while it is called.

At O2 the network keeps its float32 parameters, and the optimizer updates them: they are the masters. When a call of
the network begins, a half copy of each takes its position in ``module._parameters``; when the call ends, the float32
parameters are back. The copies are made by ``parameter.to(half)``, so that autograd itself brings the gradients back
in float32. Nothing has to know of masters: not the optimizer, not a callback, not a checkpoint.

At O3 the parameters are half all the time (``HalfWeights``), and only what goes in and comes out is cast.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_turbo._checks import expect
from lightning_turbo._pytree import map_tensors
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.errors import AmpUsageError, TurboWarning

__all__ = [
    "HalfForward",
    "HalfWeights",
    "cast_floats",
    "cast_state",
    "find_kept",
    "refuse_half",
    "round_weights",
]

_HINT = (
    "While an O2 or O3 call runs, weights and inputs are half precision, and here an operation does not take that. "
    "Keep the module that calls it in float32: keep_float32=[its name or its class]."
)

_BACKWARD = -1  # in place of an id: a backward pass is under way

_Position = tuple[dict[str, Any], str]  # what holds a tensor, and under which name
_Swap = tuple[dict[str, Any], str, Any, Tensor | None]  # the same, the tensor, and its half copy
# By id of a weight, because Python hashes a tensor ten times slower: it, what it was like, and its half copy.
_Copies = dict[int, tuple[Tensor, Any, Tensor]]


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating tensors in ``dtype``, in any structure; ``value`` itself is not changed."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t)


def refuse_half(model: nn.Module, refused: Iterable[torch.dtype]) -> None:
    """Refuse a model that has tensors in half precision already.

    Raises:
        AmpUsageError: If a parameter or buffer has one of the dtypes; it is named.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    half = next((f"{tensor.dtype} in {name!r}" for name, tensor in named if tensor.dtype in refused), None)
    if half is not None:
        raise AmpUsageError(
            f"{type(model).__name__}: expected a model in float32, got {half}. Do not call .half() on it or create it "
            "under half precision: the level decides what becomes half."
        )


def find_kept(models: Iterable[nn.Module], keep_float32: Iterable[str | type[nn.Module]]) -> list[nn.Module]:
    """Return the modules that ``keep_float32`` names, by class or by their name in one of the models.

    Raises:
        AmpUsageError: If no module has that name or class.
    """
    named = [pair for model in models for pair in model.named_modules()]
    expected = "a name from model.named_modules(), as 'net.codebook', or a class of a module there"
    kept: dict[nn.Module, None] = {}
    for entry in keep_float32:
        found = [module for name, module in named if _is_meant(entry, name, module)]
        expect(found, "keep_float32", entry, expected, AmpUsageError)
        kept.update(dict.fromkeys(found))
    return list(kept)


def _is_meant(entry: Any, name: str, module: nn.Module) -> bool:
    return isinstance(module, entry) if isinstance(entry, type) else name == entry


class HalfForward:
    """Casts where data enters and leaves guarded modules, and puts half copies of weights in while they run.

    Only the outermost call puts copies in and casts outputs back. A guarded module that is called inside of it casts
    its inputs alone, so that a tensor that was promoted to float32 between two modules comes back to half.

    Args:
        dtype: The half dtype.
        output_dtype: Dtype of the floating outputs of the outermost call.
        keep_batchnorm_fp32: Whether affine batch norm, synchronised too, keeps its float32 weights and statistics.

    Note:
        Two threads must not call one model at the same time. Replicas of ``DataParallel`` are objects of their own and
        may.
    """

    def __init__(self, dtype: torch.dtype, output_dtype: torch.dtype, keep_batchnorm_fp32: bool) -> None:
        self.dtype = dtype
        self.output_dtype = output_dtype
        self.keep_batchnorm_fp32 = keep_batchnorm_fp32
        # The id of the module whose call is under way; 0 outside of calls. A number, which torch.compile, as it traces
        # the hooks of inner calls, can follow better than a module.
        self._outermost = 0
        self._recursions = 0  # calls of the outermost module within its own call
        self._swaps: list[_Swap] = []  # of the call that is under way
        self._copies: _Copies = {}  # that a backward pass will need
        self._called: dict[int, list[_Position]] = {}  # by outermost module, until a call after their backward passes
        self._is_backward_over = False
        self._handles: list[Any] = []
        self._step_owner: tuple[nn.Module, Any] | None = None
        self._has_looked = False
        self._begin_untraced: Any = torch.compiler.disable(fn=self._begin)
        self._reset_untraced: Any = torch.compiler.disable(fn=self.reset)

    def __reduce__(self) -> Any:
        # The hooks of a copied or pickled model get one of their own, which knows nothing of this run.
        return HalfForward, (self.dtype, self.output_dtype, self.keep_batchnorm_fp32)

    def guard(self, roots: Iterable[nn.Module], inner: Iterable[nn.Module] = (), *, steps: bool = False) -> None:
        """Watch the calls of modules, each of which may be the outermost.

        Args:
            roots: Whole networks.
            inner: Modules in them that are called on their own too.
            steps: Whether a root's call is a training step, and no call of the network, while its ``forward`` is not
                its own: ``DistributedDataParallel`` is handed Lightning's steps so.
        """
        roots = list(roots)
        self._step_owner = (roots[0], roots[0].forward) if steps else None
        for module in dict.fromkeys((*roots, *inner)):
            # Before all other hooks, which then find half weights, as those of pruning that make a weight from others.
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Let these modules, with all below them, compute in float32 wherever they are called."""
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(self._enter_float32, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave_float32))

    def remove(self) -> None:
        """Leave the modules as they were."""
        self.reset()
        self.forget()
        self._called.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._step_owner = None

    def reset(self) -> None:
        """End the outermost call."""
        self._swap_out()
        self._outermost, self._recursions = 0, 0

    def forget(self) -> None:
        """Drop every half copy, because weights may have changed in ways that their version counters do not show."""
        self._copies.clear()

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """End, after a training step, a call that a ``KeyboardInterrupt`` has broken off; the hooks do all else."""
        try:
            yield
        finally:
            self.reset()

    @contextlib.contextmanager
    def backward_region(self) -> Iterator[None]:
        """Around a backward pass, in which activation checkpointing calls parts of the model again.

        The copies of the forward pass are back in, and every call counts as an inner one.
        """
        if self._outermost:
            yield
            return
        self._outermost = _BACKWARD
        try:
            for positions in self._called.values():
                self._swap_in(positions)
            yield
        finally:
            self.reset()
            self._is_backward_over = True

    def cast_modules(self, root: nn.Module) -> list[nn.Module]:
        """Return the modules from ``root`` downwards whose own tensors are cast."""
        modules, waiting = [], [root]
        while waiting:
            module = waiting.pop()
            if not (module._forward_pre_hooks and _is_kept(module)):
                waiting += [child for child in module._modules.values() if child is not None]
                modules.append(module)
        return [module for module in modules if not _is_batch_norm(module)] if self.keep_batchnorm_fp32 else modules

    # The hooks

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._outermost:
            # torch.compile breaks its graph here, and compiles what runs inside of the call.
            begin = self._begin_untraced if torch.compiler.is_compiling() else self._begin
            if not begin(module):
                return None
        elif self._outermost == id(module):
            self._recursions += 1
        if not kwargs and _is_tensor_of(args, self.dtype):
            return None  # nothing to cast, as in most calls
        return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._outermost != id(module):
            is_replica = vars(module).get("_amp_replica") == "outermost"
            return cast_floats(output, self.output_dtype) if is_replica else None
        if self._recursions:
            self._recursions -= 1
            return None
        (self._reset_untraced if torch.compiler.is_compiling() else self.reset)()
        if output is None:  # the call has raised
            _explain_refusal(sys.exc_info()[1])
        elif self._copies and not self._has_looked:
            self._has_looked = True
            self._warn_of_kept_copies(module)
        return cast_floats(output, self.output_dtype)

    def _enter_float32(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)

    def _leave_float32(self, module: nn.Module, args: Any, output: Any) -> Any:
        inside = bool(self._outermost) or "_amp_replica" in vars(module)
        return cast_floats(output, self.dtype) if inside else None

    # Copies

    def _begin(self, module: nn.Module) -> bool:
        """Begin an outermost call; returns whether it is a call of the network at all."""
        if self._step_owner is not None and self._step_owner[0] is module and module.forward != self._step_owner[1]:
            return False
        if "_is_replica" in vars(module):
            self._cast_replica(module)
            return True
        if self._is_backward_over:
            self._called.clear()
            self._is_backward_over = False
        positions = self._called[id(module)] = self._positions_below(module)
        self._swap_in(positions)
        self._outermost = id(module)
        return True

    def _cast_replica(self, module: nn.Module) -> None:
        """Cast the tensors of a replica of ``DataParallel``, which is thrown away after this one call."""
        if "_amp_replica" in vars(module):  # it is called by another replica
            return
        for part in self.cast_modules(module):
            weights = {**part._parameters, **vars(part).get("_former_parameters", {})}
            for holder, tensors in ((vars(part), weights), (part._buffers, part._buffers)):
                holder.update({name: t.to(self.dtype) for name, t in tensors.items() if _needs_cast(t, self.dtype)})
            vars(part)["_amp_replica"] = "inner"
        vars(module)["_amp_replica"] = "outermost"

    def _positions_below(self, root: nn.Module) -> list[_Position]:
        positions: list[_Position] = []
        for module in self.cast_modules(root):
            for holder in (module._parameters, module._buffers):
                positions += [(holder, name) for name, tensor in holder.items() if _needs_cast(tensor, self.dtype)]
            if isinstance(module, nn.RNNBase):  # it sees that its weights are others, and lists them again
                positions += [(vars(module), "_flat_weights"), (vars(module), "_flat_weight_refs")]
        return positions

    def _swap_in(self, positions: Iterable[_Position]) -> None:
        """Let half copies take the positions of tensors; lists of an LSTM are only to be put back."""
        # None is kept without gradients: what writes to ``weight.data`` between two evaluations, as the swap for
        # averaged weights, leaves the version as it is.
        copies = self._copies if torch.is_grad_enabled() else {}
        for holder, name in positions:
            wide = holder.get(name)
            if isinstance(wide, list):
                self._swaps.append((holder, name, wide, None))
            elif _needs_cast(wide, self.dtype):
                half = holder[name] = self._copy_of(wide, copies)
                self._swaps.append((holder, name, wide, half))

    def _copy_of(self, wide: Tensor, copies: _Copies) -> Tensor:
        """Return a half copy; that of a weight is the same until the weight changes or the backward pass is over."""
        if not isinstance(wide, nn.Parameter):
            return wide.detach().to(self.dtype)
        # The address changes where somebody assigns to ``weight.data``, which leaves the version as it is.
        state = 0 if wide.is_inference() else wide._version, wide.data_ptr(), wide.requires_grad
        _, made_of, half = copies.get(id(wide), (None, None, None))
        if half is None or made_of != state:
            half = wide.to(self.dtype)
            copies[id(wide)] = wide, state, half
        return half

    def _swap_out(self) -> None:
        swaps, self._swaps = self._swaps, []
        for holder, name, wide, half in reversed(swaps):
            now = holder.get(name)
            if half is None:
                holder[name] = wide
            elif now is half:
                holder[name] = wide
                if _may_have_changed(name, half):
                    _take_changes(wide, half)
            elif _is_new_buffer(now, half):
                holder[name] = now.detach().to(wide.dtype)

    def _warn_of_kept_copies(self, root: nn.Module) -> None:
        copies = {id(half) for _, _, half in self._copies.values()}
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                if id(value) in copies:
                    warnings.warn(
                        f"{type(module).__name__} {path!r} keeps the half copy of a weight in {name!r} beyond its "
                        "call: it will not follow the weight. Read the weight at each call, or keep the module in "
                        f"float32: keep_float32=[{path!r}].",
                        TurboWarning,
                        stacklevel=2,
                    )


_ENTER_FLOAT32 = HalfForward._enter_float32


@torch.no_grad()
def round_weights(forward: HalfForward, models: Iterable[nn.Module]) -> None:
    """Round all that ``forward`` casts in these models to half, once, as apex's masters begin."""
    modules = (module for model in models for module in forward.cast_modules(model))
    for tensor in (tensor for module in modules for tensor in _tensors_of(module)):
        if _needs_cast(tensor, forward.dtype):
            tensor.copy_(tensor.to(forward.dtype))


class HalfWeights:
    """The weights of O3: half precision until ``restore``, with a float32 ``state_dict``.

    Args:
        forward: Says which modules are cast, and to what.
        models: Whose parameters and buffers are cast, in place; the ``Parameter`` objects stay the same.
        step_owner: The only model, if its training step is not its call. The step uses its buffers, and children
            without weights, as losses and metrics, outside of any call: these stay as they are.
    """

    def __init__(self, forward: HalfForward, models: Iterable[nn.Module], step_owner: nn.Module | None = None) -> None:
        self.dtype = forward.dtype
        if step_owner is not None:
            models = [child for child in step_owner.children() if next(child.parameters(), None) is not None]
        modules = [module for model in models for module in forward.cast_modules(model)]
        for module in modules:
            self._cast(_tensors_of(module))
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        if step_owner is not None:
            self._cast(step_owner.parameters(recurse=False))
            modules.append(step_owner)
        self._modules = weakref.WeakSet(modules)
        self._handles = [module.register_state_dict_post_hook(_save_float32) for module in modules]

    def _cast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if _needs_cast(tensor, self.dtype):
                tensor.data, tensor.grad = tensor.data.to(self.dtype), None

    def restore(self, optimizers: Iterable[Optimizer]) -> None:
        """Give modules their float32 back, what was added to them too, and optimizers theirs."""
        for handle in self._handles:
            handle.remove()
        parts = {part for module in self._modules for part in module.modules()}
        for tensor in (tensor for part in parts for tensor in _tensors_of(part)):
            if tensor.dtype is self.dtype:
                tensor.data, tensor.grad = tensor.data.float(), None
        for optimizer in optimizers:
            cast_state(optimizer)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def cast_state(optimizer: Optimizer) -> None:
    """Bring what an optimizer has gathered to the dtype of its parameters."""
    for param, state in optimizer.state.items():
        if isinstance(param, Tensor):
            moments = {name: value for name, value in state.items() if name != "step" and _is_moment(value, param)}
            state.update({name: value.to(param.dtype) for name, value in moments.items()})


def _is_moment(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == param.shape


def _save_float32(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, tensor in state.items():
        if name.startswith(prefix) and isinstance(tensor, Tensor) and tensor.dtype in HALF_DTYPES:
            state[name] = tensor.float()


def _needs_cast(tensor: Tensor | None, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.is_floating_point() and tensor.dtype is not dtype


def _is_kept(module: nn.Module) -> bool:
    # The hook tells, and no list of ours, so that copies of the module are kept in float32 too.
    return any(getattr(hook, "__func__", None) is _ENTER_FLOAT32 for hook in module._forward_pre_hooks.values())


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine


def _is_tensor_of(args: tuple[Any, ...], dtype: torch.dtype) -> bool:
    return len(args) == 1 and isinstance(args[0], Tensor) and args[0].dtype is dtype


def _may_have_changed(name: str, half: Tensor) -> bool:
    # Batch norm's kernel does not count its changes as such.
    return not half.is_inference() and (half._version > 0 or name[:8] == "running_")


def _is_new_buffer(now: Any, half: Tensor) -> TypeGuard[Tensor]:
    return isinstance(now, Tensor) and now.dtype is half.dtype and not isinstance(now, nn.Parameter)


@torch.no_grad()
def _take_changes(wide: Tensor, half: Tensor) -> None:
    """Let a float32 tensor take the entries that a module has changed in its half copy; the others stay exact.

    Through ``data``, which leaves its version as it is: the copy stays valid, and so does what autograd has saved.
    """
    wide.data.copy_(torch.where(wide.to(half.dtype) == half, wide, half.to(wide.dtype)))


def _explain_refusal(error: BaseException | None) -> None:
    """Add to an error that a half tensor caused what to do; hooks cannot raise another one in its place."""
    text = str(error)
    told = _HINT in text or not any(word in text for word in ("Half", "BFloat16", "dtype", "scalar type"))
    if isinstance(error, RuntimeError) and not told:
        error.args = (f"{text}\n{_HINT}",)
