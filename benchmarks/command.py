"""What ``python -m benchmarks`` and ``python -m benchmarks compare`` do, from settings to exit status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from benchmarks.compare import compare_results, differences
from benchmarks.report import load_results, suite_tables, write_report, write_results
from benchmarks.runner import choose_suites, run_suites
from benchmarks.settings import BenchSettings
from benchmarks.suite import BenchError, load_suite
from lightning_turbo._optional import require
from lightning_turbo.measure import print_lines, print_table

__all__ = ["BenchSettings", "compare_files", "list_cases", "run_bench"]


def _make_room(folder: Path) -> Path | None:
    """Make the folder and move a former result out of the way, to be compared with; return where it went."""
    former = folder / "results.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):  # now, not when the first case has been measured
            pass
        if not former.is_file():
            return None
        number = 1
        while (kept := folder / f"results-{number}.json").exists():
            number += 1
        former.rename(kept)
    except OSError as error:
        raise BenchError(
            f"out={str(folder)!r}: {error.strerror or error}; expected a folder that can be made and written. "
            "Name another one."
        ) from error
    return kept


def run_bench(settings: BenchSettings, stream: TextIO | None = None) -> int:
    """Measure, write the results, and show them.

    Args:
        settings: What to measure, how, and where the results go.
        stream: Where to write the tables; ``None`` takes standard output.

    Returns:
        Exit status: 0; 1 if a case failed; 130 after Ctrl-C.

    Raises:
        MissingExtraError: If matplotlib is not installed.
        BenchError: If the settings choose no case, or their folder cannot be written to.
        OSError: If a file cannot be written later on, for example because the disk is full; what was there is kept.
    """
    require("matplotlib", "python -m benchmarks")
    choose_suites(settings)  # refuses before anything is moved
    kept = _make_room(settings.out)
    results = run_suites(settings, save=lambda part: write_results(part, settings.out))
    paths = write_report(results, settings.out)
    for suite in results["suites"]:
        for columns, lines in suite_tables(suite, results["machine"]):
            print_table(suite["suite"], columns, lines, stream)
    print_lines(*map(str, paths), stream=stream)
    if kept:
        print_lines(f"The former result is kept as {kept}.", stream=stream)
    if results["interrupted"]:
        return 130
    return int(any(row["status"] == "failed" for suite in results["suites"] for row in suite["rows"]))


def compare_files(before: Path, after: Path, *, threshold: float = 0.05, stream: TextIO | None = None) -> int:
    """Show what changed between two results.

    Args:
        before: A ``results.json`` or its folder.
        after: Another one.
        threshold: Smallest relative change that counts, 0 or more.
        stream: Where to write; ``None`` takes standard output.

    Returns:
        Exit status: 1 if something got slower or larger, else 0.

    Raises:
        BenchError: If a file does not hold results, or the threshold is negative.
    """
    first, second = load_results(before), load_results(after)
    differing = differences(first, second)
    if differing:
        print_lines("The runs differ, so times are compared as ratios to the baseline:", stream=stream)
        print_lines(*(f"  {text}" for text in differing), stream=stream)
    changes = list(compare_results(first, second, threshold=threshold))
    lines = [
        [
            f"{change.suite}: {change.case}",
            change.quantity,
            f"{change.before.median:.4g}" if change.before else "",
            f"{change.after.median:.4g}" if change.after else "",
            f"{change.ratio:.3f}" if change.ratio is not None else "",
            change.verdict,
        ]
        for change in changes
        if change.verdict != "same"
    ]
    if lines:
        print_table("changed", ["case", "quantity", "before", "after", "after / before", "verdict"], lines, stream)
    worse = sum(change.verdict in ("slower", "larger") for change in changes)
    same = sum(change.verdict == "same" for change in changes)
    otherwise = len(lines) - worse
    print_lines(f"{worse} slower or larger, {otherwise} otherwise changed, {same} the same.", stream=stream)
    return int(worse > 0)


def list_cases(settings: BenchSettings, stream: TextIO | None = None) -> int:
    """Print the names of the suites and cases that the settings choose, or of all if ``only`` matches none.

    Args:
        settings: What to choose.
        stream: Where to write; ``None`` takes standard output.

    Returns:
        Exit status 0.

    Raises:
        BenchError: If ``only`` matches no case.
    """
    suites = [load_suite(name, settings.suites) for name in settings.names()]
    shown = settings if any(map(settings.chosen, suites)) else replace(settings, only=())
    for suite in suites:
        if chosen := shown.chosen(suite):
            print_lines(f"{suite.name}: {suite.about}", *(f"  {case}" for case in chosen), stream=stream)
    if shown is not settings:
        raise BenchError(f"only={settings.only!r} matches none of these cases. A pattern is as in a shell: 'O1*'.")
    return 0
