"""Ratios of times per process and their confidence interval, from the rows filled by ``InterleavedRounds``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["interval_of", "log_quotients", "seconds_by_sweep"]

# The 97.5 % quantile of Student's t for few degrees of freedom, where the series below is inaccurate.
FEW = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


def seconds_by_sweep(row: Mapping[str, Any]) -> dict[int, float]:
    """Return the seconds per step in each round of a row, by the sweep of the round."""
    return {part["sweep"]: part["seconds"] / part["steps"] for part in row["rounds"]}


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, accurate to 0.003 (Abramowitz and Stegun, 26.7.5)."""
    if freedom in FEW:
        return FEW[freedom]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def log_quotients(
    row: Mapping[str, Any],
    other: Mapping[str, Any],
    seconds_of: Callable[[Mapping[str, Any]], Mapping[int, float]] = seconds_by_sweep,
) -> list[float]:
    """Return the mean logarithm of the ratio of two rows' times, for each process that measured both.

    Rounds of one process share random effects such as its memory layout, so only processes count as independent.

    Args:
        row: The numerator.
        other: The denominator.
        seconds_of: Returns the times of a row by the sweep of the round; by default the seconds per step.
    """
    upper, lower = seconds_of(row), seconds_of(other)
    logs: dict[int, list[float]] = {}
    for part in row["rounds"]:
        # After an interrupted sweep, the other row may lack its round.
        if lower.get(part["sweep"]):
            quotient = upper[part["sweep"]] / lower[part["sweep"]]
            logs.setdefault(part.get("process", 0), []).append(math.log(quotient))
    return [statistics.fmean(values) for values in logs.values()]


def interval_of(logs: Sequence[float], others: Sequence[float] = ()) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of a ratio from its logarithm in each process; ``None`` for one process.

    It uses Student's t. With ``others``, it is the ratio of two quantities that were measured separately, from the
    logarithms of each: Welch's statistic with the smaller number of degrees of freedom, which gives the wider interval.
    """
    samples = [logs, others] if others else [logs]
    if min(map(len, samples)) < 2:
        return None
    middle = statistics.fmean(logs) - (statistics.fmean(others) if others else 0.0)
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in samples))
    reach = _student(min(map(len, samples)) - 1) * error
    return math.exp(middle - reach), math.exp(middle + reach)
