"""The one word for "this optimizer step is skipped", which schedules, warm-ups and other hooks of a step ask for."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["announce_skip", "skip_flag", "was_skipped"]

_skipping: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()


def skip_flag(optimizer: Optimizer) -> Tensor | None:
    """Return whether a loss scaler skips the step that is under way, for hooks of ``optimizer.step`` that follow it.

    A step that is not made at all runs no hooks. One that runs them, and changes nothing, has this flag: that of
    torch's fused optimizers, which read it on the device, or that of ``amp.scale_loss``.

    Returns:
        A tensor without dimensions, 1.0 for a skipped step and else 0.0, to be read on the host as late as may be;
        ``None`` where nothing can be skipped.
    """
    return _skipping.get(optimizer, getattr(optimizer, "found_inf", None))


def was_skipped(flag: Tensor | None) -> bool:
    """Return whether a step was skipped, from its ``skip_flag``; waits for the device if there is one."""
    return flag is not None and bool(flag.item())


def announce_skip(optimizer: Optimizer, flag: Tensor | None) -> None:
    """Say that the step that begins is skipped; ``None`` for one that is not."""
    if flag is None:
        _skipping.pop(optimizer, None)
    else:
        _skipping[optimizer] = flag
