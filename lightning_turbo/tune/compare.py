"""``lightning-turbo tune compare``: lists what got slower between two folders of results."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import interval_of, markdown_table, print_lines, three_digits
from lightning_turbo.tune.candidates import SMALL_SHARE

__all__ = ["compare_results"]

AS_IT_IS = "the script as it is"
RECOMMENDED = "with what was recommended"


def compare_results(folders: Sequence[Path]) -> int:
    """Print how the steps of two runs of tune differ, for the unchanged script and for the recommendation.

    A step got slower if the lower end of the 95 % interval of the ratio is 3 % above 1. Processes of two runs are not
    interleaved, and the margin covers the variation of the machine from day to day.

    Args:
        folders: Two values of ``--out``: before and after.

    Returns:
        Exit status: 0, or 1 if a step got slower.

    Raises:
        TurboError: If there are not two results from one machine.
    """
    if len(folders) != 2:
        raise TurboError(f"tune compare: expected two folders of results, got {len(folders)}.")
    (machine, before), (other, after) = map(_read, folders)
    if machine != other:
        raise TurboError(f"tune compare: expected results of one machine, got {machine} and {other}.")
    for folder, parts in zip(folders, (before, after), strict=True):
        if RECOMMENDED not in parts:
            print_lines(f"{folder}: nothing was recommended yet, so that only {AS_IT_IS} is compared.")
    rows = [_row(name, before[name], after[name]) for name in before if name in after]
    slower = sum(bool(row[-1]) for row in rows)
    steps = "step" if len(rows) == 1 else "steps"
    print_lines(f"{slower or 'None'} of {len(rows)} {steps} got slower beyond noise.\n")
    print_lines(*markdown_table(["step", "before, ms", "after, ms", "after / before", ""], rows))
    return 1 if slower else 0


def _row(name: str, before: Sequence[float], after: Sequence[float]) -> list[str]:
    low, high = interval_of(after, before) or (0.0, math.inf)
    means = [math.exp(statistics.fmean(each)) for each in (before, after)]
    factor = f"{means[1] / means[0]:.2f} ({low:.2f} to {high:.2f})"
    return [name, *map(three_digits, means), factor, "slower" if low > 1.0 + SMALL_SHARE else ""]


def _read(folder: Path) -> tuple[str, dict[str, list[float]]]:
    """Return the machine, and the logarithms of the step times."""
    path = folder / "tune.json"
    if not path.is_file():
        raise TurboError(f"{str(folder)!r}: expected a folder that tune wrote, with tune.json.")
    try:
        machine, parts = _parts(json.loads(path.read_text()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TurboError(
            f"{path}: expected what this version of tune writes, got {type(error).__name__}: {error}. Run tune again."
        ) from error
    if len(parts[AS_IT_IS]) < 2:
        raise TurboError(f"{path}: expected a step measured in two processes or more. Run tune again, for longer.")
    return machine, parts


def _parts(results: Mapping[str, Any]) -> tuple[str, dict[str, list[float]]]:
    parts = {AS_IT_IS: results["default"].get("processes_ms", [])}
    # Without settings, either the unchanged script was recommended or nothing yet.
    unknown = results.get("interrupted") or results.get("verdict", "").startswith("nothing is recommended")
    chosen = results["chosen"]
    if chosen["settings"] or not unknown:
        parts[RECOMMENDED] = chosen["processes_ms"] or parts[AS_IT_IS]
    machine = "{processor}, {cores} cores".format(**results["machine"])
    return machine, {name: [math.log(each) for each in part] for name, part in parts.items()}
