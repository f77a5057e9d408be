"""One run's mixed precision: a level's casts, its loss scalers, and the order of backward pass, unscaling and step.

``apex_api.py`` puts apex's calls around it, the plugin ``ApexAMP`` Lightning's hooks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_turbo._checks import is_whole
from lightning_turbo.amp.autocast import FunctionCasts
from lightning_turbo.amp.half_forward import HalfForward, HalfWeights, find_kept, round_weights
from lightning_turbo.amp.levels import Properties, half_dtype_for, resolve
from lightning_turbo.amp.loss_scaling import LossScaler, is_finite
from lightning_turbo.errors import AmpLookupError, AmpUsageError, TurboWarning

__all__ = ["AmpEngine", "params_of"]


@dataclass
class _Gradients:
    """What is known of the gradients that an optimizer's next step uses."""

    waiting: bool = False
    """Whether a backward pass has made some since the last step."""
    scaled_by: int | None = None
    """The loss by whose scale they are multiplied still."""
    overflow: Tensor | None = None
    """1.0 on their device if an entry was inf or NaN when they were unscaled."""


class AmpEngine:
    """The machinery of O0-O3 for any training loop.

    Args:
        opt_level: ``"O0"`` to ``"O3"``.
        device_type: Where the model trains, as ``"cuda"`` or ``"cpu"``.
        dtype: The half dtype; ``None`` takes float16 on CUDA and bfloat16 elsewhere.
        exact_masters: Whether O2 begins with the float32 weights as they are, not rounded to half first.
        keep_float32: For O2 and O3: names or classes of modules that compute in float32.
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
        keep_float32: Sequence[str | type[nn.Module]] = (),
        num_losses: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        scale_window: int = 2000,
        cast_lists: str | None = None,
        cast_cache: bool = False,
        **overrides: Any,
    ) -> None:
        if not is_whole(num_losses, 1):
            raise AmpUsageError(f"num_losses={num_losses!r}: expected a whole number from 1 on.")
        self.dtype = half_dtype_for(device_type) if dtype is None else dtype
        self.properties: Properties = resolve(opt_level, dtype=self.dtype, **overrides)
        self.device_type = device_type
        self.exact_masters = exact_masters
        self.keep_float32 = [keep_float32] if isinstance(keep_float32, (str, type)) else list(keep_float32)
        if self.keep_float32 and not self.properties.casts_to_half:
            raise AmpUsageError(
                f"keep_float32={keep_float32!r} contradicts {opt_level}, which casts no module. Leave it out; at O1 "
                "run the function under torch.autocast(..., enabled=False)."
            )
        limits = {"min_loss_scale": min_loss_scale, "max_loss_scale": max_loss_scale, "scale_window": scale_window}
        self.scalers = [LossScaler(self.properties.loss_scale, **limits) for _ in range(num_losses)]
        # Whether any scaler does anything, and whether steps can be skipped.
        self.scales = not all(scaler.is_identity for scaler in self.scalers)
        self.is_dynamic = any(scaler.dynamic for scaler in self.scalers)
        lists = cast_lists or ("apex" if self.dtype is torch.float16 else "torch")
        casts = FunctionCasts(device_type, self.dtype, lists, cache=cast_cache)
        self.function_casts = casts if self.properties.patch_torch_functions else None
        self.half_forward: HalfForward | None = None
        self.half_weights: HalfWeights | None = None
        self._gradients: WeakKeyDictionary[Optimizer, _Gradients] = WeakKeyDictionary()
        self.last_flag: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_gradients": None}  # which are of this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _gradients=WeakKeyDictionary())

    @property
    def keeps_masters(self) -> bool:
        """Whether parameters stay float32 and are cast inside of calls (O2), not half themselves (O3)."""
        return self.properties.casts_to_half and bool(self.properties.master_weights)

    def convert(self, roots: Sequence[nn.Module], inner: Iterable[nn.Module] = (), *, steps: bool = False) -> None:
        """Let the models compute as the level says.

        Args:
            roots: The models.
            inner: Modules in them that are called on their own too.
            steps: Whether calls of the first model may be training steps, see ``HalfForward.guard``.

        Raises:
            AmpUsageError: If a module cannot be cast: a TorchScript module, or a lazy one.
        """
        props = self.properties
        if props.cast_model_type is None:
            return
        for root in roots:
            _check_castable(root, props.opt_level)
        forward = HalfForward(
            props.cast_model_type, props.cast_model_outputs or torch.float32, bool(props.keep_batchnorm_fp32)
        )
        kept = find_kept(roots, self.keep_float32)
        beneath = {part for module in kept for part in module.modules()}
        forward.keep(kept)
        forward.guard(roots, (module for module in inner if module not in beneath), steps=steps)
        self.half_forward = forward
        if not self.keeps_masters:
            self.half_weights = HalfWeights(forward, roots, step_owner=roots[0] if steps else None)
        elif not self.exact_masters:
            round_weights(forward, roots)

    def attach(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> None:
        """Bring an optimizer's state to the dtype of what it updates.

        Warns:
            TurboWarning: If the optimizer holds parameters that none of the models has, at O2 and O3.
        """
        if self.half_weights is not None:
            self.half_weights.attach(optimizer)
        own = {param for model in models for param in model.parameters()}
        foreign = sum(param not in own for param in params_of(optimizer)) if self.properties.casts_to_half else 0
        if foreign:
            warnings.warn(
                f"{type(optimizer).__name__} holds {foreign} parameters that the model does not have: "
                f"{self.properties.opt_level} casts nothing of theirs. Make them part of a model, or give "
                "amp.initialize every model that the optimizer trains.",
                TurboWarning,
                stacklevel=4,
            )

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of a loss.

        Raises:
            AmpLookupError: If ``loss_id`` is not below ``num_losses``.
        """
        if not is_whole(loss_id, 0) or loss_id >= len(self.scalers):
            raise AmpLookupError(
                f"loss_id={loss_id!r} has no scaler: expected 0 to {len(self.scalers) - 1}. "
                f"Pass num_losses={loss_id + 1 if isinstance(loss_id, int) else 2} or more."
            )
        return self.scalers[loss_id]

    # Forward and backward

    def region(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self.half_forward is not None:
            return self.half_forward.step_region()
        return contextlib.nullcontext() if self.function_casts is None else self.function_casts.region()

    def backward_region(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a backward pass, so that checkpointed forward passes are repeated as they were."""
        if self.half_forward is not None:
            return self.half_forward.backward_region()
        return contextlib.nullcontext() if self.function_casts is None else self.function_casts.backward_region()

    def forget_casts(self) -> None:
        """Drop half copies of weights, because the weights have changed or soon will."""
        if self.half_forward is not None:
            self.half_forward.forget_copies()
        if self.function_casts is not None:
            torch.clear_autocast_cache()

    @contextlib.contextmanager
    def backward(
        self, optimizers: Sequence[Optimizer], loss_id: int, *, delay_unscale: bool = False, of_buckets: bool = False
    ) -> Iterator[None]:
        """Around a backward pass: put gradients of earlier passes aside, and at the end unscale what was made.

        Args:
            optimizers: Whose gradients the pass makes.
            loss_id: Which scaler the loss is scaled with.
            delay_unscale: Leave the gradients scaled and added to those of before, until a pass without it or
                ``unscale``.
            of_buckets: Whether gradients may be views of DDP's buckets, which it writes over; copies are taken then.
        """
        for optimizer in optimizers:
            self._prepare(optimizer, loss_id)
        aside = {} if delay_unscale else self._put_aside(optimizers, of_buckets)
        yield
        self.note_backward(optimizers, loss_id if delay_unscale else None)
        if not delay_unscale:
            self._unscale(optimizers, aside, loss_id)

    def note_backward(self, optimizers: Iterable[Optimizer], scaled_by: int | None) -> None:
        """Note that a pass has made gradients for these, and the loss by whose scale they are multiplied still."""
        for optimizer in optimizers:
            own = self._of(optimizer)
            own.waiting, own.scaled_by = True, scaled_by

    def _prepare(self, optimizer: Optimizer, loss_id: int) -> None:
        own = self._of(optimizer)
        # An overflow is over when its gradients are: stepped with, or released.
        if not own.waiting or all(param.grad is None for param in params_of(optimizer)):
            own.overflow = None
        if own.scaled_by not in (None, loss_id):
            raise AmpUsageError(
                f"loss_id={loss_id!r}: gradients of loss {own.scaled_by!r} wait with its scale, and cannot be added to "
                "these. Step first, or use one loss_id until the gradients are unscaled."
            )

    def _put_aside(self, optimizers: Sequence[Optimizer], of_buckets: bool) -> dict[Tensor, Tensor]:
        """Take away the gradients that are unscaled already, and return them."""
        scaled = {p for o in optimizers if self._of(o).scaled_by is not None for p in params_of(o)}
        unscaled = [o for o in optimizers if scaled.isdisjoint(params_of(o))]
        aside: dict[Tensor, Tensor] = {}
        for param in (param for optimizer in unscaled for param in params_of(optimizer)):
            if param.grad is not None:
                aside[param], param.grad = param.grad.clone() if of_buckets else param.grad, None
        return aside

    @torch.no_grad()
    def _unscale(self, optimizers: Sequence[Optimizer], aside: dict[Tensor, Tensor], loss_id: int) -> None:
        """Unscale what a pass made and add what was put aside; a parameter of several optimizers counts once."""
        done: dict[Tensor, Optimizer] = {}
        for optimizer in optimizers:
            params = list(params_of(optimizer))
            fresh = [param for param in params if param not in done]
            self._unscale_grads(optimizer, [p.grad for p in fresh if p.grad is not None], self.scaler(loss_id))
            for other in {done[param] for param in params if param in done}:
                self._share(self._of(other).overflow, optimizer)
            done.update(dict.fromkeys(fresh, optimizer))
        for param, before in aside.items():
            _add(param, before)

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients if they are scaled still, and look for an overflow."""
        own = self._of(optimizer)
        if own.scaled_by is not None:
            own.overflow = None
            self._unscale([optimizer], {}, own.scaled_by)
            own.scaled_by = None

    def _unscale_grads(self, optimizer: Optimizer, grads: list[Tensor], scaler: LossScaler) -> None:
        if grads and not scaler.is_identity:
            scaler.unscale_(grads, self._flag(optimizer, grads[0].device) if scaler.dynamic else None)

    # Overflows

    def _of(self, optimizer: Optimizer) -> _Gradients:
        own = self._gradients.get(optimizer)
        if own is None:
            own = self._gradients[optimizer] = _Gradients()
        return own

    def _flag(self, optimizer: Optimizer, device: torch.device) -> Tensor:
        own = self._of(optimizer)
        if own.overflow is None:
            own.overflow = torch.zeros((), dtype=torch.float32, device=device)
        return own.overflow

    def _share(self, overflow: Tensor | None, optimizer: Optimizer) -> None:
        if overflow is not None:
            flag = self._flag(optimizer, overflow.device)
            torch.maximum(flag, overflow.to(flag.device), out=flag)

    def share_overflow(self, optimizers: Sequence[Optimizer], loss_id: int) -> None:
        """Let an overflow of this pass be one of all its optimizers, whichever one's gradients it was in."""
        scaler = self.scaler(loss_id)
        if scaler.dynamic and len(optimizers) > 1:
            for optimizer in optimizers:
                self._share(scaler.found_inf(next(params_of(optimizer)).device), optimizer)

    def overflow_flag(self, optimizer: Optimizer) -> Tensor | None:
        """Return 1.0 on the device if an overflow was found in this optimizer's gradients; ``None`` if none looked."""
        return self._of(optimizer).overflow

    def will_skip(self, optimizer: Optimizer) -> bool:
        """Return the same on the host; waits for the device."""
        return _is_set(self.overflow_flag(optimizer))

    @property
    def skipped_last_step(self) -> bool:
        """Whether the last call of ``step`` skipped the optimizer's; waits for the device."""
        return _is_set(self.last_flag)

    # The step

    def step(self, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Step, or skip on overflow.

        A second step with the same gradients is skipped as the first was. A fused optimizer is handed the overflow
        flag on the device and skips by itself, so that no value comes to the host.

        Args:
            optimizer: The optimizer whose gradients are unscaled.
            run: Calls the optimizer's own ``step``.

        Returns:
            What ``run`` returned, ``None`` for a skipped step.
        """
        flag = self.last_flag = self.overflow_flag(optimizer)
        self.note_step(optimizer)
        if flag is None:
            return run()
        if _skips_by_itself(optimizer):
            optimizer.found_inf = flag  # type: ignore[attr-defined]  # torch's fused optimizers read it
            try:
                return run()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        return None if flag.item() else run()

    def note_no_step(self) -> None:
        """Note that there were no gradients to step with; it counts as no skipped step."""
        self.last_flag = None

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that a step has used the gradients."""
        own = self._of(optimizer)
        own.waiting, own.scaled_by = False, None

    def forget_overflow(self, optimizer: Optimizer) -> None:
        """Let the next step with the same gradients be taken."""
        self._of(optimizer).overflow = None

    def update(self) -> None:
        """Settle the pass of every scaler that has unscaled gradients since it was settled last."""
        for scaler in self.scalers:
            if scaler.is_pending:
                scaler.update()

    # State

    def is_waiting(self, optimizer: Optimizer) -> bool:
        """Whether there are gradients that wait for this optimizer's step."""
        return self._of(optimizer).waiting

    def window_state(self, optimizers: Sequence[Optimizer]) -> dict[str, list[Any]]:
        """Return what a checkpoint needs beside gradients that wait for their step; waits for the device."""
        return {
            "scaled_by": [self._of(optimizer).scaled_by for optimizer in optimizers],
            "passes": [(scaler.is_pending, scaler.overflowed) for scaler in self.scalers],
        }

    def resume_window(
        self, optimizers: Sequence[Optimizer], scaled_by: Sequence[int | None], passes: Sequence[tuple[bool, bool]]
    ) -> None:
        """Continue with the gradients that optimizers have, from what another run's ``window_state`` returned."""
        for optimizer, loss_id in zip(optimizers, scaled_by, strict=True):
            grads = [param.grad for param in params_of(optimizer) if param.grad is not None]
            self._of(optimizer).waiting, self._of(optimizer).scaled_by = bool(grads), loss_id
            if grads and loss_id is None and self.is_dynamic:  # unscaled already: an overflow is in them
                self._flag(optimizer, grads[0].device).fill_(not all(is_finite(grad) for grad in grads))
        for scaler, (is_pending, overflowed) in zip(self.scalers, passes, strict=False):
            scaler.is_pending = is_pending
            scaler.found_inf(next(params_of(optimizers[0])).device).fill_(overflowed)

    def state_dict(self) -> OrderedDict[str, dict[str, Any]]:
        """Return the scalers' state in apex's format: ``loss_scaler0``, ``loss_scaler1``, ..."""
        return OrderedDict((f"loss_scaler{i}", scaler.state_dict()) for i, scaler in enumerate(self.scalers))

    def restore(self) -> None:
        """Give models and optimizers back as they were."""
        if self.half_forward is not None:
            self.half_forward.remove()
        if self.half_weights is not None:
            self.half_weights.restore()
        self.half_forward = self.half_weights = None
        self._gradients.clear()


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield all parameters that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_set(flag: Tensor | None) -> bool:
    return flag is not None and bool(flag.item())


def _add(param: Tensor, before: Tensor) -> None:
    if param.grad is None:
        param.grad = before
    elif before.is_sparse:
        param.grad.add_(before)
    else:  # the same tensor as before, as without scaling
        param.grad = before.add_(param.grad)


def _skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer's ``step`` reads ``found_inf`` on the device: torch's own where they are fused."""
    if type(optimizer) not in (SGD, Adam, AdamW) or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    # SGD's first step with momentum would keep uninitialised memory for its momentum if it skipped by itself.
    return type(optimizer) is not SGD or not any(
        group["momentum"] and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    )


def _check_castable(model: nn.Module, opt_level: str) -> None:
    for module in model.modules():
        _check_module(module, opt_level)


def _check_module(module: nn.Module, opt_level: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise AmpUsageError(
            f"{opt_level} was given a TorchScript module ({module.original_name}): expected modules of Python. "
            "Train the module that it was made of, and script or trace that afterwards; or take O0 or O1."
        )
    if any(is_lazy(tensor) for tensor in module.parameters(recurse=False)):
        raise AmpUsageError(
            f"{opt_level} was given a {type(module).__name__} that has not seen a batch yet, so that it has no "
            "weights: expected modules with weights. Call the model on a batch before, as in configure_model."
        )
