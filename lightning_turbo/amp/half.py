"""O2 and O3: a network computes in half precision during its calls.

The life of a half copy is one call. When the outermost call of a network begins, a half copy takes the place of each
of its float32 parameters and buffers (``_begin``); when the call ends, the float32 tensors are back in their places
(``end``). The copies are made with ``parameter.to(half)``, so autograd itself returns float32 gradients. Optimizers,
callbacks and checkpoints find float32 parameters at all other times and need to know nothing about masters.

At O3 the parameters themselves are half from ``start`` to ``stop``, and calls replace only the buffers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrize

from lightning_turbo.amp.kept_modules import find_left_alone
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.errors import AmpStateError, AmpUsageError, TurboWarning

__all__ = ["HalfCalls", "Hook", "cast_floats", "map_tensors", "refuse_half"]

_untraced: Any = torch.compiler.disable  # its type stubs do not accept methods
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # since torch 2.7

_HINT = (
    "During an O2 or O3 call, weights and inputs are half precision, which this operation does not support. Keep the "
    "module that calls it in float32: keep_fp32_modules=[its name or its class]. Or, if a step calls the forward of a "
    "layer, call the layer itself, which casts its inputs: layer(x). A buffer that an earlier call has written is "
    "float32: cast it where it meets half tensors. Weights that follow others, as those of a momentum encoder, are "
    "moved outside of the call."
)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``change`` applied to its tensors, in the collections that Lightning moves to a device."""
    # The arguments of a call are a tuple and a dict, mostly of tensors and numbers, for which this is faster.
    if isinstance(value, Tensor):
        return change(value)
    if value is None or isinstance(value, (int, float, str, bytes, range)):
        return value
    if type(value) is tuple:
        return tuple([map_tensors(each, change) for each in value])
    if type(value) is dict:
        return {key: map_tensors(each, change) for key, each in value.items()}
    return apply_to_collection(value, Tensor, change, allow_frozen=True)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype``. ``value`` is not modified."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t)


def refuse_half(model: nn.Module, refused: Iterable[torch.dtype]) -> None:
    """Raise an error if a model trains weights in half precision. Frozen weights may be half.

    Raises:
        AmpUsageError: If a parameter that requires gradients has one of the dtypes; the message names it.
    """
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    half = next((f"{weight.dtype} in {name!r}" for name, weight in trained if weight.dtype in refused), None)
    if half is not None:
        raise AmpUsageError(
            f"{type(model).__name__}: expected a model in float32, got {half}. Do not call .half() on it, or create it "
            "in half precision: the level decides what becomes half. Frozen weights may stay half: "
            "requires_grad_(False)."
        )


