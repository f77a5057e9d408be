"""Static and dynamic loss scale, kept on the device; its state is in apex's format."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_turbo._checks import expect, is_number, is_whole
from lightning_turbo.amp.levels import INITIAL_DYNAMIC_SCALE
from lightning_turbo.errors import AmpUsageError

__all__ = ["LossScaler"]

# Numbers on their way from a CUDA device to the host: each is read so many passes, less one, after it was sent, and has
# arrived then.
HEARD_LATE = 8


class LossScaler:
    """Multiplies losses, divides gradients, and finds a factor at which half gradients neither overflow nor vanish.

    The dynamic scale starts at 2**16; an overflow halves it, ``scale_window`` settled passes in a row without one
    double it. All of it happens on the device, so that no value has to come to the host; reading ``loss_scale`` or
    ``overflowed`` does fetch one. A static scale never looks for overflow, and a static scale of 1.0 does nothing.

    Args:
        loss_scale: ``"dynamic"``, or a static factor, finite and above zero.
        min_loss_scale: The dynamic scale does not fall below it on an overflow; ``None`` sets no floor.
        max_loss_scale: The dynamic scale does not grow above it.
        scale_window: Settled passes without overflow before the scale doubles; 1 or more, apex's 2000 by default.

    Raises:
        AmpUsageError: If a limit is not a finite number above zero, they are crossed, or the window is below 1.

    Source: Micikevicius et al., Mixed Precision Training, 2018; the rules of NVIDIA apex.amp's scaler.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        *,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        scale_window: int = 2000,
    ) -> None:
        _check_limit("max_loss_scale", max_loss_scale)
        if min_loss_scale is not None:
            _check_limit("min_loss_scale", min_loss_scale)
            most = f"at most max_loss_scale={max_loss_scale!r}"
            expect(min_loss_scale <= max_loss_scale, "min_loss_scale", min_loss_scale, most, AmpUsageError)
        expect(is_whole(scale_window, 1), "scale_window", scale_window, "a whole number from 1 on", AmpUsageError)
        self.dynamic = loss_scale == "dynamic"
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = float(max_loss_scale)
        self.scale_window = scale_window
        self.is_unsettled = False
        initial = min(INITIAL_DYNAMIC_SCALE, self.max_loss_scale) if self.dynamic else float(loss_scale)
        self._static = initial
        float32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        self._scale = torch.tensor(initial, **float32)
        self._tracker = torch.zeros((), dtype=torch.int32, device="cpu")  # passes without overflow
        self._found_inf = torch.zeros((), **float32)
        self._skips = torch.zeros(2, **float32)  # in a row, and all
        self._heard = deque([_Heard(self._scale.device)])

    @property
    def is_identity(self) -> bool:
        """Whether scaling changes nothing, so that callers may leave it out."""
        return not self.dynamic and self._static == 1.0

    def to(self, device: torch.device) -> LossScaler:
        """Put the scale on a device; done by itself at the first use."""
        if self._scale.device != device:
            self._scale, self._tracker = self._scale.to(device), self._tracker.to(device)
            self._found_inf, self._skips = self._found_inf.to(device), self._skips.to(device)
            self._heard = deque(_Heard(device) for _ in range(HEARD_LATE if device.type == "cuda" else 1))
        return self

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` in float32 times the scale."""
        return loss.float() if self.is_identity else loss.float() * self._factor(loss.device)

    def _factor(self, device: torch.device) -> Tensor | float:
        return self.to(device)._scale if self.dynamic else self._static

    @torch.no_grad()
    def scale_(self, grads: Iterable[Tensor]) -> None:
        """Multiply gradients by the scale in place, before scaled ones are added to them."""
        for grad in grads:
            grad.mul_(self._factor(grad.device))

    def unscale_(self, grads: Sequence[Tensor]) -> Tensor | None:
        """Divide gradients by the scale in place, and note an overflow.

        Args:
            grads: Floating or complex tensors of any shape and dtype, half precision included, on one device; sparse
                ones too.

        Returns:
            1.0 on that device if any entry is inf or NaN, else 0.0; ``None`` where nobody looks: a static scale.
        """
        if not grads or self.is_identity:
            return None
        self.is_unsettled = True
        numbers = [_numbers_of(grad) for grad in grads]
        if self.dynamic:
            return self._unscale_and_look(numbers)
        torch._foreach_mul_(numbers, 1.0 / self._static)
        return None

    def _unscale_and_look(self, grads: Sequence[Tensor]) -> Tensor:
        self.to(grads[0].device)
        inverse = self._scale.double().reciprocal_().float()
        found = torch.zeros_like(self._found_inf)
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            alike = [grad for grad in grads if grad.dtype is dtype]
            # CUDA's kernel does not take bfloat16.
            wide = [grad.float() for grad in alike] if dtype is torch.bfloat16 else alike
            torch._amp_foreach_non_finite_check_and_unscale_(wide, found, inverse)
            if wide is not alike:
                torch._foreach_copy_(alike, wide)
        torch.maximum(self._found_inf, found, out=self._found_inf)
        return found

    def update(self) -> None:
        """Settle one pass: halve the scale on overflow, count and perhaps double it otherwise."""
        self.is_unsettled = False
        if self.is_identity:
            return
        if not self.dynamic:
            self._tracker.add_(1)
            return
        torch._amp_update_scale_(self._scale, self._tracker, self._found_inf, 2.0, 0.5, self.scale_window)
        self._scale.clamp_(max=self.max_loss_scale)
        if self.min_loss_scale is not None:
            raised = self._scale.clamp(min=self.min_loss_scale)
            torch.where(self._found_inf > 0, raised, self._scale, out=self._scale)
        self._skips.add_(self._found_inf)
        self._skips[0].mul_(self._found_inf)
        self._heard[0].copy(self._skips[0])
        self._heard.rotate(-1)
        self._found_inf.zero_()

    def resume(self, is_unsettled: bool, overflowed: bool) -> None:
        """Continue in a pass that another scaler has begun and not settled."""
        self.is_unsettled = is_unsettled
        self._found_inf.fill_(overflowed)

    @property
    def overflowed(self) -> bool:
        """Whether an overflow was found since the last ``update``; waits for the device."""
        return bool(self._found_inf.item())

    @property
    def loss_scale(self) -> float:
        """The scale now, dimensionless; waits for the device if dynamic."""
        return float(self._scale.item()) if self.dynamic else self._static

    @property
    def skipped_steps(self) -> int:
        """How many passes overflowed so far; waits for the device."""
        return int(self._skips[1].item())

    def values_to_log(self) -> tuple[Tensor, Tensor]:
        """Return copies of the scale and of the number of skipped steps, without waiting for the device."""
        return self._scale.clone(), self._skips[1].clone()

    @property
    def recent_skips_in_a_row(self) -> int:
        """Overflows in a row; on CUDA those of seven passes ago, so that all ranks hear the same and none waits."""
        return self._heard[0].value()

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"loss_scale": float, "unskipped": int}``, apex's format."""
        return {"loss_scale": self.loss_scale, "unskipped": int(self._tracker.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state in apex's format; a scale above ``max_loss_scale`` is kept, as in apex.

        A dynamic scale that has been steady for longer than this ``scale_window`` doubles at the next such pass.

        Raises:
            KeyError: If ``loss_scale`` or ``unskipped`` is missing.
        """
        self._static, unskipped = float(state["loss_scale"]), int(state["unskipped"])
        self.max_loss_scale = max(self.max_loss_scale, self._static)
        self._scale.fill_(self._static)
        self._tracker.fill_(min(unskipped, self.scale_window - 1) if self.dynamic else unskipped)


class _Heard:
    """A number on its way from a device to the host."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.number = torch.zeros((), dtype=torch.float32, device="cpu", pin_memory=on_cuda)
        self.arrival = torch.cuda.Event() if on_cuda else None

    def copy(self, number: Tensor) -> None:
        self.number.copy_(number, non_blocking=True)
        if self.arrival is not None:
            self.arrival.record(torch.cuda.current_stream(number.device))

    def value(self) -> int:
        """Wait until it is there."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return int(self.number.numpy())


def _check_limit(name: str, limit: Any) -> None:
    expect(is_number(limit) and limit > 0.0, name, limit, "a finite number above zero", AmpUsageError)


def _numbers_of(grad: Tensor) -> Tensor:
    """Return a view of what a gradient holds: real numbers in a dense tensor."""
    values = grad._values() if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values
