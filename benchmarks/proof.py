"""``python -m benchmarks proof``: of ``lightning-turbo tune``, on scripts whose answer is known, on a quiet machine.

python -m benchmarks proof nothing --runs 10 --minutes 3
python -m benchmarks proof exhaustive --minutes 3 --processes 4

``nothing`` tunes a script that nothing makes faster, and fails if a run recommends something. ``exhaustive`` tunes the
six scripts over a few candidates each, then measures every combination of these, and fails if one is more than 5 %
faster than the chosen one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import print_table
from lightning_turbo.measure import Interrupt, Progress, print_lines
from lightning_turbo.tune.candidates import Candidate, list_candidates, select, why_not
from lightning_turbo.tune.evidence import DEFAULT, Case, Comparison
from lightning_turbo.tune.runner import ScriptRunner, TuneSettings
from lightning_turbo.tune.search import Search

EXAMPLES = Path(__file__).parents[1] / "examples" / "tune"
# What could help each script, and what could seem to.
FEW = {
    "disk": ("prefetch-threads", "workers-2", "fused"),
    "jpegs": ("prefetch-threads", "workers-2", "fused"),
    "toy": ("lean", "fused", "O1"),
    "volumes": ("bf16-mixed", "channels-last", "fused"),
    "biased": ("no-bias", "lean", "fused"),
    "nothing": ("bf16-mixed", "release-gradients", "fused"),
}


def tune(example: str, only: tuple[str, ...], minutes: float, folder: Path) -> tuple[Search, ScriptRunner]:
    """Tune one of the scripts, and return the search and its runner, whose time is up no more."""
    settings = TuneSettings(program=str(EXAMPLES / f"{example}.py"), minutes=minutes, out=folder, only=only)
    candidates = select(list_candidates(2), only)
    interrupt = Interrupt(60 * minutes)
    with interrupt.caught(), Progress(interrupt.deadline) as progress:
        runner = ScriptRunner(settings, {each.name: each for each in candidates}, interrupt, progress)
        search = Search(candidates, runner)
        search.run()
    interrupt.deadline = math.inf
    if interrupt.pressed:
        raise KeyboardInterrupt
    return search, runner


def combinations(candidates: list[Candidate]) -> list[Case]:
    """Return every combination of some candidates, of which each slot has at most one."""
    sets = itertools.chain.from_iterable(itertools.combinations(candidates, n) for n in range(1, len(candidates) + 1))
    slots = [(each, [c.kind for c in each]) for each in sets]
    return [Case(tuple(c.name for c in each)) for each, used in slots if len(set(used)) == len(used)]


def search_exhaustively(example: str, minutes: float, processes: int, folder: Path) -> tuple[list[str], bool]:
    """Return the line of a script in the table, and whether the search is within 5 % of the best combination."""
    search, runner = tune(example, FEW[example], minutes, folder)
    assert search.facts is not None
    facts = search.facts
    alive = [each.candidate for each in search.trials.values() if not why_not(each.candidate, facts)]
    against = {case: Comparison() for case in combinations(alive)}
    for _ in range(processes):
        for case, comparison in against.items():
            rows = runner.measure([DEFAULT, case])
            comparison.add(rows[case], rows[DEFAULT])
    best = min(against, key=lambda case: against[case].ratio, default=DEFAULT)
    chosen = 1.0 if search.chosen == DEFAULT else against[search.chosen].ratio
    least = min(1.0, against[best].ratio if against else 1.0)
    good = chosen <= 1.05 * least
    return [example, str(search.chosen), f"{chosen:.3f}", str(best), f"{least:.3f}", "" if good else "missed"], good


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, measure, and return 1 where the proof fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks proof", description="Proof of tune.")
    parser.add_argument("what", choices=("nothing", "exhaustive"))
    parser.add_argument("--minutes", type=float, default=3.0, help="of each search (default: 3)")
    parser.add_argument("--runs", type=int, default=10, help="of nothing (default: 10)")
    parser.add_argument("--processes", type=int, default=4, help="of each combination (default: 4)")
    parser.add_argument("--only", nargs="+", choices=sorted(FEW), default=sorted(FEW), help="scripts of exhaustive")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if asked.what == "nothing":
            found = [tune("nothing", (), asked.minutes, Path(folder))[0] for _ in range(asked.runs)]
            lines = [[str(n), str(each.chosen), each.verdict] for n, each in enumerate(found, 1)]
            print_table("nothing.py", ["run", "chosen", "note"], lines)
            return int(any(each.chosen != DEFAULT for each in found))
        rows = []
        for name in asked.only:
            rows.append(search_exhaustively(name, asked.minutes, asked.processes, Path(folder)))
            print_lines("  ".join(rows[-1][0]))  # what is known is not lost
    columns = ["script", "chosen", "time / default", "best", "its time / default", "note"]
    print_table("Chosen, and the best of all combinations", columns, [line for line, _ in rows])
    return 0 if all(good for _, good in rows) else 1
