"""What the gradients of an optimizer have been through, and how one looks at gradients of any kind."""

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
    """What happened last to the gradients that an optimizer's next step uses."""

    EMPTY = "empty"
    """None that a scaler knows of."""
    SCALED = "scaled"
    """A backward pass made them from a scaled loss, and they wait to be unscaled."""
    UNSCALED = "unscaled"
    """They were divided by the scale and looked at."""
    STEPPED = "stepped"
    """A step has used them, or was skipped."""


class GradientState:
    """The state of one optimizer's gradients: how they are scaled, and whether they overflowed.

    A scaler makes one for each optimizer; scalers that share an optimizer share it. Its methods are the moves from one
    stage to the next; nobody else writes to it. An overflow that is known is that of the gradients, or, after a step,
    of those that the step used: it stays until there is a new pass, so that a schedule can ask whether to wait.
    """

    def __init__(self) -> None:
        self.stage = GradientStage.EMPTY
        self.owner: GradScaler | None = None
        """By whose scale the gradients are multiplied, while they are scaled."""
        self.overflow: Tensor | bool | None = None
        """1.0 or 0.0 on their device, a bool once the host knows, ``None`` if nobody looked."""

    def scaled(self, owner: GradScaler) -> None:
        """A pass made scaled gradients, and those of before are scaled too."""
        self._move(GradientStage.SCALED, overflow=None, owner=owner)  # inf and NaN are still there and found again

    def unscaled(self, overflow: Tensor | None) -> None:
        """All gradients are unscaled; what was found in them replaces what was known."""
        self._move(GradientStage.UNSCALED, overflow)

    def add_unscaled_pass(self, overflow: Tensor | None) -> None:
        """A pass made gradients that are unscaled by now, and were added to the unscaled ones of before."""
        both = self.overflow is not None and overflow is not None
        known = torch.maximum(self.overflow, overflow) if both else overflow  # type: ignore[arg-type]
        self._move(GradientStage.UNSCALED, self.overflow if known is None else known)

    def look_again(self, grads: Sequence[Tensor]) -> None:
        """Forget an overflow that is not among the gradients any more, because they were set to None or to zero."""
        # Where nobody looked, or the host knows that all was finite, there is nothing to forget; a look at gradients
        # takes as long as to unscale them.
        is_known = grads and self.overflow is not None and self.overflow is not False
        self.overflow = has_non_finite(grads) if is_known else None

    def stepped(self) -> None:
        """The optimizer stepped with these gradients, or skipped the step."""
        self._move(GradientStage.STEPPED, self.overflow)

    def updated(self) -> None:
        """A loop for torch's scaler has called ``update``: its next gradients are scaled."""
        if self.stage is GradientStage.UNSCALED:  # and no step came, as for a batch that was dropped
            self.dropped()
        elif self.stage is GradientStage.STEPPED:
            self._move(GradientStage.EMPTY, self.overflow)

    def dropped(self) -> None:
        """There are no gradients for a step, or they are of another run."""
        self._move(GradientStage.EMPTY, overflow=None)

    def is_overflow(self) -> bool:
        """Whether the gradients overflowed; waits for the device if the host does not know yet."""
        self.overflow = None if self.overflow is None else bool(self.overflow)
        return bool(self.overflow)

    def was_skipped(self) -> bool:
        """Whether the last step was skipped, if there is no later pass; waits for the device."""
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
        grads: One or more, of any dtype and layout, which stay as they are.
    """
    return multiply_and_check(grads, torch.ones((), device=grads[0].device))


def multiply_and_check(grads: Sequence[Tensor], factor: Tensor) -> Tensor:
    """Multiply gradients in place; returns 1.0 on the factor's device if any was inf or NaN, else 0.0."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for numbers in map(numbers_of, grads):
        alike.setdefault((numbers.device, numbers.dtype), []).append(numbers)
    found = torch.zeros_like(factor)
    for (device, dtype), numbers in alike.items():
        # CUDA's kernel does not take bfloat16, and in older torch that of MPS sets half gradients to 0.
        wide = [each.float() for each in numbers] if dtype in HALF_DTYPES else numbers
        here = found if device == found.device else torch.zeros_like(found, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(wide, here, factor.to(device))
        if wide is not numbers:
            torch._foreach_copy_(numbers, wide)
        if here is not found:
            found = torch.maximum(found, here.to(found.device))
    return found


def numbers_of(tensor: Tensor) -> Tensor:
    """Return a view of what a dense or sparse COO tensor holds: real numbers in a dense tensor."""
    values = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(values) if values.is_complex() else values
