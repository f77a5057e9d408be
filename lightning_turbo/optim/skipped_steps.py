"""Whether the last call of an optimizer's step was skipped for an overflow: asked by cycles and warm-ups."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from lightning_turbo._skipped_steps import skip_flag

__all__ = ["overflow_flag", "was_skipped"]


def overflow_flag(optimizer: Optimizer) -> Tensor | None:
    """Return the flag by which a loss scaler tells a fused optimizer to skip, without reading it.

    Other optimizers are not called at all where a step is skipped, so that no hook of theirs runs.

    Args:
        optimizer: Just after its step.
    """
    return skip_flag(optimizer)


def was_skipped(flag: Tensor | None) -> bool:
    """Tell whether a step was skipped; waits for the device if the optimizer is a fused one under a loss scaler.

    Args:
        flag: What ``overflow_flag`` returned.
    """
    return flag is not None and bool(flag.item())
