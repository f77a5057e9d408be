"""apex's loss scaler, and what is known about the gradients of each optimizer.

The life of a gradient: a backward pass inside ``backward`` creates it, multiplied by the scale. It is unscaled, and
looked at for inf and NaN, at the end of that pass or in ``check``. ``step`` uses or skips it. ``settle`` then changes
the scale. Between two passes it is either scaled by one scaler or by none, and that holds for all gradients of an
optimizer: ``backward`` brings earlier ones to the same state.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_turbo._checks import expect, is_number, is_whole
from lightning_turbo.amp.levels import HALF_DTYPES, INITIAL_DYNAMIC_SCALE
from lightning_turbo.errors import AmpUsageError

__all__ = ["ApexGradScaler", "Gradients", "forget_gradients", "gradients_of", "params_of"]


class Gradients:
    """What is known about the gradients that an optimizer's next step uses, and about its last step.

    ``gradients_of`` creates one for each optimizer, and the methods of ``ApexGradScaler`` write to it. A flag is a
    tensor, 1.0 for true and 0.0 for false, where only the device knows it.
    """

    def __init__(self) -> None:
        self.scaled_by: ApexGradScaler | None = None
        """The scaler whose scale multiplies the gradients; ``None`` if they are unscaled."""
        self.overflow: Tensor | bool | None = None
        """Whether those overflowed that somebody has looked at; ``None`` if nobody has since the last step."""
        self.skipped: Tensor | bool = False
        """Whether the last step was skipped and no backward pass followed, which schedulers ask."""


# By identity. Several scalers share it, because a step uses the gradients of all losses.
_known: Any = WeakIdKeyDictionary()


def gradients_of(optimizer: Optimizer) -> Gradients:
    """Return what is known about an optimizer's gradients."""
    known = _known.get(optimizer)
    if known is None:
        known = _known[optimizer] = Gradients()
    return known


def forget_gradients(optimizer: Optimizer) -> None:
    """Forget what is known: there are no gradients for a step, or they belong to another run."""
    _known.pop(optimizer, None)


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield all parameters that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


