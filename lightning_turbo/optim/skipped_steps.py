"""Steps that a loss scaler skipped because of an overflow; cycles and warm-ups do not count them."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from lightning_turbo._skipped_steps import skip_flag

__all__ = ["overflow_flag", "was_skipped"]


def overflow_flag(optimizer: Optimizer) -> Tensor | None:
    """Return the flag by which a loss scaler makes a fused optimizer skip a step, without reading it.

    A loss scaler does not call other optimizers for a skipped step, so that their hooks do not run.

    Args:
        optimizer: The optimizer, right after its step.
    """
    return skip_flag(optimizer)


def was_skipped(flag: Tensor | None) -> bool:
    """Return whether a step was skipped. Waits for the device if there is a flag.

    Args:
        flag: Result of ``overflow_flag``.
    """
    return flag is not None and bool(flag.item())
