"""Limits of a cyclical learning rate from the loss curve of a range test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_turbo._checks import expect

__all__ = ["LRRange", "propose_lr_range"]


class LRRange(NamedTuple):
    """The limits that a range test proposes, and its loss curve."""

    base_lr: float
    max_lr: float
    lrs: list[float]
    losses: list[float]


def propose_lr_range(lrs: Sequence[float], losses: Sequence[float]) -> LRRange:
    """Propose the limits of a cyclical learning rate from the loss curve of a range test.

    The fall of the curve starts at its highest loss before the minimum and ends at the minimum. ``base_lr`` is the
    learning rate after a tenth of the fall, ``max_lr`` the learning rate after nine tenths, before the curve flattens
    or rises.

    Args:
        lrs: Learning rates in ascending order, at least 5.
        losses: Smoothed loss at each learning rate. Non-finite entries are ignored.

    Returns:
        The two limits and the curve.

    Raises:
        ValueError: If the curve has fewer than 5 finite points, or the loss never falls.

    Example:
        >>> found = propose_lr_range([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0], [2.0, 2.0, 1.7, 1.05, 1.0, 9.0])
        >>> found.base_lr, found.max_lr
        (0.001, 0.01)

    Source: Smith, Cyclical Learning Rates for Training Neural Networks, 2017, section 3.3.
    """
    curve = _finite_part(lrs, losses)
    falling = _falling_part(curve)
    start = falling[0][1]
    fall = falling[0][1] - falling[-1][1]
    if fall <= 1e-3 * abs(start):  # a smaller fall is rounding of the running mean
        raise ValueError(
            f"losses: expected a fall, got none below the start of {start:.4g} from lr={curve[0][0]:.3g} to "
            f"lr={curve[-1][0]:.3g}. Lower min_lr, or check the model."
        )

    def find_lr(share: float) -> float:
        return next(lr for lr, loss in falling if start - loss >= share * fall)

    tested, measured = zip(*curve, strict=True)
    return LRRange(find_lr(0.1), find_lr(0.9), list(tested), list(measured))


def _finite_part(lrs: Sequence[float], losses: Sequence[float]) -> list[tuple[float, float]]:
    expect(len(lrs) == len(losses), "losses", len(losses), f"one per learning rate, {len(lrs)}")
    curve = [(float(lr), float(loss)) for lr, loss in zip(lrs, losses, strict=True) if math.isfinite(loss)]
    expect(len(curve) >= 5, "losses", len(curve), "at least 5 finite ones")
    return curve


def _falling_part(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the part of the curve from its highest loss before the minimum to the minimum."""
    # Searched backwards from the minimum, because after it the loss is highest: there the learning rate is too large.
    lowest = min(range(len(curve)), key=lambda index: curve[index][1])
    highest = max(range(lowest + 1), key=lambda index: curve[index][1])
    return curve[highest : lowest + 1]
