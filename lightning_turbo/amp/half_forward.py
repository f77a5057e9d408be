"""O2 and O3: a network computes in half precision during its calls.

At O2 the network keeps its float32 parameters, the masters, and the optimizer updates them. When a call of the network
begins, a half copy replaces each parameter in ``module._parameters``; when the call ends, the float32 parameters are
restored. The copies are made with ``parameter.to(half)``, so autograd itself returns float32 gradients. Optimizers,
callbacks and checkpoints need to know nothing about masters.

At O3 the parameters are half throughout (``HalfWeights``), and only inputs and outputs are cast.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lightning_turbo._pytree import map_tensors
from lightning_turbo.amp.half_call import Copies, HalfCall, Position, is_affine_batch_norm, positions_of
from lightning_turbo.amp.kept_modules import find_left_alone
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.amp.run_hooks import add_run_hooks, remove_run_hooks
from lightning_turbo.errors import AmpUsageError, TurboWarning

__all__ = ["HalfForward", "cast_floats", "refuse_half"]

_logger = logging.getLogger("lightning_turbo.amp")
_untraced: Any = torch.compiler.disable  # its type stubs do not accept methods
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # since torch 2.7

_HINT = (
    "During an O2 or O3 call, weights and inputs are half precision, which this operation does not support. Keep the "
    "module that calls it in float32: keep_fp32_modules=[its name or its class]. Or, if a step calls the forward of a "
    "layer, call the layer itself, which casts its inputs: layer(x)."
)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype``, in any structure. ``value`` is not modified."""
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


class _Plan:
    """The positions of the tensors that a call of one module casts, cached until the modules below change.

    ``HalfForward`` creates a plan at the first outermost call of a module and drops it together with the module's
    hooks. It refers to the dicts of the modules, not to the module that is called.
    """

    def __init__(self) -> None:
        self.positions: list[Position] = []
        self.is_outermost = False  # whether the module was the outermost call of a forward pass
        self.calls_to_compare = 0  # remaining training calls that compare values, see HalfCall
        self._children: list[dict[str, Any]] = []
        self._tensors: list[dict[str, Any]] = []
        self._found: Any = None

    def _modules_and_names(self) -> tuple[list[Any], list[str]]:
        return [*chain.from_iterable(map(dict.values, self._children))], [*chain.from_iterable(self._tensors)]

    def holds(self) -> bool:
        """Return whether the modules, and the names of their tensors, are unchanged."""
        if self._found is None:
            return False
        (modules, names), (found, found_names) = self._modules_and_names(), self._found
        return len(modules) == len(found) and all(map(operator.is_, modules, found)) and names == found_names

    def set_positions(self, root: nn.Module, positions: list[Position]) -> None:
        modules = [*root.modules()]
        self.positions = positions
        self.calls_to_compare = 2
        self._children = [module._modules for module in modules]
        self._tensors = [holder for module in modules for holder in (module._parameters, module._buffers)]
        self._found = self._modules_and_names()

    def expire(self) -> None:
        self._found = None