class Hook:
    """A hook of a run. In a copy or pickle of its module it is a function of Python's own that does nothing.

    So the copy computes as a plain module, and the pickle loads where this package is not installed.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> Any:
        """Run the hook."""
        return self._run(*args)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    @property
    def __name__(self) -> str:
        # An AttributeError, because other callers do without a name. torch.jit.script needs it to compile the hook.
        raise AmpStateError(
            "torch.jit.script: expected a module outside of a run at O2 or O3, which has hooks on it. Script it after "
            "the run, or use torch.jit.trace or torch.export."
        )


class _Swap(NamedTuple):
    """A float32 tensor and the half copy in its place."""

    module: nn.Module
    holder: dict[str, Any]  # the module's dict of parameters, or that of buffers
    name: str
    wide: Tensor
    half: Tensor
    version: int  # of the copy when it was made: 1 if the wide tensor was created in inference mode, otherwise 0
    address: int | None  # of the data of the copy; ``tensor.data = ...`` changes it, but not the version


class _Call:
    """An outermost call in progress, and all that it has replaced; ``_begin`` creates it, and ``end`` drops it."""

    def __init__(self, module: nn.Module, modules: list[nn.Module]) -> None:
        self.module_id = id(module)  # torch.compile traces comparisons of ids better than of modules
        self.modules = modules  # those whose own tensors are cast
        self.recursions = 0  # calls of the module inside its own call
        self.swaps: list[_Swap] = []
        self.halves: dict[int, Tensor] = {}  # id of a float32 tensor -> its copy, the same one for tied weights
        self.weight_lists: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of recurrent networks
        self.half_before: set[tuple[int, str]] = set()  # buffers that the program itself has made half
        self.originals: dict[int, tuple[Tensor, Tensor]] = {}  # id of a cast input -> it and its original


class HalfCalls:
    """The half precision of some networks, from ``start`` to ``stop``.

    Every module with weights has a hook that runs before its forward pass. In the outermost call, which finds no other
    call in progress, it replaces the tensors of all modules below; a second hook, after the forward pass, restores them
    and casts the output to float32. In an inner call it only casts the inputs, so that a tensor promoted to float32
    between two modules becomes half again.

    No half copy exists outside of calls, so the backward pass sees float32 parameters. When activation checkpointing
    calls a module again in the backward pass, that is an outermost call with copies of its own.

    A parameter that a call writes or replaces ends the call with an error. A buffer that a call writes, replaces or
    creates keeps the new values, and is float32 in later calls too, so that averages, counts and codebooks accumulate.
    Buffers of modules without weights, and those with a single number and no dimension, are float32 in all calls.

    Args:
        roots: Whole networks.
        dtype: The dtype of calls.
        halves_weights: Whether parameters are cast from ``start`` to ``stop`` (O3), instead of in calls alone.
        output_dtype: Dtype of the floating-point outputs of the outermost call; ``None`` casts half outputs to float32
            and leaves others unchanged.
        keep_batchnorm_fp32: Whether affine batch norm, including synchronized, keeps float32 weights and statistics.
        kept: Modules that compute in float32, together with their submodules, wherever they are called.
        steps: Whether calls of the first network are training steps, not network calls, while its ``forward`` is
            replaced: this is how Lightning passes its steps through ``DistributedDataParallel``. Its own tensors, which
            the step uses, stay float32.

    Note:
        Two threads must not call one model concurrently.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        dtype: torch.dtype,
        *,
        halves_weights: bool = False,
        output_dtype: torch.dtype | None = None,
        keep_batchnorm_fp32: bool = False,
        kept: Iterable[nn.Module] = (),
        steps: bool = False,
    ) -> None:
        self.dtype = dtype
        self._roots = list(roots)
        self._halves_weights = halves_weights
        self._output_dtype = output_dtype
        self._keep_batchnorm_fp32 = keep_batchnorm_fp32
        # By identity, because the hash of a module may follow its state, as in metrics of torchmetrics.
        self._kept = {id(module): module for module in kept}
        self._step_owner = (roots[0], roots[0].forward) if steps else (None, None)
        self._uncast: dict[int, nn.Module] = {}  # modules whose own tensors stay as they are, float32 or half
        self._undo = contextlib.ExitStack()
        self._call: _Call | None = None
        # Of all calls, by the id of a module:
        self._written: dict[tuple[int, str], nn.Module] = {}  # buffers that a call has written, float32 since then
        self._is_outer: dict[int, bool] = {}  # whether the module's last call was the program's, not another module's
        self._warned: set[str] = set()  # classes of networks whose loss a warning has named

    # The run

    def start(self) -> None:
        """Hook the networks and their modules with weights, and cast the parameters at O3."""
        modules = {id(part): part for root in self._roots for part in root.modules()}
        below = (part for module in self._kept.values() for part in module.modules())
        alone = (part for root in self._roots for part in find_left_alone(root))
        self._uncast = {id(part): part for part in itertools.chain(below, alone)}
        self._refuse_beside(modules)
        for module in modules.values():
            self._hook_module(module)
        for root in self._roots:
            before = Hook(lambda *_: self.end())
            self._undo.callback(root.register_state_dict_pre_hook(before).remove)
            self._undo.callback(root.register_load_state_dict_pre_hook(before).remove)
        if self._halves_weights:
            self._halve(modules)

    def _refuse_beside(self, modules: dict[int, nn.Module]) -> None:
        """Raise an error if a module has a weight in an attribute that no call can replace."""
        if self._halves_weights or self.dtype not in HALF_DTYPES:
            return
        for key, module in modules.items():
            # A LightningModule may keep lists of weights for its optimizers.
            if key in self._uncast or module is self._step_owner[0]:
                continue
            own = ("_parameters", "_buffers", "_modules", *(_RNN_LISTS if isinstance(module, nn.RNNBase) else ()))
            name = next((name for name, value in vars(module).items() if name not in own and _holds_weights(value)), "")
            if name:
                raise AmpUsageError(
                    f"O2: expected weights as attributes of modules, got one in {name!r} of {type(module).__name__}, "
                    "which a call would find in float32 beside half inputs. Assign the parameter itself, also to a "
                    "second module (self.weight = other.weight); or use O1."
                )

    def _hook_module(self, module: nn.Module) -> None:
        if id(module) in self._kept:
            self._hook_begin(module, self._enter_kept)
            self._hook_end(module, self._leave_kept)
        # Modules without weights, such as losses and metrics, compute outside calls in the dtype of their inputs.
        elif id(module) not in self._uncast and (_has_weights(module) or any(root is module for root in self._roots)):
            self._hook_begin(module, self._enter)

    # Both come before the other hooks of the module: pre-hooks such as those of pruning, which compute a weight from
    # others, find half weights, and hooks after an outermost call find float32 weights and outputs.

    def _hook_begin(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._undo.callback(module.register_forward_pre_hook(Hook(run), prepend=True, with_kwargs=True).remove)

    def _hook_end(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._undo.callback(module.register_forward_hook(Hook(run), prepend=True, always_call=True).remove)

    def _halve(self, modules: dict[int, nn.Module]) -> None:
        """Cast the parameters until ``stop``, and save them in float32."""
        half_before = {key: _half_names(module) for key, module in modules.items()}
        cast = [part for root in self._roots for part in self._cast_modules(root) if part is not self._step_owner[0]]
        ids = {id(module) for module in cast}
        # What a float32 module also holds stays float32.
        others = {p for key, part in modules.items() if key not in ids for p in part.parameters(recurse=False)}
        for module in cast:
            self._halve_module(module, others)
        for key, module in modules.items():
            save = Hook(functools.partial(_save_float32, half_before[key]))
            self._undo.callback(module.register_state_dict_post_hook(save).remove)
        self._undo.callback(self._widen_all, modules, half_before)

    def _halve_module(self, module: nn.Module, others: set[nn.Parameter]) -> None:
        for param in module.parameters(recurse=False):
            if self._needs_cast(param) and param not in others:
                param.data, param.grad = param.data.to(self.dtype), None
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()

    def _widen_all(self, modules: dict[int, nn.Module], half_before: dict[int, set[str]]) -> None:
        """Cast the tensors of all modules to float32, later additions too, except what was half before the run."""
        for part in (part for root in self._roots for part in root.modules()):
            before = half_before[id(part)] if id(part) in modules else ()
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and tensor.dtype is self.dtype and name not in before:
                    tensor.data, tensor.grad = tensor.data.float(), None

    # A resumed run must not begin with a call that writes averages in half precision.

    def written_buffers(self) -> list[str]:
        """Return the names of buffers that calls have written, in the first network."""
        return [name for name, key, _ in self._named_buffers() if key in self._written]

    def note_written(self, names: Iterable[str]) -> None:
        """Keep these buffers of the first network in float32, as if a call had written them."""
        known = set(names)
        self._written.update({key: module for name, key, module in self._named_buffers() if name in known})

    def _named_buffers(self) -> Iterator[tuple[str, tuple[int, str], nn.Module]]:
        for path, module in self._roots[0].named_modules():
            for name in module._buffers:
                yield f"{path}.{name}".removeprefix("."), (id(module), name), module

    def stop(self) -> None:
        """Remove the hooks, and cast the parameters of O3 to float32."""
        self.end()
        self._undo.close()

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Wrap a step: add advice to errors about unsupported half precision. The hooks do everything else."""
        try:
            yield
        except RuntimeError as error:
            words = ("Half", "BFloat16", "dtype", "scalar type", "primitive")
            if not isinstance(error, AmpUsageError) and any(word in str(error) for word in words):
                error.args = (f"{error}\n{_HINT}",)
            raise
        finally:
            self.end()

    def backward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager of a backward pass."""
        self.end()
        return contextlib.nullcontext()

    # The hooks of modules that are cast

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        is_outermost = self._call is None
        # An export during a run, for example to ONNX, gets the float32 network; half weights still need the casts.
        if is_outermost and (self._halves_weights or not _is_exporting()):
            self._begin(module)
        if self._call is None:
            return None
        if not is_outermost and self._call.module_id == id(module):
            self._call.recursions += 1
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].dtype is self.dtype:
            return None  # nothing to cast, the common case
        if is_outermost:
            return map_tensors(args, self._narrow), map_tensors(kwargs, self._narrow)
        return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._call is None or self._call.module_id != id(module):
            return None
        if self._call.recursions:
            self._call.recursions -= 1
            return None
        try:
            return self._cast_output(module, output) if self._is_outer[id(module)] else None
        finally:
            self._end(module)

    def _cast_output(self, module: nn.Module, output: Any) -> Any:
        """Cast the outputs of the network, and warn once if a scalar, such as a loss, was computed in half."""
        dtype = self._output_dtype
        scalars: list[Tensor] = []

        def widen(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            tensor = self._original(tensor)
            if tensor.ndim == 0 and tensor.dtype in HALF_DTYPES:
                scalars.append(tensor)
            return tensor.to(dtype or (torch.float32 if tensor.dtype in HALF_DTYPES else tensor.dtype))

        result = map_tensors(output, widen)
        if scalars:
            self._warn_of_scalar(type(module).__name__)
        return result

    @_untraced
    def _warn_of_scalar(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            bits = 8 if self.dtype is torch.bfloat16 else 11
            warnings.warn(
                f"{name} returns a scalar that it computed in {self.dtype}, with {bits} bits. A logged loss may then "
                "seem constant, which misleads early stopping and checkpointing. Compute it outside the network, from "
                "its outputs, or in a submodule named in keep_fp32_modules; or use O1.",
                TurboWarning,
                stacklevel=2,
            )

    # The hooks of modules that stay float32: they always receive float32, and return half within an outermost call

    def _enter_kept(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def widen(tensor: Tensor) -> Tensor:
            return self._original(tensor).to(torch.float32) if tensor.is_floating_point() else tensor

        return map_tensors(args, widen), map_tensors(kwargs, widen)

    def _leave_kept(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._note_caller(module, self._call is None)
        if self._is_outer[id(module)]:
            return None
        # A scalar, such as a loss, keeps its precision.
        return map_tensors(output, lambda tensor: self._narrow(tensor) if tensor.ndim else tensor)

    def _note_caller(self, module: nn.Module, is_outer: bool) -> None:
        """Note whether the program calls a module itself, which then gets float32 outputs.

        Activation checkpointing repeats calls of inner modules on their own in a backward pass, and they must return
        what they returned before: half. Such a call changes nothing that is known.
        """
        if is_outer and _in_backward_pass():
            self._is_outer.setdefault(id(module), False)
        else:
            self._is_outer[id(module)] = is_outer

    # Tensors at the borders of a call. A module that stays float32, or the recipient of the output, gets the original
    # of a tensor that was cast on the way, and not a rounded one.

    def _narrow(self, tensor: Tensor) -> Tensor:
        """Return a floating-point tensor in half; the call in progress remembers the original."""
        if not tensor.is_floating_point() or tensor.dtype is self.dtype:
            return tensor
        half = tensor.to(self.dtype)
        if self._call is not None and not torch.compiler.is_compiling():  # ids mean nothing in a graph
            self._call.originals[id(half)] = half, tensor
        return half

    def _original(self, tensor: Tensor) -> Tensor:
        """Return the tensor from which this one was cast in the call in progress, or the tensor itself."""
        if self._call is None or torch.compiler.is_compiling():
            return tensor
        return self._call.originals.get(id(tensor), (tensor, tensor))[1]

    # A call

    @_untraced
    def _begin(self, module: nn.Module) -> None:
        """Begin an outermost call, unless this is a training step."""
        owner, forward = self._step_owner
        if module is owner and module.forward != forward:
            return
        if "_is_replica" in vars(module):
            raise AmpUsageError("O2 and O3: expected one process per device, got DataParallel. Train with DDP.")
        _refuse_cached(module)
        call = _Call(module, self._cast_modules(module))
        # The hook that ends outermost calls comes with the first one, because most modules never are outermost. torch
        # looks for it after the forward pass.
        if id(module) not in self._is_outer:
            self._hook_end(module, self._leave)
        self._note_caller(module, True)
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # A copy made in inference mode has no version counter, which shows what the call writes.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            self._call = call
            for part in call.modules:
                self._replace(call, part)

    def _cast_modules(self, root: nn.Module) -> list[nn.Module]:
        """Return ``root`` and the modules below it whose own tensors are cast, each once."""
        modules: list[nn.Module] = []
        waiting = [root]
        seen = set()
        while waiting:
            module = waiting.pop()
            if id(module) in seen or id(module) in self._uncast:
                continue
            seen.add(id(module))
            waiting += [child for child in module._modules.values() if child is not None]
            if not (self._keep_batchnorm_fp32 and isinstance(module, _BatchNorm) and module.affine):
                modules.append(module)
        return modules

    def _replace(self, call: _Call, module: nn.Module) -> None:
        """Replace the tensors of one module with half copies."""
        if isinstance(module, nn.RNNBase):
            # The module notices the replaced weights and makes these lists again.
            call.weight_lists.append((vars(module), {name: vars(module)[name] for name in _RNN_LISTS}))
        for name, wide in module._parameters.items():
            if self._needs_cast(wide):
                self._swap(call, module, module._parameters, name, wide)
        if module._buffers:
            self._replace_buffers(call, module)

    def _replace_buffers(self, call: _Call, module: nn.Module) -> None:
        # Buffers of a module without weights keep their precision: the frequencies of rotary embeddings need it.
        has_weights = _has_weights(module)
        for name, wide in module._buffers.items():
            if wide is not None and wide.dtype in HALF_DTYPES:
                call.half_before.add((id(module), name))
            elif has_weights and self._needs_cast(wide) and wide.ndim and (id(module), name) not in self._written:
                self._swap(call, module, module._buffers, name, wide)

    def _swap(self, call: _Call, module: nn.Module, holder: dict[str, Any], name: str, wide: Tensor) -> None:
        half = call.halves.get(id(wide))
        if half is None:
            half = call.halves[id(wide)] = wide.to(self.dtype)
        holder[name] = half
        call.swaps.append(_Swap(module, holder, name, wide, half, half._version, _address_of(half)))

    def _needs_cast(self, tensor: Tensor | None) -> TypeGuard[Tensor]:
        return tensor is not None and tensor.is_floating_point() and tensor.dtype not in (self.dtype, *HALF_DTYPES)

    @_untraced
    def _end(self, module: nn.Module) -> None:
        """End the call of a module.

        Raises:
            AmpUsageError: If it has written to a parameter.
        """
        written = self.end()
        if written is not None:
            part, name = written
            names = (path for root in self._roots for path, each in root.named_modules() if each is part)
            raise AmpUsageError(
                f"A call of {type(module).__name__} wrote to {name!r} of {type(part).__name__}, whose half copy ends "
                "with the call. Write it outside of the call, for example in training_step before the network is "
                "called. Only a module that computes it from no other module's weights, which are half in the call, "
                f"can be kept in float32 instead: keep_fp32_modules=[{next(names, '')!r}]."
            )

    @_untraced
    def end(self) -> tuple[nn.Module, str] | None:
        """Restore the float32 tensors, and keep what was written to buffers.

        Normally a call's hook does this. torch runs no hooks after a ``KeyboardInterrupt``; then the next backward pass
        does, or saving or loading the state of a network.

        Returns:
            The module and the name of a parameter that was written to.
        """
        call, self._call = self._call, None
        if call is None:
            return None
        for attributes, before in call.weight_lists:
            attributes.update(before)
        written = None
        for swap in call.swaps:
            if swap.holder is swap.module._buffers:
                self._end_buffer(swap)
            else:
                written = written or ((swap.module, swap.name) if _was_written(swap) else None)
                swap.holder[swap.name] = swap.wide
        self._widen_new_buffers(call)
        return written

    @torch.no_grad()
    def _end_buffer(self, swap: _Swap) -> None:
        """Restore a buffer with what the call wrote to its copy. One that the call has replaced stays replaced."""
        module, holder, name, wide, half, *_ = swap
        # The kernels of norms, whose statistics stay half as in apex, do not change the version counter.
        is_norm = isinstance(module, _NormBase)
        if holder.get(name) is half:
            holder[name] = wide
            is_written = _data_changed(swap)
            if half.shape != wide.shape:  # the call has set its data
                wide.data = half.to(wide.dtype)
            elif is_written or is_norm:
                # The other entries stay exact. ``data`` keeps the version counter, which autograd compares.
                wide.data.copy_(torch.where(wide.to(half.dtype) == half, wide, half.to(wide.dtype)))
            if not is_written or is_norm:
                return
        self._written[id(module), name] = module

    def _widen_new_buffers(self, call: _Call) -> None:
        """Cast the buffers that the call has created in half precision, or put in place of others, to float32."""
        for module in call.modules:
            for name, now in module._buffers.items():
                if now is not None and now.dtype in HALF_DTYPES and (id(module), name) not in call.half_before:
                    module._buffers[name] = now.float()  # in the graph as in float32
                    self._written[id(module), name] = module


_RNN_LISTS = ("_flat_weights", "_flat_weight_refs")


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _half_names(module: nn.Module) -> set[str]:
    tensors = (*module._parameters.items(), *module._buffers.items())
    return {name for name, tensor in tensors if tensor is not None and tensor.dtype in HALF_DTYPES}


def _save_float32(half_before: set[str], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in (*module._parameters, *module._buffers):
        tensor = state.get(prefix + name)
        if name not in half_before and isinstance(tensor, Tensor) and tensor.dtype in HALF_DTYPES:
            state[prefix + name] = tensor.float()


def _was_written(swap: _Swap) -> bool:
    """Return whether a call wrote to the copy of a parameter, set its ``data``, or put something else in its place."""
    if swap.holder.get(swap.name) is not swap.half:
        return True
    # A recurrent network sets the data of its weights to flatten them. A weight of torch.func has no address.
    return swap.address is not None and not isinstance(swap.module, nn.RNNBase) and _data_changed(swap)


def _data_changed(swap: _Swap) -> bool:
    """Return whether a call wrote to the copy or set its ``data``. Writes in place through ``data`` are not seen."""
    return swap.half._version != swap.version or _address_of(swap.half) != swap.address


def _address_of(tensor: Any) -> int | None:
    """Return the address of a tensor's data; ``None`` for a stand-in, such as under torch.func."""
    try:
        return tensor.data_ptr() if type(tensor) is Tensor else None
    except RuntimeError:  # torch raises this if there is no storage
        return None


def _refuse_cached(module: nn.Module) -> None:
    """Raise an error if weights are cached across the border of a call, where their dtype changes."""
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, module.modules())):
        raise AmpUsageError(
            f"O2 and O3: expected calls outside of torch.nn.utils.parametrize.cached(), got one of a "
            f"{type(module).__name__} in it, whose weights are float32 outside of calls and half in them. Enter "
            "cached() in the forward of the whole network, or use O1."
        )


def _holds_weights(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(_holds_weights, value))
    if type(value) is dict:
        return any(map(_holds_weights, value.values()))
    return isinstance(value, nn.Parameter)


def _in_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1
