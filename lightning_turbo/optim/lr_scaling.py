"""The learning rate factor for large batches."""

from __future__ import annotations

import math
from typing import Literal

from lightning_turbo._checks import check_choice, check_count

__all__ = ["lr_factor"]


def lr_factor(rule: Literal["linear", "sqrt"], batch_size: int, base_batch_size: int) -> float:
    """Return the learning rate factor for a larger batch.

    Args:
        rule: ``"linear"``: ``batch_size / base_batch_size`` (for SGD); ``"sqrt"``: its square root (for Adam and LAMB).
        batch_size: Samples per optimizer step over all ranks, at least 1.
        base_batch_size: Samples per optimizer step for which the learning rate was tuned, at least 1.

    Raises:
        TypeError: If a size is not an integer.
        ValueError: If the rule is unknown or a size is below 1.

    Example:
        >>> lr_factor("linear", 1024, 256), lr_factor("sqrt", 1024, 256)
        (4.0, 2.0)

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017; Krizhevsky, One Weird Trick, 2014 (square root).
    """
    ratio = check_count("batch_size", batch_size) / check_count("base_batch_size", base_batch_size)
    check_choice("rule", rule, ("linear", "sqrt"))
    return ratio if rule == "linear" else math.sqrt(ratio)
