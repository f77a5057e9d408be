"""``python -m benchmarks NAME [options]``: measure a suite, or run one of the other programs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

from benchmarks.report import load_results, suite_tables, write_report
from benchmarks.runner import Settings, choose_suites, measure
from benchmarks.suite import SUITES, BenchError
from lightning_turbo._optional import require
from lightning_turbo.errors import TurboError
from lightning_turbo.measure import markdown_table, print_lines, write_json

__all__ = ["main", "run"]

PROGRAMS = (
    "answers",
    "charts",
    "networks",
    "projects",
    "public",
    "resume",
    "stops",
)  # modules with their own command line
DESCRIPTION = """Measure one suite or all of them. Each case runs in its own process, in interleaved rounds. Writes
results.json, results.md and a picture per suite. Ctrl-C and SIGTERM stop it and keep the results so far."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    programs = "|".join(PROGRAMS)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        usage=f"python -m benchmarks [SUITE] [options]\n       python -m benchmarks {programs} --help",
    )
    add = parser.add_argument
    add("suite", nargs="?", default="all", metavar="SUITE", help=f"{', '.join(SUITES)}, or all (default)")
    add("--quick", action="store_true", help="only the main cases, in short rounds: less than two minutes")
    add("--only", nargs="+", action="extend", default=[], metavar="PATTERN", help="cases to run, such as 'O1*' 'O2*'")
    add("--out", type=Path, default=Path("runs/benchmarks"), metavar="FOLDER", help="default: runs/benchmarks")
    add("--resume", action="store_true", help="continue the results in --out; finished cases are kept")
    add("--device", default="auto", help="auto (default), cpu or cuda")
    add("--threads", type=int, metavar="N", help="torch threads per case (default: torch's choice)")
    add("--rounds", type=int, metavar="N", help="rounds per case, however long they take (default: the suite's)")
    add("--minutes", type=float, metavar="M", help="time limit (default: none)")
    add("--processes", type=int, default=1, metavar="N", help="processes per case, which share its rounds (default: 1)")
    add("--seed", type=int, default=0, metavar="N", help="seed of data and weights (default: 0)")
    add("--list", action="store_true", help="list the cases and run nothing")
    return parser.parse_args(argv)


def run(settings: Settings) -> int:
    """Measure, write the results, and show them.

    Returns:
        Exit status: 0; 1 if a case failed; 130 after Ctrl-C.

    Raises:
        MissingExtraError: If matplotlib is not installed.
        BenchError: If the settings choose no case, or if the folder has results and ``resume`` is off.
        OSError: If the folder cannot be written to.
    """
    require("matplotlib", "python -m benchmarks")
    former = settings.out / "results.json"
    if former.exists() and not settings.resume:
        raise BenchError(f"--out: expected a folder without results, got {str(former)!r}. Add --resume to continue it.")
    settings.out.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=settings.out):  # fails now, not after the first case has been measured
        pass
    known = load_results(former) if former.exists() else None
    results = measure(settings, former=known, save=lambda part: write_json(part, former))
    paths = write_report(results, settings.out)
    for suite in results["suites"]:
        for columns, lines in suite_tables(suite, results["machine"]):
            print_lines("", suite["suite"], "", *markdown_table(columns, lines))
    print_lines("", *map(str, paths))
    if results["interrupted"]:
        return 130
    return int(any(row["status"] == "failed" for suite in results["suites"] for row in suite["rows"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; if ``None``, those of the process.

    Returns:
        0; 1 if a case failed; 2 for invalid arguments; 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv and argv[0] in PROGRAMS:
            return importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])
        options = vars(parse(argv))
        only_list = options.pop("list")
        settings = Settings(**{**options, "only": tuple(options["only"])})
        if not only_list:
            return run(settings)
        for suite in choose_suites(settings):
            print_lines(f"{suite.name}: {suite.about}", *(f"  {case}" for case in settings.chosen(suite)))
        return 0
    except (TurboError, OSError) as error:
        sys.stderr.write(f"benchmarks: error: {error}\n")
        return 2  # as argparse
    except KeyboardInterrupt:
        sys.stderr.write("benchmarks: stopped\n")
        return 130  # as shells


if __name__ == "__main__":
    sys.exit(main())
