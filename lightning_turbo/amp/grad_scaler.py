"""torch's ``GradScaler`` with apex's limits, static scales, half gradients and state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_turbo._checks import expect, is_number, is_whole
from lightning_turbo.amp.gradients import (
    GradientStage,
    GradientState,
    has_non_finite,
    multiply_and_check,
    numbers_of,
    params_of,
)
from lightning_turbo.amp.levels import INITIAL_DYNAMIC_SCALE
from lightning_turbo.errors import AmpUsageError

__all__ = ["ApexGradScaler"]


class ApexGradScaler(GradScaler):
    """torch's ``GradScaler`` with apex's rules; ``ApexAMP`` and ``lightning_turbo.amp`` scale their losses with it.

    It has the interface of torch's (``scale``, ``unscale_``, ``step``, ``update``). In addition, the scale can be
    static and has limits; gradients may be half precision, complex or sparse; a parameter shared by several optimizers
    is unscaled once; and ``backward`` accumulates passes. A dynamic scale lives on the device: with torch's fused
    optimizers no value is copied to the host, with others one per step.

    The calls of a step, in order: ``scale`` multiplies the loss. ``backward`` wraps the backward pass and records that
    the gradients are scaled, or unscales them at once. ``prepare_step`` unscales those still scaled, before hooks and
    clipping read them. ``step`` steps or skips, and ``settle`` updates the scale once for all passes since the last
    ``settle``. ``ApexAMP`` makes all five calls, ``lightning_turbo.amp`` the first two and ``settle``. A loop written
    for torch's scaler calls neither ``backward`` nor ``settle``: its gradients count as scaled until ``unscale_`` or
    ``step``, and again after ``update``.

    Invariant: only an optimizer's ``GradientState``, returned by ``state_of``, records whether its gradients are scaled
    and whether they overflowed.

    Args:
        loss_scale: ``"dynamic"``, or a static factor, finite and above zero. A static scale never checks for overflow,
            and 1.0 disables the scaler.
        growth_interval: Consecutive updates without overflow before the dynamic scale doubles; 1 or more.
        min_scale: An overflow does not reduce the dynamic scale below this; ``None`` sets no limit.
        max_scale: The dynamic scale does not grow above this.

    Raises:
        AmpUsageError: If a limit is not a finite number above zero, ``min_scale`` exceeds ``max_scale``, or
            ``growth_interval`` is below 1.

    Example:
        >>> from lightning_turbo import ApexAMP, ApexGradScaler
        >>> plugin = ApexAMP("O2", scaler=ApexGradScaler(growth_interval=500, max_scale=2.0**15))
        >>> plugin.scaler.get_scale()
        32768.0

    Source: Micikevicius et al., Mixed Precision Training, 2018; the rules of NVIDIA apex.amp's scaler.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        *,
        growth_interval: int = 2000,
        min_scale: float | None = None,
        max_scale: float = 2.0**24,
    ) -> None:
        _check_scale("max_scale", max_scale)
        if min_scale is not None:
            _check_scale("min_scale", min_scale)
            expect(min_scale <= max_scale, "min_scale", min_scale, f"at most max_scale={max_scale!r}", AmpUsageError)
        number = "an integer of 1 or more"
        expect(is_whole(growth_interval, 1), "growth_interval", growth_interval, number, AmpUsageError)
        self.dynamic = loss_scale == "dynamic"
        if not self.dynamic:
            _check_scale("loss_scale", loss_scale)
        self.min_scale = min_scale
        self.max_scale = float(max_scale)
        initial = min(INITIAL_DYNAMIC_SCALE, self.max_scale) if self.dynamic else float(loss_scale)
        # The scale is created on the device of the first loss; "cpu" avoids initializing CUDA before.
        super().__init__("cpu", init_scale=initial, growth_interval=growth_interval)
        self._enabled = self.dynamic or initial != 1.0
        self._states: WeakKeyDictionary[Optimizer, GradientState] = WeakKeyDictionary()
        self._passes: list[Tensor] = []  # the overflow flags of the passes since the last settle()
        self._needs_update = False
        self.skipped_steps: Tensor | int = 0  # a tensor if fused optimizers skip on the device

    def __getstate__(self) -> dict[str, Any]:
        # Gradients and optimizers belong to this process.
        return {**super().__getstate__(), "_states": None, "_passes": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_states": WeakKeyDictionary()})

    # Forward and backward

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` in float32 times the scale."""
        if not isinstance(outputs, Tensor):
            return type(outputs)(map(self.scale, outputs))
        if self.dynamic:
            return super().scale(outputs.float())
        return outputs.float() * self._init_scale if self._enabled else outputs.float()

    @contextlib.contextmanager
    def backward(self, optimizers: Sequence[Optimizer], *, unscale: bool) -> Iterator[None]:
        """Wrap the backward pass of a scaled loss, which adds to the existing gradients.

        Args:
            optimizers: The optimizers whose gradients the pass computes.
            unscale: ``True`` unscales after the pass, so that all gradients are unscaled. ``False`` leaves them scaled
                until ``unscale_`` or a pass with ``True``; gradients that were unscaled before are scaled again.
        """
        if not self._enabled:
            yield
            return
        before = self._unscaled_gradients(optimizers)
        if unscale:
            for optimizer in optimizers:
                self.state_of(optimizer).look_again([before[p] for p in params_of(optimizer) if p in before])
            # Removed, so that the pass creates its own gradients: as in apex, only their overflow changes the scale.
            # Views into DDP's buckets are cloned.
            for param in before:
                param.grad = None
            before = {param: grad.clone() if grad._is_view() else grad for param, grad in before.items()}
            yield from self._run_unscaled(optimizers, before)
        else:
            self._scale_again(before.values())
            for optimizer in optimizers:
                self.state_of(optimizer).scaled(self)
            yield

    def _run_unscaled(self, optimizers: Sequence[Optimizer], before: dict[Tensor, Tensor]) -> Iterator[None]:
        """Run a pass, unscale its gradients and add the earlier ones; restore these alone if the pass fails."""
        try:
            yield
        except BaseException:
            # An incomplete pass leaves scaled gradients, which would count as unscaled.
            for param in {p for o in optimizers for p in params_of(o)} - self._scaled_parameters(optimizers):
                param.grad = before.get(param)
            raise
        made = [optimizer for optimizer in optimizers if any(p.grad is not None for p in params_of(optimizer))]
        found = self._unscale(made)
        _add(before)
        for optimizer in optimizers:
            # As in apex, an overflow counts for every optimizer whose gradients the pass computed.
            self.state_of(optimizer).add_unscaled_pass(found if optimizer in made else None)

    def _unscaled_gradients(self, optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor]:
        """Return the gradients of earlier passes that are already unscaled, by parameter."""
        if all(map(self._is_scaled, optimizers)):
            return {}
        scaled = self._scaled_parameters(optimizers)
        return {p: p.grad for o in optimizers for p in params_of(o) if p.grad is not None and p not in scaled}

    def _scaled_parameters(self, optimizers: Sequence[Optimizer]) -> set[Tensor]:
        """Return the parameters with scaled gradients; a shared one counts if any of its optimizers says so."""
        return {p for o in optimizers if self._is_scaled(o) for p in params_of(o)}

    def _is_scaled(self, optimizer: Optimizer) -> bool:
        return self.state_of(optimizer).stage is GradientStage.SCALED

    def _scale_again(self, grads: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for grad in grads:
                grad.mul_(self._scale_on(grad.device).to(grad.device) if self.dynamic else self._init_scale)

    def _scale_on(self, device: torch.device) -> Tensor:
        """Return the dynamic scale; create it on this device if it does not exist."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        scale, _ = self._check_scale_growth_tracker("scale")
        return scale

    @torch.no_grad()
    def _unscale(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        """Divide gradients by the scale in place. Return 1.0 or 0.0 on the device, ``None`` with a static scale."""
        # A dict, because a parameter shared by several optimizers counts once.
        grads = list({p: p.grad for o in optimizers for p in params_of(o) if p.grad is not None}.values())
        if not grads:
            return None
        self._needs_update = True
        if not self.dynamic:
            torch._foreach_mul_([numbers_of(grad) for grad in grads], 1.0 / self._init_scale)
            return None
        # In float64 (which MPS lacks), because a float32 division may round.
        scale = self._scale_on(grads[0].device)
        inverse = (scale if scale.device.type == "mps" else scale.double()).reciprocal().float()
        found = multiply_and_check(grads, inverse)
        self._passes.append(found)
        return found

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale and check them for overflow.

        Raises:
            RuntimeError: If they are already unscaled, or a step has used them without a later ``update``.
        """
        if not self._enabled:
            return
        state = self.state_of(optimizer)
        self._refuse_used("unscale_", state)
        if state.stage is GradientStage.UNSCALED:
            raise RuntimeError(
                "unscale_: expected scaled gradients, got unscaled ones. Call it once between two calls of update()."
            )
        state.unscaled(self._unscale([optimizer]))

    def _refuse_used(self, call: str, state: GradientState) -> None:
        if state.stage is GradientStage.STEPPED:
            raise RuntimeError(
                f"{call}: expected the gradients of a new backward pass, got those that step() has already used. Call "
                "update() after step()."
            )

    # The step

    def state_of(self, optimizer: Optimizer) -> GradientState:
        """Return the state of an optimizer's gradients."""
        return self._states.setdefault(optimizer, GradientState())

    def share_states(self, other: ApexGradScaler) -> None:
        """Share the gradient states of another scaler, because a step uses the gradients of both losses."""
        self._states = other._states

    def prepare_step(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's scaled gradients, and check gradients that no pass has checked.

        The latter are gradients that a step has used and a second step would reuse, or that the program has assigned.
        """
        state = self.state_of(optimizer)
        if not self._enabled or state.stage is GradientStage.UNSCALED:
            return
        if state.stage is GradientStage.SCALED:
            self.unscale_(optimizer)
            return
        grads = [param.grad for param in params_of(optimizer) if param.grad is not None]
        state.unscaled(has_non_finite(grads) if self.dynamic and grads else None)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step, or skip it on overflow.

        torch's fused optimizers receive ``found_inf`` on the device and skip there.

        Args:
            optimizer: The optimizer. Its gradients are unscaled first if necessary.
            *args: Arguments of ``optimizer.step``.
            **kwargs: Arguments of ``optimizer.step``, including a closure.

        Returns:
            The result of ``optimizer.step``, ``None`` for a skipped step.

        Raises:
            RuntimeError: If a step has already used the gradients without a later ``update``.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        state = self.state_of(optimizer)
        self._refuse_used("step", state)
        if state.stage is not GradientStage.UNSCALED:
            self.unscale_(optimizer)
        state.stepped()
        found = state.overflow
        if found is None:
            return optimizer.step(*args, **kwargs)
        if _skips_by_itself(optimizer):
            self.skipped_steps = self.skipped_steps + found
            optimizer.found_inf = found  # type: ignore[attr-defined]  # schedulers read it too
            try:
                return optimizer.step(*args, **kwargs)
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        skips = state.is_overflow()  # the only value copied to the host
        self.skipped_steps = self.skipped_steps + skips
        return None if skips else optimizer.step(*args, **kwargs)

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's last step was skipped; synchronizes with the device if it skips there."""
        state = self._states.get(optimizer)
        return state is not None and state.was_skipped()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale and let the next gradients count as scaled, like torch's scaler.

        Args:
            new_scale: The scale to set instead.
        """
        for state in self._states.values():
            state.updated()
        if new_scale is None:
            self.settle()
            return
        super().update(new_scale)
        # The overflow flags so far belong to the old scale.
        self._passes = []
        self._needs_update = False

    def settle(self) -> None:
        """Halve the scale after an overflow; otherwise count, and double it when due.

        No effect if nothing was unscaled since the last call.
        """
        if not self._needs_update:
            return
        self._needs_update = False
        if not self.dynamic:
            self._init_growth_tracker += 1
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        found, *others = (each.to(scale.device, non_blocking=True) for each in self._passes)
        self._passes = []
        for other in others:
            found = torch.maximum(found, other)
        torch._amp_update_scale_(
            scale, tracker, found, self._growth_factor, self._backoff_factor, self._growth_interval
        )
        scale.clamp_(max=self.max_scale)
        if self.min_scale is not None:
            # As in apex, only an overflow raises the scale to the lower limit.
            torch.where(found > 0, scale.clamp(min=self.min_scale), scale, out=scale)

    @property
    def overflowed(self) -> bool:
        """Whether a pass since the last ``settle`` overflowed; synchronizes with the device."""
        return any(bool(found) for found in self._passes)

    # State

    def get_scale(self) -> float:
        """Return the current scale, dimensionless; synchronizes with the device if dynamic."""
        return super().get_scale() if self.dynamic else self._init_scale

    def _get_growth_tracker(self) -> int:
        return super()._get_growth_tracker() if self.dynamic else self._init_growth_tracker

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"loss_scale": float, "unskipped": int}``, apex's format."""
        return {"loss_scale": self.get_scale(), "unskipped": self._get_growth_tracker()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in apex's format. As in apex, a scale above ``max_scale`` is kept.

        A dynamic scale that has already been stable for ``growth_interval`` updates doubles at the next one without
        overflow.

        Raises:
            KeyError: If ``loss_scale`` or ``unskipped`` is missing.
        """
        scale = float(state_dict["loss_scale"])
        unskipped = int(state_dict["unskipped"])
        self.max_scale = max(self.max_scale, scale)
        self._enabled = self.dynamic or scale != 1.0
        self._init_scale = scale
        self._init_growth_tracker = min(unskipped, self._growth_interval - 1) if self.dynamic else unskipped
        # A scale that already exists on a device is changed there; otherwise it is created from the initial one.
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(scale)
            self._growth_tracker.fill_(self._init_growth_tracker)


@torch.no_grad()
def _add(before: dict[Tensor, Tensor]) -> None:
    for param, grad in before.items():
        if param.grad is None:
            param.grad = grad
        elif grad.is_sparse:  # a dense gradient cannot be added to it
            param.grad.add_(grad)
        else:  # keeps the tensor object, as without scaling
            param.grad = grad.add_(param.grad)


def _skips_by_itself(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's ``step`` reads ``found_inf`` on the device, like torch's fused optimizers.

    Not on MPS, where older versions of torch ignore it.
    """
    fused = type(optimizer) in (SGD, Adam, AdamW) and all(group.get("fused") for group in optimizer.param_groups)
    if not fused or any(param.device.type == "mps" for param in params_of(optimizer)):
        return False
    return type(optimizer) is not SGD or not _makes_momentum(optimizer)


def _makes_momentum(optimizer: SGD) -> bool:
    """Return whether a step creates momentum buffers, which stay uninitialized if the step is skipped on the device."""
    with_momentum = (group for group in optimizer.param_groups if group["momentum"])
    params = (param for group in with_momentum for param in group["params"] if param.grad is not None)
    return any(optimizer.state.get(param, {}).get("momentum_buffer") is None for param in params)


def _check_scale(name: str, scale: Any) -> None:
    expect(is_number(scale) and scale > 0.0, name, scale, "a finite number above zero", AmpUsageError)
