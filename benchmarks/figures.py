"""Medians, quartiles and ratios of the rows that ``InterleavedRounds`` fills."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_turbo.measure import interval_of, log_quotients, seconds_by_sweep

__all__ = ["Summary", "interval", "ratio", "step_seconds", "summarize"]

FEWEST_PROCESSES = 6  # for an interval


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of some values."""

    median: float
    low: float  # the lower quartile
    high: float  # the upper quartile
    count: int  # number of values


def summarize(values: Sequence[float]) -> Summary | None:
    """Return median and quartiles of the values, or ``None`` if there are none.

    The quartiles of a single value are that value.
    """
    if not values:
        return None
    if len(values) == 1:
        return Summary(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, low, high, len(values))


def step_seconds(row: Mapping[str, Any]) -> Summary | None:
    """Return the seconds per step over the rounds of a row, or ``None`` if it has none."""
    return summarize(list(seconds_by_sweep(row).values()))


def ratio(row: Mapping[str, Any], other: Mapping[str, Any]) -> Summary | None:
    """Return the ratio of the times of two rows, below 1 if ``row`` is faster.

    Each round is divided by the other row's round of the same sweep, so that a drift of the machine cancels out. The
    summary is that of these quotients.

    Returns:
        The ratio, or ``None`` if the rows have no sweep in common.
    """
    upper, lower = seconds_by_sweep(row), seconds_by_sweep(other)
    return summarize([upper[sweep] / lower[sweep] for sweep in upper if lower.get(sweep)])


def interval(row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of the ratio of the times of two rows, or ``None`` for fewer than six processes."""
    logs = log_quotients(row, other)
    return interval_of(logs) if len(logs) >= FEWEST_PROCESSES else None
