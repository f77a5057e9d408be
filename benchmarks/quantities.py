"""What a case came to, in time, memory or a number of its own, and the ratios of cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_turbo import measure
from lightning_turbo.measure import Summary, step_seconds, summarise

__all__ = ["figure", "ratio", "throughput"]


def throughput(row: Mapping[str, Any]) -> float | None:
    """Return the median samples a second, or ``None`` where the case counted none.

    Args:
        row: One of the ``rows`` of a suite's results.
    """
    rates = summarise([part["samples"] / part["seconds"] for part in row["rounds"] if part["samples"]])
    return rates.median if rates else None


def figure(row: Mapping[str, Any], quantity: str) -> Summary | None:
    """Return what a case came to in one quantity.

    Args:
        row: One of the ``rows`` of a suite's results.
        quantity: ``"seconds"`` a step, ``"peak_bytes"``, or one of the case's own numbers.

    Returns:
        A summary, whose quartiles are the value itself where there is one value a case; ``None`` if there is none.
    """
    if quantity == "seconds":
        return step_seconds(row)
    value = row["peak_bytes"] if quantity == "peak_bytes" else row["numbers"].get(quantity)
    return None if value is None else summarise([value])


def ratio(row: Mapping[str, Any], other: Mapping[str, Any], quantity: str = "seconds") -> Summary | None:
    """Return one case divided by another: below 1 is faster, or smaller. Times are divided pair by pair.

    Args:
        row: The case above the line.
        other: The case below the line.
        quantity: As in ``figure``.

    Returns:
        ``None`` if there is nothing to divide, or the lower value is zero.
    """
    if quantity == "seconds":
        return measure.ratio(row, other)
    above, below = figure(row, quantity), figure(other, quantity)
    if above is None or below is None or below.median == 0:
        return None
    return summarise([above.median / below.median])
