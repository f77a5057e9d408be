"""The runner: measures cases in their own processes, in interleaved rounds, until all are done or the time is up."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import lightning_turbo
from benchmarks.forks import Fork
from benchmarks.suite import APART, SUITES, BenchError, CaseTimer, Suite, load_suite
from lightning_turbo._optional import installed_version
from lightning_turbo.measure import (
    LATE,
    InterleavedRounds,
    Interrupt,
    InterruptedRunError,
    Process,
    Progress,
    describe_machine,
    new_row,
)

__all__ = ["FORMAT", "Settings", "choose_suites", "differences", "measure"]

FORMAT = 2  # of results.json; raised when a field changes its meaning
FEWEST_SWEEPS = 3  # even if the time is short, because a median needs some values
START_SHARE = 2 / 3  # of a group's time; then no further process starts, so that the started ones get some rounds
# Processes that start at the same time. The largest group has about 20 ResNet-50 at batch size 128 on one GPU.
# Computed, not measured: a step in float32 needs 13 GiB (10.3 GiB of activations) and a held process 1.2 GiB, so that
# two starts need 50 of 80 GiB.
STARTS = {"cpu": 4, "cuda": 2}
# With --quick: time limits of the whole measurement, without the pictures, and of the rounds of one suite.
QUICK_SECONDS, QUICK_ROUNDS_SECONDS = 105.0, 5.0
# What must be equal for the times of two runs to be comparable, or to go into one table.
SAME = ("processor", "cores", "system", "environment", "gpu")
SAME_SETTINGS = ("device", "threads", "quick")


@dataclass(kw_only=True)
class Settings:
    """What to measure and how: the options of ``python -m benchmarks``.

    Raises:
        BenchError: If a value is invalid, or if the device is CUDA and torch sees no GPU.
    """

    suite: str = "all"  # or a key of SUITES
    quick: bool = False  # only the main cases of each suite, in short rounds, with small data
    resume: bool = False  # continue the results in `out`; finished cases are kept
    out: Path = Path("runs/benchmarks")
    only: tuple[str, ...] = ()  # shell patterns of case names, not case-sensitive; empty for all cases
    device: str = "auto"
    threads: int | None = None  # torch threads per case; None for torch's choice
    rounds: int | None = None  # rounds per case, however long they take; None for the suite's number and time limit
    minutes: float | None = None  # time limit; each case gets its share of the time that is left
    processes: int = 1  # per case, one after another: two processes with equal code differ by several per cent
    seed: int = 0

    def __post_init__(self) -> None:
        devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
        if self.suite not in (*SUITES, "all"):
            raise BenchError(f"suite={self.suite!r}: expected one of {', '.join(SUITES)}, or 'all'")
        if self.device not in ("auto", *devices):
            raise BenchError(f"device={self.device!r}: expected 'auto', 'cpu', or 'cuda' where torch sees a GPU")
        self.device = devices[0] if self.device == "auto" else self.device
        for name in ("threads", "rounds", "processes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BenchError(f"{name}={value!r}: expected an integer of 1 or more")
        if not 0 <= self.seed < 2**32:  # the seeds that NumPy accepts
            raise BenchError(f"seed={self.seed!r}: expected an integer from 0 to 2**32 - 1")
        if self.minutes is not None and not self.minutes > 0:
            raise BenchError(f"minutes={self.minutes!r}: expected a number above 0")

    @property
    def seconds(self) -> float:
        """The time limit of the whole measurement, infinite if there is none."""
        if self.minutes is not None:
            return 60 * self.minutes
        return QUICK_SECONDS if self.quick else math.inf

    def chosen(self, suite: Suite) -> list[str]:
        """Return the names of the cases of a suite to run: the selected ones and their baselines."""
        if not self.only and not self.quick and suite.telling and (self.minutes or math.inf) <= suite.telling_minutes:
            return [name for name in suite.known if name in suite.telling]
        if not self.only:
            return [name for name in suite.known if not self.quick or name in suite.quick]
        named = {name for name in suite.known for only in self.only if fnmatchcase(name.lower(), only.lower())}
        named |= {suite.base(name) for name in named}
        return [name for name in suite.known if name in named]


def choose_suites(settings: Settings) -> list[Suite]:
    """Return the suites that have at least one case to run, in order.

    Raises:
        BenchError: If ``only`` matches no case of any suite.
    """
    names = [name for name in SUITES if name not in APART] if settings.suite == "all" else [settings.suite]
    suites = [suite for suite in map(load_suite, names) if settings.chosen(suite)]
    if not suites:
        raise BenchError(f"only={settings.only!r} matches no case; `python -m benchmarks --list` shows their names")
    return suites


class SuiteRun:
    """One suite while it is measured.

    Args:
        suite: The suite to measure.
        settings: How to measure it.
        former: The suite's entry in the results to continue, or ``None``.
        folder: Working directory of the processes.
        progress: Displays the progress.
        interrupt: Says whether to stop.
        save: Called after each sweep of rounds.
    """

    def __init__(
        self,
        suite: Suite,
        settings: Settings,
        former: Mapping[str, Any] | None,
        folder: Path,
        progress: Progress,
        interrupt: Interrupt,
        save: Callable[[], object],
    ) -> None:
        self.suite = suite
        self.settings = settings
        self.folder = folder
        self.progress = progress
        self.interrupt = interrupt
        self.chosen = settings.chosen(suite)
        self.prepared: dict[str, Any] = {} if former is None else former["prepared"]
        self.rows = self._rows({} if former is None else {row["case"]: row for row in former["rows"]})
        self.interleaved = InterleavedRounds(
            self.spawn, self.rows, interrupt=interrupt, progress=progress, title=suite.name,
            at_once=STARTS[settings.device], save=save,
        )  # fmt: skip

    def _rows(self, former: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the rows of the cases that are selected now or were measured before; unfinished ones start again."""
        rows = {}
        for case in self.suite.cases:
            row = former.get(case.name)
            if row is not None and (row["status"] == "ok" or (row["status"] == "skipped" and row["reason"] != LATE)):
                rows[case.name] = row
            elif row is not None or case.name in self.chosen:
                rows[case.name] = {
                    "case": case.name,
                    "config": dict(case.config),
                    "base": self.suite.base(case.name),
                    "against": list(case.against),
                    "kind": case.kind,
                    **new_row(),
                }
        return rows

    def results(self) -> dict[str, Any]:
        """Return the results so far, as plain values."""
        suite = self.suite
        aims = [aim for aim in suite.aims if {aim.case, aim.against or aim.case} <= set(self.rows)]
        return {
            "suite": suite.name,
            **{name: getattr(suite, name) for name in ("about", "unit", "quantity", "warmup", "lead", "round_seconds")},
            "steps": self.steps,
            "prepared": self.prepared,
            "left_out": [name for name in suite.known if name not in self.rows],
            "rows": list(self.rows.values()),
            "aims": [vars(aim) for aim in aims],
        }

    @property
    def steps(self) -> int:
        """Number of steps per round."""
        return max(1, self.suite.steps // 3) if self.settings.quick else self.suite.steps

    @property
    def sweeps(self) -> int:
        """Number of rounds per process."""
        return math.ceil((self.settings.rounds or self.suite.rounds) / self.settings.processes)

    def spawn(self, name: str) -> Process:
        """Start the process of a case."""
        settings, suite = self.settings, self.suite
        environment = dict(suite.environment)
        if settings.threads is not None:
            environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(settings.threads))
        task = {
            "suite": suite.name, "place": SUITES[suite.name], "case": name, "warmup": suite.warmup,
            **{each: getattr(settings, each) for each in ("device", "threads", "seed", "quick")},
        }  # fmt: skip
        safe = "".join(letter if letter.isalnum() else "_" for letter in name)
        log = settings.out.absolute() / "logs" / f"{suite.name}.{safe}.log"
        popen = Fork if suite.forked else subprocess.Popen
        arguments = ["-m", "benchmarks.worker"]
        return Process(arguments, task, log=log, folder=self.folder, environment=environment, popen=popen)

    def left(self) -> list[list[str]]:
        """Return the groups left to measure: cases that still need a process, with their baselines."""
        lacking = {name for name in self.chosen if self._lacks(self.rows[name])}
        wanted = lacking | {other for name, other in self.suite.pairs() if name in lacking and other in self.chosen}
        groups = [[name for name in group if name in wanted] for group in self.suite.groups()]
        return [group for group in groups if lacking & set(group)]

    def _lacks(self, row: Mapping[str, Any]) -> bool:
        processes = {part["process"] for part in row["rounds"]}
        return row["status"] in ("interrupted", "ok") and len(processes) < self.settings.processes

    def _first(self) -> int:
        """Return the number of the next process.

        Rounds are paired by their sweep, and process ``number`` starts with sweep ``number * sweeps``. Thus the sweeps
        of a continued run come after those of the previous one.
        """
        parts = [part for row in self.rows.values() for part in row["rounds"]]
        after = max((part["process"] + 1 for part in parts), default=0)
        return max([after, *(math.ceil((part["sweep"] + 1) / self.sweeps) for part in parts)])

    def _skip(self) -> None:
        """Mark the cases whose packages are not installed as skipped."""
        for name in self.chosen:
            missing = [each for each in self.suite.known[name].needs if installed_version(each) is None]
            if missing and self.rows[name]["status"] != "skipped":
                self.interleaved.lose(name, "skipped", f"{' and '.join(missing)} not installed")

    def run(self, later: int) -> None:
        """Measure one group after another. An interruption keeps the results so far.

        Args:
            later: Number of processes that the suites after this one will start.
        """
        settings = self.settings
        self._skip()
        if self.suite.prepare is not None and self.left() and not self.prepared:
            timer = CaseTimer(None, device=settings.device, seed=settings.seed, quick=settings.quick)
            self.prepared = dict(self.suite.prepare(timer))
        first = self._first()
        try:
            for number in range(settings.processes):
                groups = self.left()
                again = (settings.processes - 1 - number) * sum(map(len, groups))
                for position, group in enumerate(groups):
                    self._measure(group, first + number, sum(map(len, groups[position:])) + again + later)
        except InterruptedRunError:
            for name, row in self.rows.items():
                if row["status"] == "interrupted" and not self.interrupt.pressed:
                    self.interleaved.lose(name, "skipped", LATE)

    def _measure(self, group: list[str], number: int, starts: int) -> None:
        """Run one process per case of a group, within the group's share of the remaining time."""
        settings, size, started = self.settings, len(group), time.monotonic()
        share = self.interrupt.left * size / starts
        limit = QUICK_ROUNDS_SECONDS if settings.quick else math.inf if settings.rounds else self.suite.seconds
        seconds = limit * size / (len(self.chosen) * settings.processes)
        self.interleaved.run(
            group,
            [{"lead": self.suite.lead, "steps": self.steps, "seconds": self.suite.round_seconds}] * self.sweeps,
            number=number,
            fewest=math.ceil(FEWEST_SWEEPS / settings.processes),
            start_until=started + START_SHARE * share,
            until=started + share,
            seconds=seconds,
        )


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return how the conditions of two results differ; if the list is empty, their times are comparable."""
    pairs = [(key, before["machine"].get(key) or None, after["machine"].get(key) or None) for key in SAME]
    pairs += [(key, before["settings"].get(key), after["settings"].get(key)) for key in SAME_SETTINGS]
    return [f"{key}: {old!r} -> {new!r}" for key, old, new in pairs if old != new]


def _new_results(settings: Settings) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "lightning_turbo": lightning_turbo.__version__,
        "command": ["python", "-m", "benchmarks", *sys.argv[1:]],
        "settings": {**vars(settings), "out": str(settings.out), "only": list(settings.only)},
        "machine": describe_machine(settings.device),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "finished": None,
        "interrupted": False,
        "not_run": [],
        "suites": [],
    }


def measure(
    settings: Settings, *, former: Mapping[str, Any] | None = None, save: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Measure the suites that the settings name.

    A case that fails is reported in its row. Ctrl-C or SIGTERM ends the measurement and keeps the results so far; a
    second one stops at once.

    Args:
        settings: What to measure and how.
        former: Results to continue, or ``None``.
        save: Called with the results so far after each sweep of rounds, and at the end.

    Returns:
        The results as plain values, the content of ``results.json``.

    Raises:
        BenchError: If ``only`` matches no case of any suite, or if ``former`` comes from another machine or other
            settings.
    """
    suites, results = choose_suites(settings), _new_results(settings)
    known: dict[str, Any] = {}
    if former is not None:
        if differing := differences(former, results):
            raise BenchError(f"expected the machine and settings of the results in {settings.out}, got {differing}")
        known = {entry["suite"]: entry for entry in former["suites"]}
        results["started"] = former["started"]
    interrupt = Interrupt(settings.seconds)

    def keep() -> None:
        current = {**known, **{run.suite.name: run.results() for run in started_runs}}
        results.update(suites=list(current.values()), interrupted=interrupt.pressed)
        save(results)

    started_runs: list[SuiteRun] = []
    with interrupt.caught(), Progress(interrupt.deadline) as progress, tempfile.TemporaryDirectory() as folder:
        runs = [SuiteRun(s, settings, known.get(s.name), Path(folder), progress, interrupt, keep) for s in suites]
        for position, run in enumerate(runs):
            if interrupt.left < 0:
                results["not_run"].append(run.suite.name)
                progress.say(f"{run.suite.name}: not run, because the time is up")
                continue
            started_runs.append(run)
            progress.say(f"{run.suite.name}: {len(run.chosen)} cases")
            try:
                later = sum(len(group) for other in runs[position + 1 :] for group in other.left())
                run.run(settings.processes * later)
            except KeyboardInterrupt:
                interrupt.pressed = True
            keep()
            if interrupt.pressed:
                break
    results["finished"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    keep()
    return results
