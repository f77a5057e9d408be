"""What a call of ``amp.initialize`` set up, and the methods of the optimizers that it took over."""

from __future__ import annotations

import contextlib
import gc
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_turbo.amp.collectives import on_dense
from lightning_turbo.amp.engine import AmpEngine
from lightning_turbo.errors import AmpUsageError, TurboWarning

__all__ = ["Session"]


class Session:
    """One ``initialize``: its engine, its optimizers, and how far these are.

    Args:
        engine: Has converted the models and is attached to the optimizers.
        models: The models that were given.
        optimizers: The optimizers that were given. Each keeps to this session from now on.
        verbosity: 0 logs nothing.
    """

    def __init__(
        self, engine: AmpEngine, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], verbosity: int
    ) -> None:
        self.engine = engine
        self.verbosity = verbosity
        self._optimizers = list(optimizers)
        self._scaled: set[int] = set()  # optimizers whose gradients wait for their unscaling
        self._stepped: set[int] = set()  # optimizers that have used theirs
        # Of optimizers before their first backward pass: what their half weights were.
        self._before: dict[int, dict[Tensor, Tensor]] = {}
        # Before their optimizer's first step: weights whose masters may differ between the ranks of a DDP.
        self._apart: set[Tensor] = set()
        self._callers: list[_Caller] = []
        self._models = [weakref.ref(model) for model in models]
        self._wrappers: list[weakref.ref[DistributedDataParallel]] | None = None
        self._local: set[int] = set()  # optimizers with unscaled gradients of passes under no_sync
        if engine.weights is not None:
            for optimizer in optimizers:
                pairs = engine.weights.pairs(optimizer)
                self._before[id(optimizer)] = {weight: weight.detach().clone() for weight, _ in pairs}
                self._apart.update(weight for weight, _ in pairs if engine.weights.exact)
            self._callers += [_Caller(model) for model in models if self._apart]
        for optimizer in optimizers:
            self._take_over(optimizer)

    @staticmethod
    def of(optimizer: Optimizer) -> Session | None:
        """Return the session that has taken an optimizer over."""
        session = getattr(optimizer, "_lightning_turbo_amp", None)
        return session if isinstance(session, Session) else None

    @contextlib.contextmanager
    def backward(self, optimizers: Sequence[Optimizer], loss_id: int, delay_unscale: bool) -> Iterator[None]:
        """Make these optimizers ready for a backward pass, and at the exit unscale what it made.

        Args:
            optimizers: Whose gradients the pass makes.
            loss_id: Which scaler the loss is scaled with.
            delay_unscale: Leave the gradients scaled.
        """
        engine = self.engine
        self._settle_masters(optimizers)
        unscaled = [] if delay_unscale else self._without_scaled(optimizers)
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        kept = engine.stash(unscaled, of_buckets=ranks)
        local = ranks and self._is_local()
        if not local and not self._local.isdisjoint(map(id, optimizers)) and any(g is not None for g in kept.values()):
            self._warn_of_local()
        with contextlib.nullcontext() if engine.boundary is None else engine.boundary.inside():
            yield
        if delay_unscale:
            self._scaled.update(map(id, optimizers))
        else:
            engine.collect(optimizers, kept, loss_id)
            engine.share_overflow(optimizers, loss_id)  # apex skips the steps of all
            self._stepped.difference_update(map(id, optimizers))
            self._scaled.difference_update(map(id, optimizers))
            self._local.update(map(id, optimizers) if local else ())

    def _is_local(self) -> bool:
        """Whether the models are in a DistributedDataParallel of several ranks that is under ``no_sync``."""
        if torch.distributed.get_world_size() == 1:
            return False
        if self._wrappers is None:  # a model is not told what wraps it
            models = {model() for model in self._models}
            found = [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]
            self._wrappers = [weakref.ref(ddp) for ddp in found if not models.isdisjoint(ddp.module.modules())]
        wrappers = [ddp for reference in self._wrappers if (ddp := reference()) is not None]
        return bool(wrappers) and not any(ddp.require_backward_grad_sync for ddp in wrappers)

    def _warn_of_local(self) -> None:
        self._local.clear()
        if torch.distributed.get_rank() == 0:
            warnings.warn(
                "scale_loss: gradients of passes under no_sync() were unscaled one by one, and "
                "DistributedDataParallel does not average them in the pass that follows: the ranks will train apart. "
                "Pass delay_unscale=True in all passes of a window but the last, which then unscales and averages all.",
                TurboWarning,
                stacklevel=7,  # above the contexts of scale_loss
            )

    def _settle_masters(self, optimizers: Iterable[Optimizer]) -> None:
        """At the first backward pass let masters follow weights that the program has set since ``initialize``.

        DDP has made the ranks' half weights alike; at the first pass that it synchronises, the masters become so too.
        """
        weights = self.engine.weights
        if weights is None or not (self._before or self._callers):
            return
        for optimizer in optimizers:
            weights.take_changes(self._before.pop(id(optimizer), {}))
        for ddp in dict.fromkeys(caller.ddp for caller in self._callers if caller.ddp is not None):
            shared = {p for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}
            first = torch.distributed.get_global_rank(ddp.process_group, 0)
            for weight, master in (pair for optimizer in optimizers for pair in weights.pairs(optimizer)):
                if weight in shared and weight in self._apart:
                    on_dense(torch.distributed.broadcast, master.data, src=first, group=ddp.process_group)
                    self._apart.discard(weight)
        for caller in self._callers:
            caller.ddp = None

    def _begin(self, optimizer: Optimizer) -> None:
        """Settle the masters of an optimizer that steps for the first time, for good."""
        weights = self.engine.weights
        if weights is None or not (self._before or self._callers):
            return
        weights.take_changes(self._before.pop(id(optimizer), {}))
        self._apart.difference_update(w for w, m in weights.pairs(optimizer) if m.grad is not None)
        if not self._apart:
            for caller in self._callers:
                caller.handle.remove()
            self._callers.clear()

    def _without_scaled(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Return those that have no gradient of a pass that was left scaled, and share none with one that has."""
        held = {id(p) for o in optimizers if id(o) in self._scaled for group in o.param_groups for p in group["params"]}
        return [o for o in optimizers if held.isdisjoint(id(p) for group in o.param_groups for p in group["params"])]

    def _no_longer_needed(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield an optimizer's masters but for those that another one holds and is yet to step with."""
        waiting = [other for other in self._optimizers if other is not optimizer and id(other) not in self._stepped]
        held = {id(param) for other in waiting for group in other.param_groups for param in group["params"]}
        if self.engine.weights is not None:
            for _, master in self.engine.weights.pairs(optimizer):
                if id(master) not in held:
                    yield master

    def _take_over(self, optimizer: Optimizer) -> None:
        """Let ``step`` and ``zero_grad`` of this one optimizer know of masters and skipped steps."""
        session, engine, step, zero_grad = self, self.engine, optimizer.step, optimizer.zero_grad

        def amp_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if closure is not None and (engine.has_masters or engine.will_skip(self)):
                raise AmpUsageError(
                    "optimizer.step was given a closure; at O2 and on a skipped step none is accepted, because the "
                    "gradients of masters are made by scale_loss. Run it first and call step()."
                )
            session._begin(self)
            casts = torch.is_autocast_enabled(engine.device_type)
            with torch.autocast(engine.device_type, enabled=False) if casts else contextlib.nullcontext():
                result = engine.step(self, step if closure is None else lambda: step(closure))
            engine.forget_overflow(self)  # one step is skipped, as in apex
            engine.forget_casts()
            session._stepped.add(id(self))
            session._local.discard(id(self))
            for master in session._no_longer_needed(self):
                master.grad = None
            self._opt_called = True  # type: ignore[attr-defined]  # for schedulers: a skipped step is none forgotten
            return result

        amp_step.__dict__.update(getattr(step, "__dict__", {}))  # a scheduler made before has marked its own wrapper

        def amp_zero_grad(self: Optimizer, set_to_none: bool | None = None) -> None:
            engine.forget_overflow(self)
            session._local.discard(id(self))
            pairs = [] if engine.weights is None else engine.weights.pairs(self)
            if not pairs:
                zero_grad(*(() if set_to_none is None else (set_to_none,)))
                return
            masters = {id(master) for _, master in pairs}
            for _, master in pairs:
                master.grad = None
            # apex zeroes what the model holds; set_to_none=True releases it.
            own = [param for group in self.param_groups for param in group["params"] if id(param) not in masters]
            for param in (*(weight for weight, _ in pairs), *own):
                if param.grad is not None:
                    param.grad = None if set_to_none else torch.zeros_like(param.grad)

        optimizer.step = types.MethodType(amp_step, optimizer)
        optimizer.zero_grad = types.MethodType(amp_zero_grad, optimizer)
        optimizer._lightning_turbo_amp = self  # type: ignore[attr-defined]


class _Caller:
    """Notes which DistributedDataParallel calls a model for a backward pass of all ranks."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.ddp: Any = None
        self.handle: Any = None if model is None else model.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        ddp = None if torch.compiler.is_compiling() else DistributedDataParallel._active_ddp_module
        if ddp is not None and ddp.require_backward_grad_sync and torch.is_grad_enabled():
            self.ddp = ddp

    def __reduce__(self) -> Any:
        return _Caller, ()  # what the hook is in a copy of the model, and in a pickle
