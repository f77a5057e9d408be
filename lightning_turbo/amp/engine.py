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

from lightning_turbo._checks import expect, is_whole
from lightning_turbo._skipped_steps import was_skipped
from lightning_turbo.amp.autocast import FunctionCasts
from lightning_turbo.amp.half_forward import HalfForward, HalfWeights, cast_state, find_kept, round_weights
from lightning_turbo.amp.levels import HALF_DTYPES, Properties, half_dtype_for, resolve
from lightning_turbo.amp.loss_scaling import LossScaler
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
    """1.0 on their device if a pass that made some overflowed."""

    def note_overflow(self, found: Tensor) -> None:
        self.overflow = found if self.overflow is None else torch.maximum(self.overflow, found.to(self.overflow.device))


class _NoCasts:
    """The casts of O0, and of O1 with its casts off: none."""

    def region(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    backward_region = region

    def forget(self) -> None:
        pass


_NO_CASTS = _NoCasts()


class AmpEngine:
    """The machinery of O0-O3 for any training loop.

    Args:
        opt_level: ``"O0"`` to ``"O3"``.
        device_type: Where the model trains, as ``"cuda"`` or ``"cpu"``.
        dtype: The half dtype; ``None`` takes ``cast_model_type`` if that is one, else float16 on CUDA and bfloat16
            elsewhere.
        **overrides: apex's overrides of the level, see ``resolve``. All others are as in ``amp.initialize``.

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
        expect(is_whole(num_losses, 1), "num_losses", num_losses, "a whole number from 1 on", AmpUsageError)
        asked = overrides.get("cast_model_type")
        usual = asked if asked in HALF_DTYPES else half_dtype_for(device_type)
        self.dtype = usual if dtype is None else dtype
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
        casts = FunctionCasts(device_type, self.dtype, cast_lists, cache=cast_cache)
        self.function_casts = casts if self.properties.patch_torch_functions else None
        self.half_forward: HalfForward | None = None
        self.half_weights: HalfWeights | None = None
        self._gradients: WeakKeyDictionary[Optimizer, _Gradients] = WeakKeyDictionary()
        self._last_overflow: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_gradients": None}  # which are of this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _gradients=WeakKeyDictionary())

    @property
    def scales(self) -> bool:
        """Whether the scalers do anything; all of them have the same settings."""
        return not self.scalers[0].is_identity

    @property
    def is_dynamic(self) -> bool:
        """Whether steps can be skipped."""
        return self.scalers[0].dynamic

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
        output_dtype = props.cast_model_outputs or torch.float32
        self.half_forward = forward = HalfForward(props.cast_model_type, output_dtype, bool(props.keep_batchnorm_fp32))
        kept = find_kept(roots, self.keep_float32)
        beneath = {part for module in kept for part in module.modules()}
        forward.keep(kept)
        forward.guard(roots, (module for module in inner if module not in beneath), steps=steps)
        if not self.keeps_masters:
            self.half_weights = HalfWeights(forward, roots, step_owner=roots[0] if steps else None)
        elif not self.exact_masters:
            round_weights(forward, roots)

    def attach(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> None:
        """Bring an optimizer's state to the dtype of what it updates.

        Warns:
            TurboWarning: If the optimizer holds parameters that none of the models has, at O2 and O3.
        """
        self._gradients[optimizer] = _Gradients()
        if self.half_weights is not None:
            cast_state(optimizer)
        own = {param for model in models for param in model.parameters()}
        foreign = sum(param not in own for param in params_of(optimizer))
        if foreign and self.properties.casts_to_half:
            warnings.warn(
                f"{type(optimizer).__name__} holds {foreign} parameters of no model, which "
                f"{self.properties.opt_level} does not cast. Make them part of a model, or give amp.initialize every "
                "model that the optimizer trains.",
                TurboWarning,
                stacklevel=4,
            )

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that were attached."""
        return list(self._gradients)

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer was attached."""
        return optimizer in self._gradients

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of a loss.

        Raises:
            AmpLookupError: If ``loss_id`` is not below ``num_losses``.
        """
        valid = is_whole(loss_id, 0) and loss_id < len(self.scalers)
        expect(valid, "loss_id", loss_id, f"0 to {len(self.scalers) - 1}, or a larger num_losses", AmpLookupError)
        return self.scalers[loss_id]

    # Forward and backward

    @property
    def _casts(self) -> FunctionCasts | HalfForward | _NoCasts:
        return self.function_casts or self.half_forward or _NO_CASTS

    def region(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return self._casts.region()

    def forget_casts(self) -> None:
        """Drop half copies of weights; after a step, whose optimizer may write to ``weight.data``."""
        self._casts.forget()

    @contextlib.contextmanager
    def backward(self, optimizers: Sequence[Optimizer], loss_id: int, *, delay_unscale: bool) -> Iterator[None]:
        """Around a backward pass, whose checkpointed forward passes are repeated as they were; then unscale.

        Half copies are dropped after it: they would take memory until the step.

        Args:
            optimizers: Whose gradients the pass makes.
            loss_id: Which scaler the loss is scaled with.
            delay_unscale: Leave the gradients scaled and added to those of before, until a pass without it or
                ``unscale``.
        """
        for optimizer in optimizers:
            self._prepare(optimizer, loss_id)
        delays, unscales = self.scales and delay_unscale, self.scales and not delay_unscale
        aside = self._put_aside(optimizers) if unscales else {}
        if delays:
            self._scale_again(optimizers, loss_id)
        try:
            with self._casts.backward_region():
                yield
        except BaseException:
            for param, grad in aside.items():
                param.grad = grad
            raise
        self.forget_casts()
        for own in map(self._of, optimizers):
            own.waiting, own.scaled_by = True, loss_id if delays else None
        if unscales:
            self._unscale(optimizers, loss_id)
        _add(aside)

    def _prepare(self, optimizer: Optimizer, loss_id: int) -> None:
        own = self._of(optimizer)
        # An overflow is over when its gradients are: stepped with, or released.
        if not own.waiting or all(param.grad is None for param in params_of(optimizer)):
            own.overflow = None
        if own.scaled_by not in (None, loss_id):
            raise AmpUsageError(
                f"loss_id={loss_id!r}: expected loss_id={own.scaled_by!r}, whose scaled gradients are still "
                "accumulated. Step first, or use one loss_id per window."
            )

    def _unscaled(self, optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor]:
        """Return the gradients of earlier passes that are unscaled already."""
        scaled = {p for o in optimizers if self._of(o).scaled_by is not None for p in params_of(o)}
        return {p: p.grad for o in optimizers for p in params_of(o) if p.grad is not None and p not in scaled}

    def _scale_again(self, optimizers: Sequence[Optimizer], loss_id: int) -> None:
        """Bring gradients of earlier passes to the scale of those that a pass adds to them."""
        unscaled = [optimizer for optimizer in optimizers if self._of(optimizer).scaled_by is None]
        if unscaled:
            self.scaler(loss_id).scale_(self._unscaled(optimizers).values())
        for own in map(self._of, unscaled):
            own.scaled_by = loss_id

    def _put_aside(self, optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor]:
        """Take away the gradients that are unscaled already, and return them; of DDP's buckets copies."""
        waiting = self._unscaled(optimizers)
        for param in waiting:
            param.grad = None
        return {param: grad.clone() if grad._is_view() else grad for param, grad in waiting.items()}

    @torch.no_grad()
    def _unscale(self, optimizers: Sequence[Optimizer], loss_id: int) -> None:
        """Unscale what a pass made; an overflow is one of all that it made gradients for, as in apex."""
        # A dict: a parameter of several optimizers counts once.
        grads = {p: p.grad for o in optimizers for p in params_of(o) if p.grad is not None}
        found = self.scaler(loss_id).unscale_(list(grads.values()))
        if found is not None:
            made = [optimizer for optimizer in optimizers if not grads.keys().isdisjoint(params_of(optimizer))]
            for own in map(self._of, made):
                own.note_overflow(found)

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients if they are scaled still, and look for an overflow."""
        own = self._of(optimizer)
        if own.scaled_by is not None:
            own.overflow = None  # what overflowed before is inf or NaN still, and found again
            self._unscale([optimizer], own.scaled_by)
            own.scaled_by = None

    # Overflows

    def _of(self, optimizer: Optimizer) -> _Gradients:
        return self._gradients[optimizer]

    def overflow_flag(self, optimizer: Optimizer) -> Tensor | None:
        """Return 1.0 on the device if an overflow was found in this optimizer's gradients; ``None`` if none looked."""
        return self._of(optimizer).overflow

    def will_skip(self, optimizer: Optimizer) -> bool:
        """Return the same on the host; waits for the device."""
        return was_skipped(self.overflow_flag(optimizer))

    @property
    def skipped_last_step(self) -> bool:
        """Whether the last call of ``step`` skipped the optimizer's; waits for the device."""
        return was_skipped(self._last_overflow)

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
        flag = self._last_overflow = self.overflow_flag(optimizer)
        self.note_gradients_used(optimizer)
        if flag is None:
            return run()
        if _skips_by_itself(optimizer):
            optimizer.found_inf = flag  # type: ignore[attr-defined]  # torch's fused optimizers read it
            try:
                return run()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        return None if flag.item() else run()

    def clear_last_skip(self) -> None:
        """Note that there were no gradients to step with; it counts as no skipped step."""
        self._last_overflow = None

    def note_gradients_used(self, optimizer: Optimizer) -> None:
        """Note that a step has used the gradients."""
        own = self._of(optimizer)
        own.waiting, own.scaled_by = False, None

    def forget_overflow(self, optimizer: Optimizer) -> None:
        """Let the next step with the same gradients be taken."""
        self._of(optimizer).overflow = None

    def update(self) -> None:
        """Settle the pass of every scaler that has unscaled gradients since it was settled last."""
        for scaler in self.scalers:
            if scaler.is_unsettled:
                scaler.update()

    # State

    def is_waiting(self, optimizer: Optimizer) -> bool:
        """Whether there are gradients that wait for this optimizer's step."""
        return self._of(optimizer).waiting

    def window_state(self, optimizers: Sequence[Optimizer]) -> dict[str, list[Any]]:
        """Return what a checkpoint needs beside gradients that wait for their step; waits for the device."""
        return {
            "scaled_by": [self._of(optimizer).scaled_by for optimizer in optimizers],
            "overflows": [self.will_skip(optimizer) for optimizer in optimizers],
            "passes": [(scaler.is_unsettled, scaler.overflowed) for scaler in self.scalers],
        }

    def resume_window(self, optimizers: Sequence[Optimizer], gradients: Sequence[Any], state: dict[str, Any]) -> None:
        """Continue with gradients that optimizers have again, from what another run's ``window_state`` returned."""
        rows = zip(optimizers, gradients, state["scaled_by"], state["overflows"], strict=True)
        for optimizer, own, scaled_by, overflow in rows:
            if own:
                found = torch.tensor(overflow, dtype=torch.float32, device=next(params_of(optimizer)).device)
                self._gradients[optimizer] = _Gradients(True, scaled_by, found if self.is_dynamic else None)
        for scaler, passed in zip(self.scalers, state["passes"], strict=False):
            scaler.resume(*passed)

    def named_scalers(self) -> dict[str, LossScaler]:
        """Return the scalers by their names in a checkpoint: ``loss_scaler0``, ``loss_scaler1``, ..."""
        return {f"loss_scaler{index}": scaler for index, scaler in enumerate(self.scalers)}

    def state_dict(self) -> OrderedDict[str, dict[str, Any]]:
        """Return the scalers' state in apex's format."""
        return OrderedDict((name, scaler.state_dict()) for name, scaler in self.named_scalers().items())

    def restore(self) -> None:
        """Give models and optimizers back as they were."""
        if self.half_forward is not None:
            self.half_forward.remove()
        if self.half_weights is not None:
            self.half_weights.restore(self.optimizers)
        self.half_forward = self.half_weights = None
        self._gradients.clear()


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield all parameters that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


@torch.no_grad()
def _add(aside: dict[Tensor, Tensor]) -> None:
    for param, before in aside.items():
        if param.grad is None:
            param.grad = before
        elif before.is_sparse:  # to which nothing dense can be added
            param.grad.add_(before)
        else:  # the same tensor as before, as without scaling
            param.grad = before.add_(param.grad)


def _skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer's ``step`` reads ``found_inf`` on the device: torch's own where they are fused."""
    fused = type(optimizer) in (SGD, Adam, AdamW) and all(group.get("fused") for group in optimizer.param_groups)
    return fused and not (type(optimizer) is SGD and _makes_momentum(optimizer))


def _makes_momentum(optimizer: SGD) -> bool:
    """Whether a step makes memory for momentum, which stays uninitialised if the step skips by itself."""
    with_momentum = (group for group in optimizer.param_groups if group["momentum"])
    params = (param for group in with_momentum for param in group["params"] if param.grad is not None)
    return any(optimizer.state.get(param, {}).get("momentum_buffer") is None for param in params)


def _check_castable(model: nn.Module, opt_level: str) -> None:
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise AmpUsageError(
                f"{opt_level}: expected modules of Python, got a TorchScript module ({module.original_name}). Train "
                "the module that it was made of, and script or trace that afterwards; or take O0 or O1."
            )
        if any(is_lazy(tensor) for tensor in module.parameters(recurse=False)):
            raise AmpUsageError(
                f"{opt_level}: expected modules with weights, got a {type(module).__name__} that has not seen a batch "
                "yet. Call the model on a batch before, as in configure_model."
            )
