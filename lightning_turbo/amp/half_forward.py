"""O2 and O3: a network computes in half precision while it is called.

At O2 the network keeps its float32 parameters, and the optimizer updates them: they are the masters. When a call of
the network begins, a half copy of each takes its position in ``module._parameters``; when the call ends, the float32
parameters are back. The copies are made by ``parameter.to(half)``, so that autograd itself brings the gradients back
in float32. Nothing has to know of masters: not the optimizer, not a callback, not a checkpoint.

At O3 the parameters are half all the time (``HalfWeights``), and only what goes in and comes out is cast.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

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
    "has_sparse_gradients",
    "refuse_half",
]

_untraced: Any = torch.compiler.disable  # whose signature does not know methods
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # since torch 2.7

_HINT = (
    "While an O2 or O3 call runs, weights and inputs are half precision, and here an operation does not take that. "
    "Keep the module that calls it in float32: keep_fp32_modules=[its name or its class]. Or, where a step calls a "
    "layer's forward, call the layer itself, which casts what it is given: layer(x)."
)


# What a call wrote in a module: to a buffer, as a count or a queue; or what half precision would stop, as an average of
# weights.
_Written = Literal["buffer", "average"]


class _Position(NamedTuple):
    """Where a tensor stands that calls cast: under which name in which dict of a module."""

    module: nn.Module
    holder: dict[str, Any]
    name: str
    kind: Literal["weight", "buffer", "list"]


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


def find_kept(models: Iterable[nn.Module], keep_fp32_modules: Iterable[str | type[nn.Module]]) -> list[nn.Module]:
    """Return the modules that ``keep_fp32_modules`` names, by class or by their name in one of the models.

    Raises:
        AmpUsageError: If no module has that name or class.
    """
    named = [pair for model in models for pair in model.named_modules()]
    expected = "a name from model.named_modules(), as 'net.codebook', or a class of a module there"
    kept: dict[nn.Module, None] = {}
    for entry in keep_fp32_modules:
        found = [module for name, module in named if _is_meant(entry, name, module)]
        expect(found, "keep_fp32_modules", entry, expected, AmpUsageError)
        kept.update(dict.fromkeys(found))
    return list(kept)


def _is_meant(entry: Any, name: str, module: nn.Module) -> bool:
    return isinstance(module, entry) if isinstance(entry, type) else name == entry


class _Plan:
    """Where the tensors stand that a call of one module casts: found once, and kept until the modules below change.

    It holds the dicts of the modules, not the module that is called.
    """

    def __init__(self) -> None:
        self.positions: list[_Position] = []
        self.is_outermost = False  # whether the module was called on its own in a forward pass
        self.calls_to_compare = 0  # training calls that still compare values, see _Call
        self._children: list[dict[str, Any]] = []
        self._tensors: list[dict[str, Any]] = []
        self._found: Any = None

    def _modules_and_names(self) -> tuple[list[Any], list[str]]:
        return [*chain.from_iterable(map(dict.values, self._children))], [*chain.from_iterable(self._tensors)]

    def holds(self) -> bool:
        """Tell whether the modules, and the names of their tensors, are those that were found."""
        return self._modules_and_names() == self._found

    def note(self, root: nn.Module, positions: list[_Position]) -> None:
        modules = [*root.modules()]
        self.positions = positions
        self.calls_to_compare = 2
        self._children = [module._modules for module in modules]
        self._tensors = [holder for module in modules for holder in (module._parameters, module._buffers)]
        self._found = self._modules_and_names()

    def expire(self) -> None:
        self._found = None


class _Call:
    """A call that is under way: ``HalfForward`` begins it at the module's pre-hook and ends it at its hook.

    From ``begin`` to ``end`` half copies stand in the positions of float32 tensors; ``end`` puts these back, whatever
    happened in between, and lets them take what the call wrote to the copies. Version counters tell what it wrote, but
    not what it wrote through ``.data``: a call that ``compares`` looks at the values.
    """

    def __init__(self, module: nn.Module, casts_output: bool, compares: bool, autocast: Any) -> None:
        # A number, which torch.compile, as it traces the hooks of inner calls, can follow better than a module.
        self.module_id = id(module)
        self.casts_output = casts_output
        self.recursions = 0  # calls of the module within its own call
        self._compares = compares
        self._autocast = autocast
        self._swaps: list[tuple[_Position, Any, Any]] = []
        self._addresses: dict[int, int | None] = {}  # of half copies, by their ids, if it compares

    def begin(self, positions: Iterable[_Position], copies: _Copies) -> None:
        self._autocast.__enter__()
        keep = torch.is_grad_enabled()
        for position in positions:
            _, holder, name, kind = position
            wide = holder.get(name)
            half = copies.list_of(wide) if kind == "list" else copies.of(wide, keep=keep)
            if half is not wide:
                holder[name] = half
                if self._compares:
                    self._addresses[id(half)] = _address_of(half)
            if half is not wide or kind == "list" or (wide is None and kind == "buffer"):
                self._swaps.append((position, wide, half))

    def end(self, copies: _Copies) -> dict[nn.Module, _Written]:
        """End the call; returns the modules that it wrote to, with what it wrote there."""
        self._autocast.__exit__(None, None, None)
        swaps, self._swaps = self._swaps, []
        written: dict[nn.Module, _Written] = {}
        for position, wide, half in reversed(swaps):
            if position.kind == "list":
                copies.keep_list(wide, position.holder.get(position.name))
                position.holder[position.name] = wide
                continue
            what = self._put_back(position, wide, half)
            if what is not None and written.get(position.module) != "average":
                written[position.module] = what
        return written

    def _put_back(self, position: _Position, wide: Tensor | None, half: Tensor | None) -> _Written | None:
        """Let a float32 tensor take its position again; returns what was written to it, if it may add up."""
        module, holder, name, kind = position
        now, by_data = holder.get(name), False
        if wide is None or half is None:  # a buffer that there was none of before the call
            return self._widen_made(position, now)
        # The copy stands there still, written to or not; or the module has put another buffer there; or something else,
        # which stays.
        if now is half:
            holder[name] = wide
            if not _was_written(position, half):
                by_data = self._differs(position, wide, half)
                if not by_data:
                    return None
            _take_changes(wide, half)
        elif _is_new_buffer(now, half.dtype):
            holder[name] = now.detach().to(wide.dtype)
        else:
            return None
        # A weight without gradients that changes is an average of others, as in a momentum encoder. What is written
        # through ``.data`` may be one too.
        if by_data or (kind == "weight" and not wide.requires_grad):
            return "average"
        return "buffer" if kind == "buffer" and not _is_batch_norm(module) else None

    def _widen_made(self, position: _Position, made: Any) -> _Written | None:
        """Bring a buffer that the call has made to float32."""
        if not any(_is_new_buffer(made, dtype) for dtype in HALF_DTYPES):
            return None
        position.holder[position.name] = made.detach().float()
        return "buffer"

    def _differs(self, position: _Position, wide: Tensor, half: Tensor) -> bool:
        """Tell whether a call that compares wrote to a half copy through ``.data``, or set it; waits for the device."""
        address = self._addresses.get(id(half))
        if address is None:
            return False
        is_set = half.data_ptr() != address
        if is_set and not isinstance(position.module, nn.RNNBase):  # which flattens its weights so
            return True
        return not torch.allclose(wide.to(half.dtype), half, rtol=0.0, atol=0.0, equal_nan=True)


class _Copies:
    """The half copies of weights, each the same until its weight changes or ``clear``, after a backward pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # By id of a weight, because Python hashes a tensor ten times slower: it, what it was like, and its half copy.
        # So too the lists in which a recurrent network keeps its weights, flattened for cuDNN.
        self._kept: dict[int, tuple[Any, Any, Any]] = {}

    def clear(self) -> None:
        self._kept.clear()

    def of(self, wide: Any, *, keep: bool) -> Any:
        """Return what takes the position of a tensor: itself if there is nothing to cast."""
        if not _needs_cast(wide, self.dtype):
            return wide
        # What torch.func puts in place of a weight is cast with its graph, and not kept: it is of this call alone.
        # Without gradients none is kept: what writes to ``weight.data`` between two evaluations, as the swap for
        # averaged weights, leaves the version as it is.
        if not keep or not isinstance(wide, nn.Parameter):
            return self._cast(wide)
        # The address changes where somebody assigns to ``weight.data``, which leaves the version as it is.
        state = (0 if wide.is_inference() else wide._version, wide.data_ptr(), wide.requires_grad)
        _, made_of, half = self._kept.get(id(wide), (None, None, None))
        if half is None or made_of != state:
            half = self._cast(wide)
            self._kept[id(wide)] = wide, state, half
        return half

    def _cast(self, wide: Tensor) -> Tensor:
        return wide.to(self.dtype)  # in one line, because jit.trace compares where operations come from

    # A recurrent network keeps its weights in a list too. While a call runs, the list of half weights of the last call
    # stands in its place, so that they are not flattened again.
    def list_of(self, wide: Any) -> Any:
        """Return the list that a recurrent network made of half weights; it makes another one if they changed."""
        return self._kept.get(id(wide), (wide, None, wide))[2]

    def keep_list(self, wide: Any, half: Any) -> None:
        if half is not wide and torch.is_grad_enabled():
            self._kept[id(wide)] = wide, None, half


