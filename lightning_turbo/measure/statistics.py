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


def _by_sweep(row: Mapping[str, Any]) -> dict[int, float]:
    """Seconds a step of each round, by the sweep in which it was measured."""
    return {part["sweep"]: part["seconds"] / part["steps"] for part in row["rounds"]}


def step_seconds(row: Mapping[str, Any]) -> Summary | None:
    """Return the seconds of a step, over the rounds of a row as ``Turns`` fills it."""
    return summarise(list(_by_sweep(row).values()))


def ratio(row: Mapping[str, Any], other: Mapping[str, Any]) -> Summary | None:
    """Return the time of one row divided by that of another: below 1 is faster.

    Each round is divided by the other's round of the same sweep, so that a drift of the machine cancels; the summary
    is that of the quotients.

    It is ``None`` if no round of both belongs to the same sweep.
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
    """
    lower = _by_sweep(other)
    logs: dict[int, list[float]] = {}
    for part in row["rounds"]:
        if lower.get(part["sweep"]):
            quotient = part["seconds"] / part["steps"] / lower[part["sweep"]]
            logs.setdefault(part.get("process", 0), []).append(math.log(quotient))
    return [statistics.fmean(values) for values in logs.values()]


def interval_of(logs: Sequence[float], fewest: int = FEWEST_PROCESSES) -> tuple[float, float] | None:
    """Return the 95 % interval of a ratio from its logarithm in each process, by Student's t; ``None`` of too few."""
    if len(logs) < fewest:
        return None
    middle = statistics.fmean(logs)
    reach = _student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle - reach), math.exp(middle + reach)


def interval(row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of the ratio of two rows' times, or ``None`` of fewer than six processes."""
    return interval_of(log_quotients(row, other))