class HalfForward:
    """Casts the inputs and outputs of networks, and replaces their weights with half copies during calls.

    ``LevelCasts`` creates one for a run at O2 or O3. ``keep`` and ``register_hooks`` start it, ``remove`` ends it.

    Only the outermost call replaces weights and casts outputs back. An inner module casts only its inputs, so that a
    tensor promoted to float32 between two modules becomes half again.

    Outside calls every parameter is float32, in the backward pass too. When activation checkpointing calls a module
    again in a backward pass, that call uses copies as well. A copy or pickle of a module, made at any time, has float32
    weights and none of these hooks.

    A module without submodules that writes to a buffer in a call, such as a count or a moving average, computes in
    float32 from the next call on, so that small changes add up. A module with submodules, which would all become
    float32, causes a warning instead. Any module also switches to float32 if its weights without gradients are written
    to, as in a momentum encoder, or if one of the first two training calls writes to it through ``.data``. The logger
    ``lightning_turbo.amp`` reports this at level DEBUG.

    Args:
        dtype: The half dtype.
        output_dtype: Dtype of the floating-point outputs of the outermost call; ``None`` casts half outputs to float32
            and leaves others unchanged.
        keep_batchnorm_fp32: Whether affine batch norm, including synchronized, keeps float32 weights and statistics.
        step_device: Device type whose autocast encloses steps, such as ``"cuda"``: half weights need it outside calls.
            Calls, and modules that stay float32, run without autocast.

    Note:
        Two threads must not call one model concurrently.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        output_dtype: torch.dtype | None,
        keep_batchnorm_fp32: bool,
        step_device: str | None = None,
    ) -> None:
        self.dtype = dtype
        self.output_dtype = output_dtype
        self.keep_batchnorm_fp32 = keep_batchnorm_fp32
        self._step_device = step_device
        self.has_half_weights = False
        self._call: HalfCall | None = None  # the outermost call in progress
        self._copies = Copies(dtype)
        # By identity, because the hash of a module may follow its state, as in metrics of torchmetrics.
        self._plans: Any = WeakIdKeyDictionary()  # of modules that have been outermost calls
        self._handles: Any = WeakIdKeyDictionary()
        self._kept: Any = WeakIdKeyDictionary()
        self._left_alone: Any = WeakIdKeyDictionary()
        self._returned_losses: set[str] = set()  # classes of networks that a warning has named
        self._step_owner: tuple[nn.Module, Any] | None = None

    def register_hooks(self, roots: Iterable[nn.Module], *, steps: bool = False) -> None:
        """Hook the networks and their modules with weights; each may be the outermost call.

        Modules without weights, such as losses and metrics, compute outside calls in the dtype of their inputs. Modules
        with frozen half weights are left alone.

        Args:
            roots: Whole networks. The modules to keep in float32 must already be known.
            steps: Whether calls of the first network are training steps, not network calls, while its ``forward`` is
                replaced: this is how Lightning passes its steps through ``DistributedDataParallel``.
        """
        roots = list(roots)
        self._step_owner = (roots[0], roots[0].forward) if steps else None
        self._left_alone.update((part, None) for root in roots for part in find_left_alone(root))
        parts = (part for root in roots for part in self.cast_modules(root) if _has_weights(part))
        for module in {id(each): each for each in (*roots, *parts)}.values():
            # Before all other hooks, which then see half weights, for example pruning hooks that compute a weight from
            # others. The forward hook is registered at a module's first outermost call, because most modules never need
            # it.
            self._attach(module, module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
        for root in roots:
            saves = root.register_state_dict_pre_hook(self._before_state)
            self._attach(root, saves, root.register_load_state_dict_pre_hook(self._before_state))

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Let these modules and their submodules compute in float32 wherever they are called."""
        for module in modules:
            for part in module.modules():
                self._detach(part)
            wrapper = self._kept[module] = _Float32Wrapper(self)
            before = module.register_forward_pre_hook(wrapper.enter, with_kwargs=True)
            self._attach(module, before, module.register_forward_hook(wrapper.leave, always_call=True))

    def _attach(self, module: nn.Module, *handles: RemovableHandle) -> None:
        is_first = module not in self._handles
        self._handles.setdefault(module, []).extend(handles)
        add_run_hooks(module, *handles, plain_attributes=self._wide_attributes if is_first else None)

    def _detach(self, module: nn.Module) -> None:
        self._plans.pop(module, None)
        self._kept.pop(module, None)
        remove_run_hooks(module, self._handles.pop(module, ()))

    def _wide_attributes(self, module: nn.Module) -> dict[str, Any]:
        return {} if self._call is None else self._call.wide_tensors(module)

    def remove(self) -> None:
        """Remove all hooks and restore the modules."""
        self.reset()
        self.clear_cache()
        for module in [*self._handles]:
            self._detach(module)
        self._step_owner = None

    def reset(self) -> None:
        """End the outermost call.

        Normally its hook does. torch runs no hooks after a ``KeyboardInterrupt``; then the next backward pass does, or
        saving or loading the state of a network.
        """
        call, self._call = self._call, None
        written = [] if call is None else call.end(self._copies)
        for module, what in written:
            name = type(module).__name__
            if module._modules and what == "buffer":
                warnings.warn(
                    f"{name} writes to its own buffer in a call, in half precision. A queue of features is "
                    "safe, but a count stops and an average freezes. Move such sums to a module without submodules, or "
                    f"compute everything in float32: keep_fp32_modules=[{name}].",
                    TurboWarning,
                    stacklevel=2,
                )
                continue
            _logger.debug(
                "%s wrote to its own %s in a call, and computes in float32 from its next call on.", name, what
            )
            self.keep([module])
            for plan in self._plans.values():
                plan.expire()

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Wrap a step: add advice to errors about unsupported half precision. The hooks do everything else."""
        with self.autocast(enabled=True):
            try:
                yield
            except RuntimeError as error:
                if any(word in str(error) for word in ("Half", "BFloat16", "dtype", "scalar type", "primitive")):
                    error.args = (f"{error}\n{_HINT}",)
                raise
            finally:
                self.reset()  # before autocast ends: an aborted call has switched it off

    def autocast(self, *, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that switches autocast on or off, if steps run under autocast."""
        if self._step_device is None:
            return contextlib.nullcontext()
        return torch.autocast(self._step_device, self.dtype, enabled=enabled, cache_enabled=False)

    def is_autocast_on(self) -> bool:
        """Return whether this is inside a step under autocast, but not inside a call."""
        return self._step_device is not None and torch.is_autocast_enabled(self._step_device)

    def clear_cache(self) -> None:
        """Drop every half copy, because weights may have changed without an effect on their version counters."""
        self._copies.clear()

    @property
    def call(self) -> HalfCall | None:
        """The outermost call in progress."""
        return self._call

    def cast_modules(self, root: nn.Module) -> list[nn.Module]:
        """Return ``root`` and the modules below it whose own tensors are cast, each once."""
        modules: list[nn.Module] = []
        waiting = [root]
        seen = set()
        while waiting:
            module = waiting.pop()
            # A module may occur in several places.
            if id(module) in seen or module in self._kept or module in self._left_alone:
                continue
            seen.add(id(module))
            waiting += [child for child in module._modules.values() if child is not None]
            if not (self.keep_batchnorm_fp32 and is_affine_batch_norm(module)):
                modules.append(module)
        return modules

    # The hooks

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        is_entry = self._call is None
        if is_entry:
            # An export during a run, for example to ONNX, gets the float32 network; half weights still need the casts.
            if self.has_half_weights or not _is_exporting():
                self._begin(module)
            if self._call is None:
                return None
        elif self._call.module_id == id(module):  # type: ignore[union-attr]
            self._call.recursions += 1  # type: ignore[union-attr]
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].dtype is self.dtype:
            return None  # nothing to cast, the common case
        if is_entry:
            return self._call.cast_input(args), self._call.cast_input(kwargs)  # type: ignore[union-attr]
        return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        call = self._call
        if call is None or call.module_id != id(module):
            return None
        if call.recursions:
            call.recursions -= 1
            return None
        try:
            return self._cast_output(module, call, output) if call.casts_output else None
        finally:
            self._end()

    def _cast_output(self, module: nn.Module, call: HalfCall, output: Any) -> Any:
        """Cast the outputs of the network, and warn once if a scalar, such as a loss, was computed in half."""
        dtype = self.output_dtype
        scalars: list[Tensor] = []

        def widen(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            tensor = call.original(tensor)
            if tensor.ndim == 0 and tensor.dtype in HALF_DTYPES:
                scalars.append(tensor)
            return tensor.to(dtype or (torch.float32 if tensor.dtype in HALF_DTYPES else tensor.dtype))

        result = map_tensors(output, widen)
        if scalars:
            self._warn_of_scalar(type(module).__name__)
        return result

    @_untraced
    def _warn_of_scalar(self, name: str) -> None:
        if name not in self._returned_losses:
            self._returned_losses.add(name)
            bits = 8 if self.dtype is torch.bfloat16 else 11
            warnings.warn(
                f"{name} returns a scalar that it computed in {self.dtype}, with {bits} bits. A logged loss may then "
                "seem constant, which misleads early stopping and checkpointing. Compute it outside the network, from "
                "its outputs, or in a submodule named in keep_fp32_modules; or use O1.",
                TurboWarning,
                stacklevel=2,
            )

    @_untraced
    def _begin(self, module: nn.Module) -> None:
        """Begin an outermost call, unless this is a training step."""
        is_step = self._step_owner is not None and self._step_owner[0] is module
        if is_step and module.forward != self._step_owner[1]:  # type: ignore[index]
            return
        if "_is_replica" in vars(module):
            raise AmpUsageError("O2 and O3: expected one process per device, got DataParallel. Train with DDP.")
        _refuse_cached(module)
        plan = self._plans.get(module)
        if plan is None:
            plan = self._plans[module] = _Plan()
            self._attach(module, module.register_forward_hook(self._leave, prepend=True, always_call=True))
        if not plan.holds():
            places = [place for part in self.cast_modules(module) for place in positions_of(part, self.dtype)]
            plan.set_positions(module, places)
        # Recomputed in a backward pass, a module must return what it returned before: half, if it was an inner module.
        plan.is_outermost = plan.is_outermost or not _in_backward_pass()
        compares = plan.calls_to_compare > 0 and module.training and not torch.jit.is_tracing()
        plan.calls_to_compare -= compares
        self._call = HalfCall(module, self.dtype, plan.is_outermost, compares, self.autocast(enabled=False))
        self._call.begin(plan.positions, self._copies)

    @_untraced
    def _end(self) -> None:
        self.reset()

    def _before_state(self, *_: Any) -> None:
        self.reset()


class _Float32Wrapper:
    """The hooks of a module that stays float32, from ``HalfForward.keep`` until their removal.

    The module always receives float32 tensors, and returns half ones to an enclosing network call.
    """

    def __init__(self, forward: HalfForward) -> None:
        self._forward = forward
        self._autocasts: list[Any] = []  # one entry per call in progress; None if autocast was off
        self._is_inner = False  # whether its last call was inside another one

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._autocasts.append(self._switch_off() if self._forward.is_autocast_on() else None)
        return self._widen(args), self._widen(kwargs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        autocast = self._autocasts.pop() if self._autocasts else None
        if autocast is not None:
            self._switch_on(autocast)
        call = self._forward.call
        # Recomputed on its own in a backward pass, it must return what it returned before.
        if call is not None or not _in_backward_pass():
            self._is_inner = call is not None
        return self._narrow(output) if self._is_inner else None

    def _widen(self, value: Any) -> Any:
        """Cast the inputs of the module to float32, or replace them with the originals from which they were cast."""
        call = self._forward.call

        def widen(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return (tensor if call is None else call.original(tensor)).to(torch.float32)

        return map_tensors(value, widen)

    def _narrow(self, value: Any) -> Any:
        """Cast the outputs to half for the enclosing network; a scalar, such as a loss, keeps its precision."""
        call = self._forward.call

        def narrow(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0 or not tensor.is_floating_point():
                return tensor
            return tensor.to(self._forward.dtype) if call is None else call.narrow(tensor)

        return map_tensors(value, narrow)

    @_untraced
    def _switch_off(self) -> Any:
        autocast = self._forward.autocast(enabled=False)
        autocast.__enter__()
        return autocast

    @_untraced
    def _switch_on(self, autocast: Any) -> None:
        autocast.__exit__(None, None, None)


def _refuse_cached(module: nn.Module) -> None:
    """Raise an error if weights are cached across the border of a call, where their dtype changes."""
    if parametrize._cache_enabled and any(isinstance(part, ParametrizationList) for part in module.modules()):
        raise AmpUsageError(
            f"O2 and O3: expected calls outside of torch.nn.utils.parametrize.cached(), got one of a "
            f"{type(module).__name__} in it, whose weights are float32 outside of calls and half in them. Enter "
            "cached() in the forward of the whole network, or use O1."
        )


def _in_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