class HalfForward:
    """Casts where data enters and leaves networks, and puts half copies of weights in while they run.

    Only the outermost call puts copies in and casts outputs back. A module that is called inside of it casts its
    inputs alone, so that a tensor that was promoted to float32 between two modules comes back to half.

    Outside of calls every parameter is the float32 one, in the backward pass too. Where activation checkpointing calls
    a module again in a backward pass, copies are in for that call.

    A module without others below it that writes to a buffer in a call, as to a count or a moving average, computes in
    float32 from the next call on, so that small changes add up. One with others below it, which would all become
    float32, is named in a warning. So does any module whose weights without gradients are written to, as those of a
    momentum encoder, and one to which one of the first two training calls writes through ``.data``.

    Args:
        dtype: The half dtype.
        output_dtype: Dtype of the floating outputs of the outermost call.
        keep_batchnorm_fp32: Whether affine batch norm, synchronised too, keeps its float32 weights and statistics.
        step_device: Where steps run under autocast, as ``"cuda"``: half weights need it outside of calls. Calls, and
            modules that stay float32, run without.

    Note:
        Two threads must not call one model at the same time.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        output_dtype: torch.dtype,
        keep_batchnorm_fp32: bool,
        step_device: str | None = None,
    ) -> None:
        self.dtype = dtype
        self.output_dtype = output_dtype
        self.keep_batchnorm_fp32 = keep_batchnorm_fp32
        self._step_device = step_device
        self.has_half_weights = False
        self._call: _Call | None = None  # the outermost one under way
        self._copies = _Copies(dtype)
        self._plans: dict[nn.Module, _Plan] = {}  # of modules that were an outermost call
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        self._step_owner: tuple[nn.Module, Any] | None = None

    def __reduce__(self) -> Any:
        # The hooks of a copied or pickled model get one of their own, which knows nothing of this run.
        return HalfForward, (self.dtype, self.output_dtype, self.keep_batchnorm_fp32, self._step_device)

    def register_hooks(self, roots: Iterable[nn.Module], *, steps: bool = False) -> None:
        """Watch the calls of networks and of the modules in them that have weights; each may be the outermost.

        Modules without weights, as losses and metrics, compute outside of calls in the dtype that they are given.

        Args:
            roots: Whole networks, of which modules to keep in float32 are known already.
            steps: Whether a root's call is a training step, and no call of the network, while its ``forward`` is not
                its own: ``DistributedDataParallel`` is handed Lightning's steps so.
        """
        roots = list(roots)
        self._step_owner = (roots[0], roots[0].forward) if steps else None
        parts = (part for root in roots for part in self.cast_modules(root) if _has_weights(part))
        for module in dict.fromkeys((*roots, *parts)):
            # Before all other hooks, which then find half weights, as those of pruning that make a weight from others.
            # The hook behind the call is registered where a call is the outermost: most modules never need it.
            self._attach(module, module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
        for root in roots:
            saves = root.register_state_dict_pre_hook(self._before_state)
            self._attach(root, saves, root.register_load_state_dict_pre_hook(self._before_state))

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Let these modules, with all below them, compute in float32 wherever they are called."""
        for module in modules:
            for part in module.modules():
                self._detach(part)
            island = _Float32Island(self)
            before = module.register_forward_pre_hook(island.enter, with_kwargs=True)
            self._attach(module, before, module.register_forward_hook(island.leave, always_call=True))

    def _attach(self, module: nn.Module, *handles: RemovableHandle) -> None:
        self._handles.setdefault(module, []).extend(handles)
        # torch.jit.script compiles hooks, and cannot compile these: it asks the module for what it shall script.
        vars(module)["__prepare_scriptable__"] = functools.partial(_to_script, module)

    def _detach(self, module: nn.Module) -> None:
        self._plans.pop(module, None)
        for handle in self._handles.pop(module, ()):
            handle.remove()
        vars(module).pop("__prepare_scriptable__", None)

    def remove(self) -> None:
        """Leave the modules as they were."""
        self.reset()
        self.clear_cache()
        for module in [*self._handles]:
            self._detach(module)
        self._step_owner = None

    def reset(self) -> None:
        """End the outermost call.

        Its hook does, but after a ``KeyboardInterrupt``, when torch runs no hooks: then the next backward pass does, or
        what asks for the state of a root or loads one.
        """
        call, self._call = self._call, None
        written = {} if call is None else call.end(self._copies)
        for module, what in written.items():
            if module._modules and what == "buffer":
                name = type(module).__name__
                warnings.warn(
                    f"{name} writes to a buffer of its own in a call, in half precision: a queue of features loses "
                    "nothing by it, a count stops and an average stands still. Move such sums to a module without "
                    f"others below it, or let all of it compute in float32: keep_fp32_modules=[{name}].",
                    TurboWarning,
                    stacklevel=2,
                )
                continue
            self.keep([module])
            for plan in self._plans.values():
                plan.expire()

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Around a step: says what to do where an operation does not take half precision; the hooks do all else."""
        with self.autocast(enabled=True):
            try:
                yield
            except RuntimeError as error:
                if any(word in str(error) for word in ("Half", "BFloat16", "dtype", "scalar type", "primitive")):
                    error.args = (f"{error}\n{_HINT}",)
                raise
            finally:
                self.reset()  # before autocast ends, which a call that was broken off has left

    def autocast(self, *, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        """Return what switches autocast on or off where steps run under it."""
        if self._step_device is None:
            return contextlib.nullcontext()
        return torch.autocast(self._step_device, self.dtype, enabled=enabled, cache_enabled=False)

    def is_autocast_on(self) -> bool:
        """Tell whether this is within a step that runs under autocast, and not within a call."""
        return self._step_device is not None and torch.is_autocast_enabled(self._step_device)

    def clear_cache(self) -> None:
        """Drop every half copy, because weights may have changed in ways that their version counters do not show."""
        self._copies.clear()

    def cast_modules(self, root: nn.Module) -> list[nn.Module]:
        """Return the modules from ``root`` downwards whose own tensors are cast."""
        modules, waiting = [], [root]
        while waiting:
            module = waiting.pop()
            if not (module._forward_pre_hooks and _is_kept(module)):
                waiting += [child for child in module._modules.values() if child is not None]
                if not (self.keep_batchnorm_fp32 and _is_batch_norm(module)):
                    modules.append(module)
        return modules

    # The hooks

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._call is None:
            # What is exported in mid-run, as by ONNX, is the float32 network; half weights still need casts.
            if self.has_half_weights or not _is_exporting():
                self._begin(module)
            if self._call is None:
                return None
        elif self._call.module_id == id(module):
            self._call.recursions += 1
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].dtype is self.dtype:
            return None  # nothing to cast, as in most calls
        return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        call = self._call
        if call is None or call.module_id != id(module):
            return None
        if call.recursions:
            call.recursions -= 1
            return None
        self._end()
        return cast_floats(output, self.output_dtype) if call.casts_output else None

    @_untraced
    def _begin(self, module: nn.Module) -> None:
        """Begin an outermost call, if this is a call of the network at all."""
        is_step = self._step_owner is not None and self._step_owner[0] is module
        if is_step and module.forward != self._step_owner[1]:  # type: ignore[index]
            return
        if "_is_replica" in vars(module):
            raise AmpUsageError("O2 and O3: expected one process a device, got DataParallel. Train with DDP.")
        plan = self._plans.get(module)
        if plan is None:
            plan = self._plans[module] = _Plan()
            self._attach(module, module.register_forward_hook(self._leave, prepend=True, always_call=True))
        if not plan.holds():
            plan.note(module, self._positions_below(module))
        # A module that a backward pass calls again gives what it gave before: half, if it was called inside of another.
        plan.is_outermost = plan.is_outermost or not _in_backward_pass()
        compares = plan.calls_to_compare > 0 and module.training and not torch.jit.is_tracing()
        plan.calls_to_compare -= compares
        self._call = _Call(module, plan.is_outermost, compares, self.autocast(enabled=False))
        self._call.begin(plan.positions, self._copies)

    @_untraced
    def _end(self) -> None:
        self.reset()

    def _before_state(self, *_: Any) -> None:
        self.reset()

    def _positions_below(self, root: nn.Module) -> list[_Position]:
        positions: list[_Position] = []
        for module in self.cast_modules(root):
            if isinstance(module, nn.RNNBase):
                # It sees that its weights are others, and lists them again.
                lists = ("_flat_weights", "_flat_weight_refs")
                positions += [_Position(module, vars(module), name, "list") for name in lists]
            for name, tensor in module._parameters.items():
                if _needs_cast(tensor, self.dtype):
                    positions.append(_Position(module, module._parameters, name, "weight"))
            for name, tensor in module._buffers.items():
                # One that is None may be made by a call; those of a norm without statistics are not.
                may_be_made = tensor is None and not isinstance(module, _NormBase)
                if may_be_made or _needs_cast(tensor, self.dtype):
                    positions.append(_Position(module, module._buffers, name, "buffer"))
        return positions


class _Float32Island:
    """The hooks of a module that stays float32; copies of the module bring theirs along."""

    def __init__(self, forward: HalfForward) -> None:
        self._forward = forward
        self._autocasts: list[Any] = []  # switched off, by calls of the module under way; None where it was off
        self._is_inner = False  # whether the module was called inside of another, when it was called last

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._autocasts.append(self._switch_off() if self._forward.is_autocast_on() else None)
        return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        autocast = self._autocasts.pop() if self._autocasts else None
        if autocast is not None:
            self._switch_on(autocast)
        is_inner = self._forward._call is not None
        # A backward pass may call it again on its own: it gives what it gave before.
        if is_inner or not _in_backward_pass():
            self._is_inner = is_inner
        return cast_floats(output, self._forward.dtype) if self._is_inner else None

    @_untraced
    def _switch_off(self) -> Any:
        autocast = self._forward.autocast(enabled=False)
        autocast.__enter__()
        return autocast

    @_untraced
    def _switch_on(self, autocast: Any) -> None:
        autocast.__exit__(None, None, None)


def _to_script(module: nn.Module) -> nn.Module:
    """Return what shares all with ``module`` but the hooks of this file, with half tensors in float32.

    torch.jit.script asks each module below for its own, and puts it into ``_modules``.
    """
    twin = module.__new__(type(module))
    own = vars(twin)
    own.update(vars(module), _modules=dict(module._modules))
    own.pop("__prepare_scriptable__")
    for hooks in ("_forward_pre_hooks", "_forward_hooks"):
        own[hooks] = type(own[hooks])((key, hook) for key, hook in own[hooks].items() if not _is_ours(hook))
    for holder in ("_parameters", "_buffers"):
        own[holder] = {name: _widened(tensor) for name, tensor in own[holder].items()}
    if isinstance(twin, nn.RNNBase):
        twin._init_flat_weights()
    return twin


def _widened(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.dtype not in HALF_DTYPES:
        return tensor
    wide = tensor.detach().float()
    return nn.Parameter(wide) if isinstance(tensor, nn.Parameter) else wide


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), (HalfForward, _Float32Island))


class HalfWeights:
    """The weights of O3: half precision until ``restore``, with a float32 ``state_dict``.

    Float32 stays what a module that computes in float32 has too, and every buffer of a module without weights, as the
    class weights of a loss, which may be called outside of the network: ``forward`` casts these in its calls.

    Args:
        forward: Says which modules are cast, and to what.
        models: Whose parameters and buffers are cast, in place; the ``Parameter`` objects stay the same.
        step_owner: The only model, if its training step is not its call. The step uses its own tensors, which stay too.
    """

    def __init__(self, forward: HalfForward, models: Iterable[nn.Module], step_owner: nn.Module | None = None) -> None:
        self.dtype = forward.dtype
        forward.has_half_weights = True
        models = list(models)
        modules = [module for model in models for module in forward.cast_modules(model)]
        modules_of_calls = [module for module in modules if module is not step_owner]
        others = {part for model in models for part in model.modules()}.difference(modules_of_calls)
        kept = {param for module in others for param in module.parameters(recurse=False)}
        for module in modules_of_calls:
            self._make_half(module, kept)
        self._modules = weakref.WeakSet(modules)
        self._handles = [module.register_state_dict_post_hook(_save_float32) for module in modules]

    def _make_half(self, module: nn.Module, kept: set[nn.Parameter]) -> None:
        own = set(module.parameters(recurse=False))
        buffers = module.buffers(recurse=False) if own else ()
        for tensor in (*(own - kept), *buffers):
            if _needs_cast(tensor, self.dtype):
                tensor.data, tensor.grad = tensor.data.to(self.dtype), None
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()

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
    """Bring what an optimizer has gathered to the dtype of its parameters, as torch does when it loads a state."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def _save_float32(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, tensor in state.items():
        if name.startswith(prefix) and isinstance(tensor, Tensor) and tensor.dtype in HALF_DTYPES:
            state[name] = tensor.float()


