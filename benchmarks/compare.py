"""Two runs of the benchmarks side by side: what got slower, what got faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.quantities import figure, ratio
from benchmarks.suite import BenchError
from lightning_turbo.measure import Summary

__all__ = ["Change", "compare_results", "differences"]

# What must be alike for times of two runs to be compared directly.
SAME = ("processor", "cores", "system", "environment", "gpu")
SAME_SETTINGS = ("device", "threads", "quick")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One quantity of one case in two runs.

    Args:
        suite: Name of the suite.
        case: Name of the case.
        quantity: ``"time"``, ``"time / baseline"`` or ``"peak memory"``.
        before: In the first run; ``None`` if it is not there.
        after: In the second run; ``None`` if it is not there.
        ratio: ``after / before``, or ``None``.
        verdict: ``"slower"``, ``"faster"``, ``"larger"``, ``"smaller"``, ``"same"``, ``"new"`` or ``"gone"``.
    """

    suite: str
    case: str
    quantity: str
    before: Summary | None
    after: Summary | None
    ratio: float | None
    verdict: str


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return in words what differs between the circumstances of two runs; times compare directly if it is empty.

    Args:
        before: The first run's results.
        after: The second run's results.
    """
    pairs = [(key, before["machine"].get(key) or None, after["machine"].get(key) or None) for key in SAME]
    pairs += [(key, before["settings"].get(key), after["settings"].get(key)) for key in SAME_SETTINGS]
    return [f"{key}: {old!r} -> {new!r}" for key, old, new in pairs if old != new]


def _verdict(before: Summary, after: Summary, threshold: float, words: tuple[str, str]) -> str:
    """Beyond the threshold, and beyond the spread of both runs."""
    if after.median > before.median * (1 + threshold) and after.low > before.high:
        return words[0]
    if after.median * (1 + threshold) < before.median and after.high < before.low:
        return words[1]
    return "same"


def _rows(results: Mapping[str, Any]) -> dict[tuple[str, str], tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return {(suite["suite"], row["case"]): (suite, row) for suite in results["suites"] for row in suite["rows"]}


def _time(suite: Mapping[str, Any], row: Mapping[str, Any], relative: bool) -> Summary | None:
    if not relative:
        return figure(row, "seconds")
    base = next((other for other in suite["rows"] if other["case"] == row["base"]), None)
    return None if base is None or base is row else ratio(row, base)


def compare_results(
    before: Mapping[str, Any], after: Mapping[str, Any], *, threshold: float = 0.05
) -> Iterator[Change]:
    """Compare two runs case by case.

    A case is slower or faster when its median moved by more than ``threshold`` and the quartiles of the two runs do
    not overlap. Where the runs differ in machine or settings (``differences``), the times divided by the suite's
    baseline are compared in place of the times.

    Args:
        before: The first run's results.
        after: The second run's results.
        threshold: Smallest relative change that counts, 0 or more; 0.05 is 5 %.

    Yields:
        Two changes a case, time and memory, as far as they were measured.

    Raises:
        BenchError: If ``threshold`` is negative.
    """
    if not threshold >= 0:
        raise BenchError(f"threshold={threshold!r}: expected 0 or more, for example 0.05 for 5 %. Raise it.")
    relative = bool(differences(before, after))
    old, new = _rows(before), _rows(after)
    for key in dict.fromkeys([*old, *new]):
        suite_name, case = key
        time_name = "time / baseline" if relative else "time"
        times = [_time(*rows[key], relative) if key in rows else None for rows in (old, new)]
        sizes = [figure(rows[key][1], "peak_bytes") if key in rows else None for rows in (old, new)]
        for quantity, (first, second), words in (
            (time_name, times, ("slower", "faster")),
            ("peak memory", sizes, ("larger", "smaller")),
        ):
            if first is None and second is None:
                continue
            quotient = None
            if first is None:
                verdict = "new"
            elif second is None:
                verdict = "gone"
            else:
                verdict = _verdict(first, second, threshold, words)
                quotient = second.median / first.median if first.median else None
            yield Change(
                suite=suite_name,
                case=case,
                quantity=quantity,
                before=first,
                after=second,
                ratio=quotient,
                verdict=verdict,
            )
