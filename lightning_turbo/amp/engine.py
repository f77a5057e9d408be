"""One training run's mixed precision: the level's casts, masters and scalers, and the order of a step.

``frontend.py`` puts apex's calls around it, the plugin ``ApexAMP`` Lightning's hooks.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from lightning_turbo.amp.function_casts import FunctionCasts
from lightning_turbo.amp.half_weights import HalfWeights
from lightning_turbo.amp.levels import Properties, half_dtype_for, resolve
from lightning_turbo.amp.loss_scaling import LossScaler
from lightning_turbo.amp.model_casts import Boundary
from lightning_turbo.errors import AmpLookupError, AmpUsageError

__all__ = ["AmpEngine"]


class AmpEngine:
    """The machinery of O0-O3 for any training loop.

    Args:
        opt_level: ``"O0"`` to ``"O3"``.
        device_type: Where the model trains, as ``"cuda"`` or ``"cpu"``.
        dtype: The half dtype; ``None`` takes float16 on CUDA and bfloat16 elsewhere.
        exact_masters: Whether O2's masters are the float32 weights as they were, not rounded to half first.
        num_losses: How many losses have a scaler of their own; 1 or more.
        min_loss_scale: Floor of the dynamic scale, ``None`` for none.
        max_loss_scale: Ceiling of the dynamic scale.
        scale_window: Settled passes without overflow before the dynamic scale doubles.
        cast_lists: For O1, ``"apex"`` or ``"torch"``, see ``FunctionCasts``; ``None`` takes apex's lists with
            float16 and torch's with bfloat16, which apex never had.
        cast_cache: For O1, whether a weight's cast is used again until ``forget_casts``.
        **overrides: apex's overrides of the level, see ``resolve``.

    Raises:
        AmpUsageError: If the level, an override or a limit is refused.
    """

    def __init__(
        self,
        opt_level: str,
        *,
        device_type: str,
        dtype: torch.dtype | None = None,
        exact_masters: bool = True,
        num_losses: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        scale_window: int = 2000,
        cast_lists: str | None = None,
        cast_cache: bool = False,
        **overrides: Any,
    ) -> None:
        if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
            raise AmpUsageError(f"num_losses={num_losses!r} is no number of losses; accepted is an int from 1 on.")
        self.dtype = half_dtype_for(device_type) if dtype is None else dtype
        self.properties: Properties = resolve(opt_level, dtype=self.dtype, **overrides)
        self.device_type = device_type
        self.exact_masters = exact_masters
        self.scalers = [
            LossScaler(
                self.properties.loss_scale,
                min_loss_scale=min_loss_scale,
                max_loss_scale=max_loss_scale,
                scale_window=scale_window,
            )
            for _ in range(num_losses)
        ]
        # Whether any scaler does anything, and whether steps can be skipped.
        self.scales = not all(scaler.is_identity for scaler in self.scalers)
        self.is_dynamic = any(scaler.dynamic for scaler in self.scalers)
        if cast_lists is None:
            cast_lists = "apex" if self.dtype is torch.float16 else "torch"
        casts = FunctionCasts(device_type, self.dtype, cast_lists, cache=cast_cache)
        self.function_casts = casts if self.properties.patch_torch_functions else None
        self.weights: HalfWeights | None = None
        self.boundary: Boundary | None = None
        self._flags: dict[int, Tensor] = {}
        self._last_flag: Tensor | None = None
        self._stepped: set[int] = set()

    def convert(
        self, modules: Iterable[nn.Module], guarded: Iterable[nn.Module], *, step_owner: nn.Module | None = None
    ) -> None:
        """Cast the modules' weights if the level says so, and watch the modules where data enters and leaves.

        Args:
            modules: The modules whose own parameters and buffers are cast, without their submodules'.
            guarded: The modules at whose calls floating inputs and outputs are cast.
            step_owner: One of the modules, whose training step calls the others: its buffers are left as they are.

        Raises:
            AmpUsageError: If a module is one whose weights cannot be cast: a TorchScript module, or a lazy one.
        """
        props = self.properties
        if props.cast_model_type is not None:
            modules = list(modules)
            for module in modules:
                self._check_castable(module)
            self.weights = HalfWeights(
                modules,
                props.cast_model_type,
                keep_batchnorm_fp32=bool(props.keep_batchnorm_fp32),
                masters=bool(props.master_weights) and props.casts_to_half,
                exact=self.exact_masters,
                without_buffers=step_owner,
            )
            self.boundary = Boundary(props.cast_model_type, props.cast_model_outputs or torch.float32, step_owner)
            self.boundary.guard(guarded)

    def _check_castable(self, module: nn.Module) -> None:
        level = self.properties.opt_level
        if isinstance(module, torch.jit.ScriptModule):
            raise AmpUsageError(
                f"{level} was given a TorchScript module ({module.original_name}); accepted are modules of Python. "
                "Train the module that it was made of, and script or trace that afterwards; or take O0 or O1."
            )
        if any(is_lazy(tensor) for tensor in module.parameters(recurse=False)):
            raise AmpUsageError(
                f"{level} was given a {type(module).__name__} that has not seen a batch yet, so that it has no "
                "weights; accepted are modules with weights. Call the model on a batch before, as in configure_model."
            )

    def attach(self, optimizer: Optimizer) -> None:
        """Give an optimizer the masters of its half weights."""
        if self.weights is not None:
            self.weights.to_devices()
            self.weights.attach(optimizer)

    @property
    def has_masters(self) -> bool:
        """Whether the optimizers update masters."""
        return self.weights is not None and any(True for _ in self.weights.masters())

    @contextlib.contextmanager
    def widened(self) -> Iterator[None]:
        """Put the masters in the place of the model's half weights; calls of the model are then in float32."""
        if self.weights is None or self.boundary is None or not self.has_masters:
            yield
            return
        with self.boundary.lifted(), self.weights.widened():
            yield

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of a loss.

        Raises:
            AmpLookupError: If ``loss_id`` is not below ``num_losses``.
        """
        if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise AmpLookupError(
                f"loss_id={loss_id!r} has no scaler; accepted are 0 to {len(self.scalers) - 1}. "
                f"Pass num_losses={loss_id + 1 if isinstance(loss_id, int) else 2} or more."
            )
        return self.scalers[loss_id]

    def region(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass: O1's casts around functions."""
        if self.boundary is not None:
            self.boundary.reset()
        return contextlib.nullcontext() if self.function_casts is None else self.function_casts.region()

    def backward_region(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a backward pass, so that checkpointed forward passes are repeated as they were."""
        if self.boundary is not None:
            return self.boundary.inside()
        return contextlib.nullcontext() if self.function_casts is None else self.function_casts.backward_region()

    # One backward pass at a time, its gradients unscaled when it ends: apex's way.

    def stash(self, optimizers: Sequence[Optimizer], *, of_buckets: bool) -> dict[Tensor, Tensor | None]:
        """Take the gradients gathered so far aside, so that the next backward pass stands alone.

        Args:
            optimizers: The optimizers whose parameters' gradients are taken.
            of_buckets: Whether they may be views of DDP's buckets, which it writes over; copies are taken then.
        """
        kept: dict[Tensor, Tensor | None] = {}
        for optimizer in optimizers:
            for param in _params(optimizer):
                if param not in kept:
                    kept[param] = param.grad.clone() if of_buckets and param.grad is not None else param.grad
                    param.grad = None
            # An overflow is over when its gradients are: stepped with, or released.
            if id(optimizer) in self._stepped or all(kept[param] is None for param in _params(optimizer)):
                self.forget_overflow(optimizer)
            if self.weights is not None:
                for weight, _ in self.weights.pairs(optimizer):
                    weight.grad = None
        return kept

    @torch.no_grad()
    def collect(
        self, optimizers: Sequence[Optimizer], kept: dict[Tensor, Tensor | None], loss_id: int, *, release: bool = False
    ) -> None:
        """Unscale what a backward pass made, in float32 where there are masters, and add what was taken aside.

        Args:
            optimizers: The optimizers whose parameters' gradients are collected.
            kept: What ``stash`` returned; empty if nothing was taken aside.
            loss_id: Which scaler the loss was scaled with.
            release: Whether half gradients are given up at once; apex keeps them until ``zero_grad``.
        """
        scaler = self.scaler(loss_id)
        collected: dict[Tensor, Optimizer] = {}  # with the first optimizer that holds it
        for optimizer in optimizers:
            if self.weights is not None:
                for weight, master in self.weights.pairs(optimizer):
                    if weight.grad is not None and master.requires_grad and master not in collected:
                        master.grad = weight.grad.float()
                    if release:
                        weight.grad = None
            params = list(_params(optimizer))
            others = {id(collected[param]): collected[param] for param in params if param in collected}
            fresh = [param for param in params if param not in collected]
            self._unscale(optimizer, fresh, scaler)
            for other in others.values():
                flag = self._flags.get(id(other))
                if flag is not None:
                    own = self._flag(optimizer, flag.device)
                    torch.maximum(own, flag, out=own)
            for param in fresh:
                collected[param] = optimizer
                before = kept.get(param)
                if before is not None and param.grad is not None and before.is_sparse:
                    param.grad.add_(before)
                elif before is not None:  # the same tensor as before, as without scaling
                    param.grad = before if param.grad is None else before.add_(param.grad)

    def share_overflow(self, optimizers: Sequence[Optimizer], loss_id: int) -> None:
        """Let an overflow of this pass be one of all its optimizers, whichever one's gradients it was in."""
        scaler = self.scaler(loss_id)
        if scaler.dynamic and len(optimizers) > 1:
            for optimizer in optimizers:
                own = self._flag(optimizer, next(_params(optimizer)).device)
                torch.maximum(own, scaler.found_inf(own.device), out=own)

    def noted(self, optimizers: Sequence[Optimizer]) -> list[bool]:
        """Return what is known of gradients that wait for a step, see ``note``; waits for the device."""
        flags = [self.will_skip(optimizer) and id(optimizer) not in self._stepped for optimizer in optimizers]
        return flags + [fact for scaler in self.scalers for fact in (scaler.is_pending, scaler.overflowed)]

    def note(self, optimizers: Sequence[Optimizer], noted: Sequence[bool]) -> None:
        """Go on with gradients that were unscaled in another run, from what its ``noted`` returned."""
        devices = [next(_params(optimizer)).device for optimizer in optimizers]
        for optimizer, device, flag in zip(optimizers, devices, noted, strict=False):
            if flag:
                self._flag(optimizer, device).fill_(1.0)
        facts = noted[len(optimizers) :]
        for scaler, pending, overflowed in zip(self.scalers, facts[::2], facts[1::2], strict=False):
            scaler.is_pending = pending
            if overflowed and scaler.dynamic:
                scaler.found_inf(devices[0]).fill_(1.0)

    def agree_on_overflow(self, optimizers: Sequence[Optimizer]) -> None:
        """Let an overflow of one rank be one of all, in passes that no DDP synchronised. A collective call."""
        dynamic = [scaler for scaler in self.scalers if scaler.dynamic]
        if dynamic:
            devices = [next(_params(optimizer)).device for optimizer in optimizers]
            noted = [self._flag(optimizer, device) for optimizer, device in zip(optimizers, devices, strict=True)]
            noted += [scaler.found_inf(devices[0]) for scaler in dynamic]
            on_any = torch.stack(noted)
            torch.distributed.all_reduce(on_any, torch.distributed.ReduceOp.MAX)
            torch._foreach_copy_(noted, list(on_any.unbind()))

    # Many backward passes, unscaled once before the step: the way of Lightning's automatic optimization.

    @torch.no_grad()
    def unscale(self, optimizer: Optimizer, loss_id: int = 0) -> None:
        """Unscale an optimizer's gradients in place and note an overflow."""
        if self.weights is not None:
            self.weights.fold_all()
        self.forget_overflow(optimizer)
        self._unscale(optimizer, _params(optimizer), self.scaler(loss_id))

    def _unscale(self, optimizer: Optimizer, params: Iterable[Tensor], scaler: LossScaler) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        if grads and not scaler.is_identity:
            scaler.unscale_(grads, self._flag(optimizer, grads[0].device) if scaler.dynamic else None)

    def _flag(self, optimizer: Optimizer, device: torch.device) -> Tensor:
        if id(optimizer) not in self._flags:
            self._flags[id(optimizer)] = torch.zeros((), dtype=torch.float32, device=device)
        return self._flags[id(optimizer)]

    def forget_overflow(self, optimizer: Optimizer) -> None:
        """Drop what was noted of this optimizer's gradients, because there are others."""
        self._flags.pop(id(optimizer), None)
        self._stepped.discard(id(optimizer))

    def will_skip(self, optimizer: Optimizer) -> bool:
        """Whether an overflow was noted in this optimizer's gradients; waits for the device."""
        flag = self._flags.get(id(optimizer))
        return flag is not None and bool(flag.item())

    def take_no_step(self) -> None:
        """Pass a step over for which there are no gradients; it counts as none that was skipped."""
        self._last_flag = None

    @property
    def skipped_last_step(self) -> bool:
        """Whether the last call of ``step`` skipped the optimizer's; waits for the device."""
        return self._last_flag is not None and bool(self._last_flag.item())

    def step(self, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Step, or skip on overflow, and bring the model's half weights up to date.

        A second step with the same gradients is skipped as the first was, unless ``forget_overflow`` comes between. A
        fused optimizer is handed the overflow flag on the device and skips by itself, so that no value comes to the
        host; but for SGD's first step with momentum, which would keep uninitialised memory for its momentum.

        Args:
            optimizer: The optimizer whose gradients are unscaled.
            run: Calls the optimizer's own ``step``.

        Returns:
            What ``run`` returned, ``None`` for a skipped step.
        """
        flag = self._last_flag = self._flags.get(id(optimizer))
        self._stepped.add(id(optimizer))
        with contextlib.nullcontext() if self.weights is None else self.weights.copied_after(optimizer):
            if flag is None:
                return run()
            if skips_by_itself(optimizer) and not _begins_momentum(optimizer):
                optimizer.found_inf = flag  # type: ignore[attr-defined]  # torch's fused optimizers read it
                try:
                    return run()
                finally:
                    del optimizer.found_inf  # type: ignore[attr-defined]
            return None if flag.item() else run()

    def forget_casts(self) -> None:
        """Drop the half copies that autocast keeps of weights, because the weights have changed or soon will."""
        if self.function_casts is not None:
            torch.clear_autocast_cache()

    def update(self) -> None:
        """Settle the pass of every scaler that has unscaled gradients since it was settled last."""
        for scaler in self.scalers:
            if scaler.is_pending:
                scaler.update()

    def state_dict(self) -> OrderedDict[str, dict[str, Any]]:
        """Return the scalers' state in apex's format: ``loss_scaler0``, ``loss_scaler1``, ..."""
        return OrderedDict((f"loss_scaler{i}", scaler.state_dict()) for i, scaler in enumerate(self.scalers))

    def restore(self) -> None:
        """Give models and optimizers back as they were."""
        if self.boundary is not None:
            self.boundary.remove()
        if self.weights is not None:
            self.weights.restore()
        self.boundary = self.weights = None
        self._flags.clear()
        self._stepped.clear()


# By class of optimizer: whether ``step`` takes a scaler instead of a flag.
_takes_scaler: WeakKeyDictionary[type[Optimizer], bool] = WeakKeyDictionary()


def skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer's ``step`` reads ``found_inf``, as torch's fused optimizers do and apex's do not."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not all(group.get("fused", True) for group in optimizer.param_groups):  # a state of an unfused one was loaded
        return False
    kind = type(optimizer)
    if kind not in _takes_scaler:
        _takes_scaler[kind] = "grad_scaler" in inspect.signature(kind.step).parameters
    return not _takes_scaler[kind]


def _begins_momentum(optimizer: Optimizer) -> bool:
    """Whether the next step makes momentum for a group of SGD's: for parameters with gradients that have none yet."""
    return isinstance(optimizer, SGD) and any(
        group["momentum"] and all(optimizer.state.get(p, {}).get("momentum_buffer") is None for p in updated)
        for group in optimizer.param_groups
        if (updated := [param for param in group["params"] if param.grad is not None])
    )


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
