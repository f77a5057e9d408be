"""The state of an optimizer's gradients, and overflow checks for gradients of any kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_turbo.amp.levels import HALF_DTYPES

__all__ = ["GradientStage", "GradientState", "has_non_finite", "multiply_and_check", "numbers_of", "params_of"]


class GradientStage(Enum):
    """The last event for the gradients that an optimizer's next step uses."""

    EMPTY = "empty"
    """No scaler knows of any gradients."""
    SCALED = "scaled"
    """A backward pass of a scaled loss computed them; they are to be unscaled."""
    UNSCALED = "unscaled"
    """They were divided by the scale and checked."""
    STEPPED = "stepped"
    """A step used them or was skipped."""


class GradientState:
    """The state of one optimizer's gradients: whether they are scaled, and whether they overflowed.

    A scaler creates one per optimizer; scalers that share an optimizer share it. Its methods are the transitions
    between stages, and nothing else writes to it. A known overflow is that of the current gradients or, after a step,
    of those that the step used. It stays until the next pass, so that a scheduler can ask whether the step was skipped.
    """

    def __init__(self) -> None:
        self.stage = GradientStage.EMPTY
        self.owner: GradScaler | None = None
        """The scaler whose scale multiplies the gradients, while they are scaled."""
        self.overflow: Tensor | bool | None = None
        """1.0 or 0.0 on the device, a bool once the host knows, ``None`` if unchecked."""

    def scaled(self, owner: GradScaler) -> None:
        """A pass computed scaled gradients; those from before are scaled too."""
        self._move(GradientStage.SCALED, overflow=None, owner=owner)  # inf and NaN stay and are found again

    def unscaled(self, overflow: Tensor | None) -> None:
        """All gradients were unscaled; ``overflow`` replaces the known overflow."""
        self._move(GradientStage.UNSCALED, overflow)

    def add_unscaled_pass(self, overflow: Tensor | None) -> None:
        """A pass computed gradients that were then unscaled and added to the earlier, unscaled ones."""
        both = self.overflow is not None and overflow is not None
        known = torch.maximum(self.overflow, overflow) if both else overflow  # type: ignore[arg-type]
        self._move(GradientStage.UNSCALED, self.overflow if known is None else known)

    def look_again(self, grads: Sequence[Tensor]) -> None:
        """Forget an overflow whose gradients are gone, because they were set to None or to zero."""
        # Without a check, or if the host knows that all was finite, there is nothing to forget. A check takes as long
        # as unscaling.
        is_known = grads and self.overflow is not None and self.overflow is not False
        self.overflow = has_non_finite(grads) if is_known else None

    def stepped(self) -> None:
        """The optimizer used these gradients in a step or skipped the step."""
        self._move(GradientStage.STEPPED, self.overflow)

    def updated(self) -> None:
        """A loop written for torch's scaler called ``update``: its next gradients are scaled."""
        if self.stage is GradientStage.UNSCALED:  # without a step, for example if the batch was dropped
            self.dropped()
        elif self.stage is GradientStage.STEPPED:
            self._move(GradientStage.EMPTY, self.overflow)

    def dropped(self) -> None:
        """There are no gradients for a step, or they belong to another run."""
        self._move(GradientStage.EMPTY, overflow=None)

    def is_overflow(self) -> bool:
        """Return whether the gradients overflowed; synchronizes with the device if the host does not know yet."""
        self.overflow = None if self.overflow is None else bool(self.overflow)
        return bool(self.overflow)

    def was_skipped(self) -> bool:
        """Return whether the last step was skipped and no pass followed; synchronizes with the device."""
        return self.stage in (GradientStage.STEPPED, GradientStage.EMPTY) and self.is_overflow()

    def _move(self, stage: GradientStage, overflow: Tensor | bool | None, owner: GradScaler | None = None) -> None:
        self.stage = stage
        self.overflow = overflow
        self.owner = owner


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield all parameters that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


@torch.no_grad()
def has_non_finite(grads: Sequence[Tensor]) -> Tensor:
    """Return 1.0 on the device if any gradient has an inf or NaN, else 0.0.

    Args:
        grads: One or more gradients of any dtype and layout. They are not modified.
    """
    return multiply_and_check(grads, torch.ones((), device=grads[0].device))


def multiply_and_check(grads: Sequence[Tensor], factor: Tensor) -> Tensor:
    """Multiply gradients in place. Return 1.0 on the factor's device if any was inf or NaN, else 0.0."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for numbers in map(numbers_of, grads):
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


def numbers_of(tensor: Tensor) -> Tensor:
    """Return a dense real view of the values of a dense or sparse COO tensor."""
    values = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(values) if values.is_complex() else values