class ApexGradScaler:
    """apex's loss scaler; ``ApexAMP`` and ``lightning_turbo.amp`` scale their losses with it.

    The scale is static or dynamic, with limits. Gradients may be half precision, complex or sparse; a parameter that
    several optimizers share is unscaled once. A dynamic scale lives on the device: with torch's fused optimizers no
    value is copied to the host, with others one per step.

    The calls of a step, in order: ``scale`` multiplies the loss. ``backward`` wraps the backward pass; it unscales the
    gradients at once or leaves them scaled. ``check`` unscales those. ``step`` runs or skips the step. ``settle``
    updates the scale once for all passes since the last ``settle``; gradients that are still scaled then, such as
    another optimizer's, follow it. A loop written for ``torch.amp.GradScaler`` keeps that class.

    Args:
        loss_scale: ``"dynamic"``, or a static factor, finite and above zero. A static scale never checks for overflow,
            and 1.0 disables the scaler.
        growth_interval: Consecutive updates without overflow before the dynamic scale doubles; 1 or more.
        min_scale: An overflow does not reduce the dynamic scale below this; ``None`` sets no limit.
        max_scale: The dynamic scale does not grow above this.

    Attributes:
        dynamic: Whether the scale is dynamic.
        skipped_steps: Number of skipped steps; a tensor if fused optimizers skip on the device.

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
        self.growth_interval = growth_interval
        self.min_scale = min_scale
        self.max_scale = float(max_scale)
        self.skipped_steps: Tensor | int = 0
        # Numbers until the first dynamic loss, then tensors on its device.
        self._scale: Any = min(INITIAL_DYNAMIC_SCALE, self.max_scale) if self.dynamic else float(loss_scale)
        self._unskipped: Any = 0
        self._found: Tensor | bool | None = None  # overflow since the last settle(); None if nothing was unscaled

    def is_enabled(self) -> bool:
        """Return whether losses are scaled."""
        return self.dynamic or self._scale != 1.0

    # Forward and backward

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss in float32 times the scale."""
        return loss.float() * self._scale_on(loss.device) if self.is_enabled() else loss.float()

    def backward(
        self, optimizers: Sequence[Optimizer], *, unscale: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for the backward pass of a scaled loss, which adds to the existing gradients.

        Args:
            optimizers: The optimizers whose gradients the pass computes.
            unscale: ``True`` unscales and checks after the pass, so that all gradients are unscaled. ``False`` leaves
                them scaled until ``check`` or a pass with ``True``; gradients that were unscaled are scaled again.
        """
        if not self.is_enabled():
            return contextlib.nullcontext()
        return self._unscaled_pass(optimizers) if unscale else self._scaled_pass(optimizers)

    @contextlib.contextmanager
    def _scaled_pass(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Leave the gradients of a pass scaled, and scale those before it; inf and NaN are found later."""
        with torch.no_grad():
            for grad in self._unscaled_gradients(optimizers).values():
                grad.mul_(self._scale_on(grad.device))
        _keep_overflows(optimizers)
        for state in map(gradients_of, optimizers):
            state.scaled_by = self
        yield

    @contextlib.contextmanager
    def _unscaled_pass(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Unscale and check the gradients of a pass, then add the earlier ones; restore these alone if it fails."""
        before = self._set_aside(optimizers)
        try:
            yield
        except BaseException:
            # An incomplete pass leaves scaled gradients, which would count as unscaled. Where earlier passes have left
            # scaled ones too, which are not in `before`, they stay.
            for param in {p for o in optimizers for p in params_of(o)} - _scaled_parameters(optimizers):
                param.grad = before.get(param)
            raise
        # As in apex, an overflow counts for every optimizer that has a gradient of this pass.
        reached = [optimizer for optimizer in optimizers if any(p.grad is not None for p in params_of(optimizer))]
        found = self._unscale(reached)
        _add(before)
        for optimizer in optimizers:
            state = gradients_of(optimizer)
            state.overflow = _either(state.overflow, found if optimizer in reached else False)
            state.scaled_by = None

    def _set_aside(self, optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor]:
        """Remove and return the unscaled gradients, so that a pass creates its own.

        As in apex, only the overflow of the pass changes the scale.
        """
        _keep_overflows(optimizers)
        before = self._unscaled_gradients(optimizers)
        for param in before:
            param.grad = None
        # Views into DDP's buckets are cloned.
        return {param: grad.clone() if grad._is_view() else grad for param, grad in before.items()}

    def _unscaled_gradients(self, optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor]:
        """Return the gradients of earlier passes that are unscaled, by parameter."""
        scaled = _scaled_parameters(optimizers)
        return {p: p.grad for o in optimizers for p in params_of(o) if p.grad is not None and p not in scaled}

    def _scale_on(self, device: torch.device) -> Any:
        """Return the scale for tensors of a device: a dynamic one is a tensor there."""
        if not self.dynamic:
            return self._scale
        if not isinstance(self._scale, Tensor):
            self._scale = torch.full((), self._scale, dtype=torch.float32, device=device)
            self._unskipped = torch.full((), self._unskipped, dtype=torch.int32, device=device)
        return self._scale.to(device)

    # The step

    def check(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients if they are scaled, and look whether they overflowed if nobody has.

        All gradients that this scaler's scale multiplies are unscaled together, because optimizers may share some.
        """
        state = gradients_of(optimizer)
        if state.scaled_by is not None:
            scaler = state.scaled_by
            scaled = scaler._scaled_optimizers()
            found = scaler._unscale(scaled)
            for each in map(gradients_of, scaled):
                each.scaled_by, each.overflow = None, _either(each.overflow, found)
        elif state.overflow is None:  # a second step uses them again, or the program has assigned them
            state.overflow = self._find([p.grad for p in params_of(optimizer) if p.grad is not None])

    def _scaled_optimizers(self) -> list[Optimizer]:
        return [optimizer for optimizer, state in _known.items() if state.scaled_by is self]

    @torch.no_grad()
    def _unscale(self, optimizers: Sequence[Optimizer]) -> Tensor | bool:
        """Divide gradients by the scale in place. Return whether any overflowed, on the device."""
        grads = _gradients(optimizers)
        if not grads:
            return False
        if not self.dynamic:
            torch._foreach_mul_([_numbers_of(grad) for grad in grads], 1.0 / self._scale)
            self._found = False
            return False
        scale = self._scale_on(grads[0].device)
        # In float64 (which MPS lacks), because a float32 division may round.
        inverse = (scale if scale.device.type == "mps" else scale.double()).reciprocal().float()
        found = _multiply(grads, inverse)
        self._found = _either(self._found, found)
        return found

    @torch.no_grad()
    def _find(self, grads: Sequence[Tensor]) -> Tensor | bool:
        """Return whether any gradient has an inf or NaN, on the device; a static scale does not look."""
        return _multiply(grads, torch.ones((), device=grads[0].device)) if grads and self.dynamic else False

    def step(self, optimizer: Optimizer, run: Callable[[], Any] | None = None) -> Any:
        """Run an optimizer's step, or skip it if its gradients overflowed.

        torch's fused optimizers receive ``found_inf`` on the device and skip there.

        Args:
            optimizer: The optimizer, whose gradients ``backward`` or ``check`` has unscaled.
            run: Runs the step; ``None`` calls ``optimizer.step``.

        Returns:
            The result of the step, ``None`` for a skipped one.

        Raises:
            AmpUsageError: If nobody has looked at the gradients since the last step.
        """
        run = optimizer.step if run is None else run
        if not self.is_enabled():
            return run()
        state = gradients_of(optimizer)
        is_known = state.overflow is not None and state.scaled_by is None
        expect(is_known, "step", "no pass since the last step", _STEP, AmpUsageError)
        found, state.overflow = state.overflow, None
        if isinstance(found, Tensor) and _skips_by_itself(optimizer):
            state.skipped = found
            self.skipped_steps = self.skipped_steps + found
            optimizer.found_inf = found  # type: ignore[attr-defined]
            try:
                return run()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        state.skipped = bool(found)  # the only value copied to the host
        self.skipped_steps = self.skipped_steps + state.skipped
        return None if state.skipped else run()

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's last step was skipped; synchronizes with the device if it skips there."""
        state = gradients_of(optimizer)
        skipped = state.skipped = bool(state.skipped)
        return skipped

    def settle(self) -> Tensor | bool:
        """Halve the scale after an overflow; otherwise count, and double it when due.

        No effect if nothing was unscaled since the last call.

        Returns:
            Whether there was an overflow, on the device.
        """
        found, self._found = self._found, None
        if not isinstance(found, Tensor):
            self._unskipped += found is not None  # of a static scale
            return False
        scale = self._scale
        on_scale = found.to(scale.device)
        waiting = _gradients(self._scaled_optimizers())
        before = scale.clone() if waiting else scale
        torch._amp_update_scale_(scale, self._unskipped, on_scale, 2.0, 0.5, self.growth_interval)
        scale.clamp_(max=self.max_scale)
        if self.min_scale is not None:
            # As in apex, only an overflow raises the scale to the lower limit.
            torch.where(on_scale > 0, scale.clamp(min=self.min_scale), scale, out=scale)
        if waiting:  # for a later pass, which unscales them by the new scale
            _multiply(waiting, scale / before)
        return found

    # State

    def get_scale(self) -> float:
        """Return the current scale, dimensionless; synchronizes with the device if dynamic."""
        return float(self._scale)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"loss_scale": float, "unskipped": int}``, apex's format."""
        return {"loss_scale": self.get_scale(), "unskipped": int(self._unskipped)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in apex's format. As in apex, a scale above ``max_scale`` is kept.

        A dynamic scale that has already been stable for ``growth_interval`` updates doubles at the next one without
        overflow.

        Raises:
            KeyError: If ``loss_scale`` or ``unskipped`` is missing.
        """
        scale, unskipped = float(state_dict["loss_scale"]), int(state_dict["unskipped"])
        self.max_scale = max(self.max_scale, scale)
        self._scale = scale
        self._unskipped = min(unskipped, self.growth_interval - 1) if self.dynamic else unskipped


_STEP = (
    "a backward pass within scaler.backward() or a call of scaler.check(). A loop written for torch's scaler keeps "
    "torch.amp.GradScaler"
)


def _keep_overflows(optimizers: Sequence[Optimizer]) -> None:
    """Keep the overflows of optimizers whose gradients a pass adds to."""
    for optimizer in optimizers:
        # The gradients of an earlier overflow, also of one whose step was skipped, make the next step overflow, even if
        # they were clipped to finite numbers. The program ends this by setting them to None or to zero.
        state = gradients_of(optimizer)
        earlier = _either(state.overflow, state.skipped)
        grads = (param.grad for param in params_of(optimizer) if param.grad is not None)
        state.overflow = _both(earlier, _any_nonzero(grads)) if earlier is not False else None
        state.skipped = False


def _scaled_parameters(optimizers: Sequence[Optimizer]) -> set[Tensor]:
    """Return the parameters with scaled gradients; a shared one counts if any of its optimizers says so."""
    return {p for o in optimizers if gradients_of(o).scaled_by is not None for p in params_of(o)}


def _gradients(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the gradients of optimizers, that of a shared parameter once."""
    return list({p: p.grad for o in optimizers for p in params_of(o) if p.grad is not None}.values())


# Flags, see ``Gradients``, joined without waiting for the device. ``None`` counts as false.


def _either(known: Tensor | bool | None, found: Tensor | bool) -> Tensor | bool:
    if isinstance(known, Tensor) and isinstance(found, Tensor):
        return torch.maximum(known, found.to(known.device))
    return found or known if isinstance(known, Tensor) else known or found


def _both(known: Tensor | bool, found: Tensor | bool) -> Tensor | bool:
    if isinstance(known, Tensor) and isinstance(found, Tensor):
        return torch.minimum(known, found.to(known.device))
    return known and found if isinstance(known, bool) else found and known


@torch.no_grad()
def _any_nonzero(grads: Iterable[Tensor]) -> Tensor | bool:
    """Return whether any gradient has a number other than zero, on the device."""
    return functools.reduce(_either, ((_numbers_of(grad) != 0).any().float() for grad in grads), False)


@torch.no_grad()
def _add(before: dict[Tensor, Tensor]) -> None:
    for param, grad in before.items():
        if param.grad is None:
            param.grad = grad
        elif grad.is_sparse:  # a dense gradient cannot be added to it
            param.grad.add_(grad)
        else:  # keeps the tensor object, as without scaling
            param.grad = grad.add_(param.grad)


def _multiply(grads: Iterable[Tensor], factor: Tensor) -> Tensor:
    """Multiply gradients in place. Return 1.0 on the factor's device if any was inf or NaN, else 0.0."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for numbers in map(_numbers_of, grads):
        alike.setdefault((numbers.device, numbers.dtype), []).append(numbers)
    found = torch.zeros_like(factor)
    for (device, dtype), numbers in alike.items():
        # The CUDA kernel does not take bfloat16, and the MPS kernel of older torch sets half gradients to 0.
        wide = [each.float() for each in numbers] if dtype in HALF_DTYPES else numbers
        here = found if device == found.device else torch.zeros_like(found, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(wide, here, factor.to(device))
        if wide is not numbers:
            torch._foreach_copy_(numbers, wide)
        if here is not found:
            found = torch.maximum(found, here.to(found.device))
    return found


def _numbers_of(tensor: Tensor) -> Tensor:
    """Return a dense real view of the values of a dense or sparse COO tensor."""
    values = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(values) if values.is_complex() else values


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
