"""What ``python -m benchmarks`` and ``python -m benchmarks compare`` do, from settings to exit status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from benchmarks.compare import compare_results, differences
from benchmarks.report import load_results, suite_tables, write_report, write_results
from benchmarks.runner import choose_suites, run_suites
from benchmarks.settings import BenchSettings
from benchmarks.suite import BenchError, load_suite
from lightning_turbo._optional import require
from lightning_turbo.measure import console_for, print_table

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


def run_bench(settings: BenchSettings, console: Any = None) -> int:
    """Measure, write the results, and show them.

    Args:
        settings: What to measure, how, and where the results go.
        console: A rich console for the tables; ``None`` writes to standard output.

    Returns:
        Exit status: 0; 1 if a case failed; 130 after Ctrl-C.

    Raises:
        MissingExtraError: If rich or matplotlib is not installed.
        BenchError: If the settings choose no case, or their folder cannot be written to.
        OSError: If a file cannot be written later on, for example because the disk is full; what was there is kept.
    """
    require("rich", "python -m benchmarks")
    require("matplotlib", "python -m benchmarks")
    console = console_for(console)
    choose_suites(settings)  # refuses before anything is moved
    kept = _make_room(settings.out)
    results = run_suites(settings, save=lambda part: write_results(part, settings.out))
    paths = write_report(results, settings.out)
    for suite in results["suites"]:
        for columns, lines in suite_tables(suite, results["machine"]):
            print_table(console, suite["suite"], columns, lines)
    for path in paths:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    if kept:
        console.print(f"The former result is kept as {kept}.", markup=False, highlight=False, soft_wrap=True)
    if results["interrupted"]:
        return 130
    return int(any(row["status"] == "failed" for suite in results["suites"] for row in suite["rows"]))


def compare_files(before: Path, after: Path, *, threshold: float = 0.05, console: Any = None) -> int:
    """Show what changed between two results.

    Args:
        before: A ``results.json`` or its folder.
        after: Another one.
        threshold: Smallest relative change that counts, 0 or more.
        console: A rich console; ``None`` writes to standard output.

    Returns:
        Exit status: 1 if something got slower or larger, else 0.

    Raises:
        MissingExtraError: If rich is not installed.
        BenchError: If a file does not hold results, or the threshold is negative.
    """
    require("rich", "python -m benchmarks compare")
    console = console_for(console)
    first, second = load_results(before), load_results(after)
    differing = differences(first, second)
    if differing:
        console.print("The runs differ, so times are compared as ratios to the baseline:", highlight=False)
        for text in differing:
            console.print(f"  {text}", markup=False, highlight=False)
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
        print_table(console, "changed", ["case", "quantity", "before", "after", "after / before", "verdict"], lines)
    worse = sum(change.verdict in ("slower", "larger") for change in changes)
    same = sum(change.verdict == "same" for change in changes)
    console.print(
        f"{worse} slower or larger, {len(lines) - worse} otherwise changed, {same} the same.", highlight=False
    )
    return int(worse > 0)


def list_cases(settings: BenchSettings, console: Any = None) -> int:
    """Print the names of the suites and cases that the settings choose, or of all if ``only`` matches none.

    Args:
        settings: What to choose.
        console: A rich console; ``None`` writes to standard output.

    Returns:
        Exit status 0.

    Raises:
        MissingExtraError: If rich is not installed.
        BenchError: If ``only`` matches no case.
    """
    require("rich", "python -m benchmarks")
    console = console_for(console)
    suites = [load_suite(name, settings.suites) for name in settings.names()]
    shown = settings if any(map(settings.chosen, suites)) else replace(settings, only=())
    for suite in suites:
        if chosen := shown.chosen(suite):
            console.print(f"{suite.name}: {suite.about}", markup=False, highlight=False)
            for case in chosen:
                console.print(f"  {case}", markup=False, highlight=False)
    if shown is not settings:
        raise BenchError(f"only={settings.only!r} matches none of these cases. A pattern is as in a shell: 'O1*'.")
    return 0
