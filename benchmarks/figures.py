"""Medians, spreads and ratios over the rows that ``InterleavedRounds`` fills."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_turbo.measure import interval_of, log_quotients, seconds_by_sweep

__all__ = ["Summary", "interval", "ratio", "step_seconds", "summarise"]

FEWEST_PROCESSES = 6  # from which on an interval is shown and decides


@dataclass(frozen=True)
class Summary:
    """The middle of some values and their spread."""

    median: float
    low: float  # the lower quartile
    high: float  # the upper quartile
    count: int  # of the values


def summarise(values: Sequence[float]) -> Summary | None:
    """Return median and quartiles, or ``None`` of no values.

    Args:
        values: Any numbers; of a single one, the quartiles are that number.
    """
    if not values:
        return None
    if len(values) == 1:
        return Summary(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, low, high, len(values))


def step_seconds(row: Mapping[str, Any]) -> Summary | None:
    """Return the seconds of a step, over the rounds of a row as ``InterleavedRounds`` fills it."""
    return summarise(list(seconds_by_sweep(row).values()))


def ratio(row: Mapping[str, Any], other: Mapping[str, Any]) -> Summary | None:
    """Return the time of one row divided by that of another: below 1 is faster.

    Each round is divided by the other's round of the same sweep, so that a drift of the machine cancels; the summary
    is that of the quotients.

    It is ``None`` if no round of both belongs to the same sweep.
    """
    upper, lower = seconds_by_sweep(row), seconds_by_sweep(other)
    return summarise([upper[sweep] / lower[sweep] for sweep in upper if lower.get(sweep)])


def interval(row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of the ratio of two rows' times, or ``None`` of fewer than six processes."""
    logs = log_quotients(row, other)
    return interval_of(logs) if len(logs) >= FEWEST_PROCESSES else None