def _needs_cast(tensor: Tensor | None, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.is_floating_point() and tensor.dtype is not dtype


def _is_kept(module: nn.Module) -> bool:
    # The hook tells, and no list of ours, so that copies of the module are kept in float32 too.
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), _Float32Island) for hook in hooks)


def _in_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def has_sparse_gradients(module: nn.Module) -> bool:
    """Tell whether the weight gets sparse gradients, which a cast cannot pass on."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine


def _was_written(position: _Position, half: Tensor) -> bool:
    # Flattening for cuDNN counts as a change, and batch norm's kernel does not count its changes.
    if half.is_inference() or (position.kind == "weight" and isinstance(position.module, nn.RNNBase)):
        return False
    return half._version > 0 or (position.kind == "buffer" and isinstance(position.module, _NormBase))


def _address_of(tensor: Tensor) -> int | None:
    """Return where a tensor's numbers are; ``None`` for what stands in for one, as in an export or under torch.func."""
    try:
        return tensor.data_ptr() if type(tensor) is Tensor else None
    except RuntimeError:  # how torch says that it has none
        return None


def _is_new_buffer(now: Any, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return isinstance(now, Tensor) and now.dtype is dtype and not isinstance(now, nn.Parameter)


@torch.no_grad()
def _take_changes(wide: Tensor, half: Tensor) -> None:
    """Let a float32 tensor take the entries that a module has changed in its half copy; the others stay exact.

    Through ``data``, which leaves its version as it is: the copy stays valid, and so does what autograd has saved.
    """
    wide.data.copy_(torch.where(wide.to(half.dtype) == half, wide, half.to(wide.dtype)))
