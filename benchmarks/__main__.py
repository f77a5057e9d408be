"""``python -m benchmarks``: parse the command line; the work is done by ``command``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command
from benchmarks.settings import BenchSettings
from benchmarks.suite import SUITES, BenchError
from lightning_turbo.errors import TurboError

REFUSED = 2  # as argparse does
INTERRUPTED = 130  # as shells do
DESCRIPTION = """Measure one suite or all. Every case runs in a process of its own, and all take turns. Writes
results.json, results.md and a picture for each suite. Ctrl-C and SIGTERM keep what was measured. With `compare A B`,
show what got slower between two results; the exit status is then 1 if something did."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Args:
        argv: The arguments; ``None`` takes those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        usage="python -m benchmarks [SUITE] [options]\n       python -m benchmarks compare A B [--threshold X]",
    )
    add = parser.add_argument
    add("suite", nargs="?", default="all", metavar="SUITE", help=f"{', '.join(SUITES)}, or all (default)")
    add("results", nargs="*", type=Path, metavar="A B", help="for compare: two results or their folders")
    add("--quick", action="store_true", help="the main cases in short rounds: under two minutes")
    add("--only", nargs="+", action="extend", default=[], metavar="PATTERN", help="cases to run, as 'O1*' 'O2*'")
    add(
        "--out", type=Path, default=Path("runs/benchmarks"), metavar="FOLDER",
        help="where to write (default: runs/benchmarks)",
    )  # fmt: skip
    add("--device", default="auto", help="auto (default), cpu or cuda")
    add("--threads", type=int, metavar="N", help="threads of torch in each case (default: torch's own)")
    add("--rounds", type=int, metavar="N", help="rounds a case, however long (default: the suite's)")
    add("--minutes", type=float, metavar="M", help="when the measuring ends (default: when all is measured)")
    add(
        "--processes", type=int, default=1, metavar="N",
        help="fresh processes a case, to divide its rounds among (default: 1); for differences of some per cent",
    )  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of data and weights (default: 0)")
    add("--list", action="store_true", help="show the cases and run nothing")
    add("--threshold", type=float, default=0.05, metavar="X", help="for compare: smallest change that counts (0.05)")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line asks for.

    Args:
        arguments: As ``parse`` returns them.

    Returns:
        The exit status.

    Raises:
        BenchError: If they do not fit together, or hold an impossible value.
    """
    if arguments.suite == "compare":
        if len(arguments.results) != 2:
            raise BenchError(f"expected two results, compare A B; got {len(arguments.results)}")
        return command.compare_files(*arguments.results, threshold=arguments.threshold)
    if arguments.results:
        raise BenchError(f"expected one suite, got {str(arguments.results[0])!r} besides; use 'all' for several")
    names = ("suite", "quick", "out", "device", "threads", "rounds", "minutes", "processes", "seed")
    settings = BenchSettings(only=tuple(arguments.only), **{name: getattr(arguments, name) for name in names})
    return command.list_cases(settings) if arguments.list else command.run_bench(settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; ``None`` takes those of the process.

    Returns:
        0; 1 if a case failed or something got slower; 2 for input that is refused; 130 after Ctrl-C.
    """
    arguments = parse(argv)
    try:
        return run(arguments)
    except (TurboError, OSError) as error:
        sys.stderr.write(f"benchmarks: error: {error}\n")
        return REFUSED
    except KeyboardInterrupt:
        sys.stderr.write("benchmarks: stopped\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
