"""``lightning-turbo doctor compare A B``: lists what is slower or new in the second of two reports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_turbo.doctor.rules.rule import LEVELS
from lightning_turbo.errors import TurboError
from lightning_turbo.measure import interval_of, print_lines

__all__ = ["compare"]

SLOWER = 1.1
"""The lower end of the factor's 95 % interval must exceed this. The interval covers the steps of one process per
report, and processes of one program already differ by a few hundredths; a choice.
"""
TIMES = {"compute-bound", "copy-bound", "loop-overhead", "waits-for-data"}
"""Rules about where most of the time goes, which is compared directly."""


def compare(before: Path, after: Path) -> int:
    """Print what is slower or new in the second of two reports.

    Args:
        before: ``doctor.json``, or the folder that contains it.
        after: The same for the later run.

    Returns:
        1 if anything is slower or new, else 0.

    Raises:
        TurboError: If a file is not a report of this version.
    """
    old, new = _read(before), _read(after)
    ratio = _ratio(old["steps"], new["steps"])
    grown = _grown(old, new)
    worse = [*([f"slower: {ratio[0]}{grown}"] if ratio[1] > SLOWER else []), *_new_findings(old, new)]
    for line in worse or [f"nothing got slower, and no finding is new: {ratio[0]}"]:
        print_lines(f"lightning-turbo doctor: {line}")
    return int(bool(worse))


def _read(path: Path) -> dict[str, Any]:
    file = path / "doctor.json" if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        return {
            "steps": [math.log(each) for each in report["steps"]],
            "phases": {str(each["name"]): float(each["seconds"]) for each in report["phases"]},
            "findings": [_finding(each) for each in report["findings"]],
        }
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise TurboError(f"{str(file)!r}: expected a doctor.json of this version, got {error!r}.") from error


def _finding(read: dict[str, Any]) -> dict[str, Any]:
    where = "; ".join(read["places"])
    return {
        "rule": str(read["rule"]),
        "grade": LEVELS.index(read["level"]),
        "count": int(read["count"]),
        "said": f"{read['level']} {read['rule']}: {read['what']}{f' ({where})' if where else ''}",
    }


def _ratio(old: list[float], new: list[float]) -> tuple[str, float]:
    """Return in words how the logarithms of the steps compare, and the lower end of the factor's interval."""
    # Without steps in the earlier report, the interval would describe the later one alone.
    interval = interval_of(new, old) if old else None
    if interval is None:
        return "too few steps were timed to tell times apart", 0.0
    middle = math.exp(fmean(new) - fmean(old))
    return f"a step takes {middle:.2f} times as long ({interval[0]:.2f} to {interval[1]:.2f})", interval[0]


def _grown(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return in words which phase grew most."""
    before, now = old["phases"], new["phases"]
    grown = max(now, key=lambda name: now[name] - before.get(name, 0.0), default=None)
    if grown is None:
        return ""
    return f", most in {grown}: {before.get(grown, 0.0) * 1e3:.2f} ms, now {now[grown] * 1e3:.2f}"


def _new_findings(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Return the findings that are new or more frequent; places are ignored, because lines may have moved."""
    excuses = [(each["rule"], each["grade"]) for each in old["findings"] for _ in range(each["count"])]
    for each in new["findings"]:
        for _ in range(each["count"]):
            # Each earlier finding of a rule excuses one later finding of the same level or a milder one.
            known = [key for key in excuses if key[0] == each["rule"] and key[1] <= each["grade"]]
            if known:
                excuses.remove(known[-1])
            elif each["rule"] not in TIMES:
                yield f"new: {each['said']}"
                break
