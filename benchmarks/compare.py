"""``python -m benchmarks compare A B``: two results side by side, what got slower and what got faster."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Summary, print_table
from benchmarks.report import figure, load_results, ratio
from benchmarks.runner import differences
from benchmarks.suite import BenchError
from lightning_turbo.measure import print_lines

__all__ = ["compare_results", "main"]

WORDS = {"time": ("slower", "faster"), "time / baseline": ("slower", "faster"), "peak memory": ("larger", "smaller")}


def _figures(results: Mapping[str, Any], time: str) -> dict[tuple[str, str], Summary]:
    """Time and memory of each case, as far as they were measured; the time alone, or divided by the baseline's."""
    figures = {}
    for suite in results["suites"]:
        known = {row["case"]: row for row in suite["rows"]}
        for row in suite["rows"]:
            base = known.get(row["base"])
            relative = ratio(row, base) if base is not None and base is not row else None
            seconds = figure(row, "seconds") if time == "time" else relative
            for quantity, value in ((time, seconds), ("peak memory", figure(row, "peak_bytes"))):
                if value is not None:
                    figures[f"{suite['suite']}: {row['case']}", quantity] = value
    return figures


def _verdict(before: Summary | None, after: Summary | None, threshold: float, words: tuple[str, str]) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    if after.median > before.median * (1 + threshold) and after.low > before.high:
        return words[0]
    return words[1] if after.median * (1 + threshold) < before.median and after.high < before.low else "same"


def compare_results(
    before: Mapping[str, Any], after: Mapping[str, Any], threshold: float = 0.05
) -> list[tuple[str, str, Summary | None, Summary | None, str]]:
    """Compare two results case by case.

    A case is slower or faster when its median moved by more than ``threshold``, 0 or more, and the quartiles of the two
    do not overlap. Where machine or settings differ, times divided by the baseline are compared in place of the times.

    Returns:
        Case, quantity, both values, and ``"slower"``, ``"faster"``, ``"larger"``, ``"smaller"``, ``"same"``, ``"new"``
        or ``"gone"``.

    Raises:
        BenchError: If ``threshold`` is negative.
    """
    if not threshold >= 0:
        raise BenchError(f"threshold={threshold!r}: expected 0 or more, for example 0.05 for 5 %")
    time = "time / baseline" if differences(before, after) else "time"
    old, new = _figures(before, time), _figures(after, time)
    return [
        (*key, old.get(key), new.get(key), _verdict(old.get(key), new.get(key), threshold, WORDS[key[1]]))
        for key in dict.fromkeys([*old, *new])
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Show what changed, and return 1 if something got slower or larger."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=main.__doc__)
    parser.add_argument("results", nargs=2, type=Path, metavar="RESULT", help="a results.json or its folder")
    parser.add_argument("--threshold", type=float, default=0.05, metavar="X", help="smallest change that counts (0.05)")
    asked = parser.parse_args(arguments)
    before, after = map(load_results, asked.results)
    if differing := differences(before, after):
        print_lines("The runs differ, so times are compared as ratios to the baseline:", *differing)
    changes = compare_results(before, after, asked.threshold)
    lines = [
        [case, quantity, f"{old.median:.4g}" if old else "", f"{new.median:.4g}" if new else "",
         f"{new.median / old.median:.3f}" if old and new and old.median else "", verdict]
        for case, quantity, old, new, verdict in changes
        if verdict != "same"
    ]  # fmt: skip
    if lines:
        print_table("changed", ["case", "quantity", "before", "after", "after / before", "verdict"], lines)
    worse = sum(verdict in ("slower", "larger") for *_, verdict in changes)
    print_lines(f"{worse} slower or larger, {len(lines) - worse} otherwise changed, {len(changes) - len(lines)} same.")
    return int(worse > 0)
