"""Medians, spreads, and ratios pair by pair, over the rows that ``Turns`` fills."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "FEWEST_PROCESSES",
    "Summary",
    "interval",
    "interval_of",
    "log_quotients",
    "ratio",
    "step_seconds",
    "summarise",
]

FEWEST_PROCESSES = 6  # from which on an interval is shown and decides
FEW = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # the 97.5 % quantile of Student's t for few degrees of freedom


@dataclass(frozen=True)
class Summary:
    """The middle of some values and their spread.

    Args:
        median: The median.
        low: The lower quartile.
        high: The upper quartile.
        count: How many values there were.
    """

    median: float
    low: float
    high: float
    count: int


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


def _by_sweep(row: Mapping[str, Any]) -> dict[int, float]:
    """Seconds a step of each round, by the sweep in which it was measured."""
    return {part["sweep"]: part["seconds"] / part["steps"] for part in row["rounds"]}


def step_seconds(row: Mapping[str, Any]) -> Summary | None:
    """Return the seconds of a step, over the rounds of a row.

    Args:
        row: As ``Turns`` fills it.
    """
    return summarise(list(_by_sweep(row).values()))


def ratio(row: Mapping[str, Any], other: Mapping[str, Any]) -> Summary | None:
    """Return the time of one row divided by that of another: below 1 is faster.

    Each round is divided by the other's round of the same sweep, so that a drift of the machine cancels; the summary
    is that of the quotients.

    Args:
        row: Above the line.
        other: Below the line.

    Returns:
        ``None`` if no round of both belongs to the same sweep.
    """
    upper, lower = _by_sweep(row), _by_sweep(other)
    return summarise([upper[sweep] / lower[sweep] for sweep in upper if lower.get(sweep)])


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to 0.003 (Abramowitz and Stegun, 26.7.5)."""
    if freedom in FEW:
        return FEW[freedom]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def log_quotients(row: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """Return the mean logarithm of the ratio of two rows' times in each process that measured both.

    Rounds of one process share its luck, such as where its memory lies, so that only processes count as independent.

    Args:
        row: Above the line.
        other: Below the line.
    """
    lower = _by_sweep(other)
    logs: dict[int, list[float]] = {}
    for part in row["rounds"]:
        if lower.get(part["sweep"]):
            quotient = part["seconds"] / part["steps"] / lower[part["sweep"]]
            logs.setdefault(part.get("process", 0), []).append(math.log(quotient))
    return [statistics.fmean(values) for values in logs.values()]


def interval_of(logs: Sequence[float], fewest: int = FEWEST_PROCESSES) -> tuple[float, float] | None:
    """Return the 95 % interval of a ratio from its logarithm in each process, by Student's t.

    Args:
        logs: As ``log_quotients`` returns them.
        fewest: Processes below which there is no interval, 2 or more.
    """
    if len(logs) < fewest:
        return None
    middle = statistics.fmean(logs)
    reach = _student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle - reach), math.exp(middle + reach)


def interval(row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of the ratio of two rows' times, or ``None`` of fewer than six processes."""
    return interval_of(log_quotients(row, other))
