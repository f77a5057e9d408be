"""Medians, spreads, and ratios pair by pair."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "FEWEST_PROCESSES",
    "Summary",
    "figure",
    "interval",
    "ratio",
    "step_seconds",
    "summarise",
    "three_digits",
    "throughput",
]


FEWEST_PROCESSES = 6  # from which on their differences can be told from their number


@dataclass(frozen=True)
class Summary:
    """The middle of some values and how far they spread.

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
    """Return the seconds that a case took for a step.

    Args:
        row: One of the ``rows`` of a suite's results.
    """
    return summarise(list(_by_sweep(row).values()))


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
    """Return one case divided by another: below 1 is faster, or smaller.

    Times are divided pair by pair, each round by the other's round of the same sweep, so that a drift of the machine
    cancels; the summary is that of the quotients.

    Args:
        row: The case above the line.
        other: The case below the line.
        quantity: As in ``figure``.

    Returns:
        ``None`` if there is nothing to divide, or the lower value is zero.
    """
    if quantity == "seconds":
        upper, lower = _by_sweep(row), _by_sweep(other)
        return summarise([upper[sweep] / lower[sweep] for sweep in upper if lower.get(sweep)])
    above, below = figure(row, quantity), figure(other, quantity)
    if above is None or below is None or below.median == 0:
        return None
    return summarise([above.median / below.median])


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t for 5 or more degrees of freedom, to 0.003 (Abramowitz and Stegun, 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def interval(row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return where the ratio of two cases' times lies with 95 % confidence.

    Rounds of one process share its luck, where its memory lies for one, so that only processes count as independent:
    each gives the geometric mean of its quotients, and Student's t over their logarithms gives the interval.

    Args:
        row: The case above the line.
        other: The case below the line.

    Returns:
        Its two ends, or ``None`` of fewer than 6 processes.
    """
    lower = _by_sweep(other)
    logs: dict[int, list[float]] = {}
    for part in row["rounds"]:
        if lower.get(part["sweep"]):
            quotient = part["seconds"] / part["steps"] / lower[part["sweep"]]
            logs.setdefault(part.get("process", 0), []).append(math.log(quotient))
    means = [statistics.fmean(values) for values in logs.values()]
    if len(means) < FEWEST_PROCESSES:
        return None
    middle = statistics.fmean(means)
    reach = _student(len(means) - 1) * statistics.stdev(means) / math.sqrt(len(means))
    return math.exp(middle - reach), math.exp(middle + reach)


def three_digits(value: float) -> str:
    """Write a number with at least three digits and without an exponent."""
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{decimals}f}"
