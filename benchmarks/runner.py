"""The one runner: cases in processes of their own that take turns, until all is measured or the time is up."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import lightning_turbo
from benchmarks.suite import APART, SUITES, BenchError, Suite, load_suite
from lightning_turbo._optional import installed_version
from lightning_turbo.measure import (
    LATE,
    Interrupt,
    InterruptedRunError,
    Process,
    Progress,
    Turns,
    describe_machine,
    new_row,
)

__all__ = ["Settings", "choose_suites", "measure"]

FEWEST_SWEEPS = 3  # however little time there is: a median needs some values
START_SHARE = 2 / 3  # of a group's time; after it no further case is started, so that those which are get some rounds
# Cases that start at the same time. The largest groups are some 20 ResNet-50 at batch 128 on one GPU. Computed, not
# measured: a step in float32 takes 13 GiB (10.3 of them activations), a case that is held 1.2; two starts 50 of 80 GiB.
STARTS = {"cpu": 4, "cuda": 2}
# With --quick: of the measuring in all and of the rounds of a suite; the pictures come after it.
QUICK_SECONDS, QUICK_ROUNDS_SECONDS = 105.0, 5.0


@dataclass(kw_only=True)
class Settings:
    """What to measure and how: the options of ``python -m benchmarks``.

    Raises:
        BenchError: If a value is impossible, or CUDA is asked for where there is none.
    """

    suite: str = "all"  # or a key of SUITES
    quick: bool = False  # short rounds of the suites' main cases, and small data
    out: Path = Path("runs/benchmarks")
    only: tuple[str, ...] = ()  # patterns of cases, as in a shell, upper and lower case alike; empty for all
    device: str = "auto"
    threads: int | None = None  # of torch in each case; None leaves torch's choice
    rounds: int | None = None  # of a case, however long they take; None leaves the suite's own number and time
    minutes: float | None = None  # when the measuring ends; each case gets its share of what is left
    processes: int = 1  # of each case, one after the other: two that run the same code differ by several per cent
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
                raise BenchError(f"{name}={value!r}: expected a whole number from 1 on")
        if not 0 <= self.seed < 2**32:  # as numpy takes them
            raise BenchError(f"seed={self.seed!r}: expected a whole number from 0 to 2**32 - 1")
        if self.minutes is not None and not self.minutes > 0:
            raise BenchError(f"minutes={self.minutes!r}: expected a number above 0")

    @property
    def seconds(self) -> float:
        """How long all the measuring may take; infinite without a limit."""
        if self.minutes is not None:
            return 60 * self.minutes
        return QUICK_SECONDS if self.quick else math.inf

    def chosen(self, suite: Suite) -> list[str]:
        """Return the names of the cases of a suite to run: those asked for, and what these are divided by."""
        if not self.only:
            return [name for name in suite.known if not self.quick or name in suite.quick]
        named = {name for name in suite.known for only in self.only if fnmatchcase(name.lower(), only.lower())}
        named |= {suite.base(name) for name in named}
        return [name for name in suite.known if name in named]


def choose_suites(settings: Settings) -> list[Suite]:
    """Return the suites that have a case to run, in order.

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
        suite: What to measure.
        settings: How.
        folder: Working directory of the cases.
        progress: Where to show how far it is.
        interrupt: Whether to stop.
        save: Called after each sweep of rounds.
    """

    def __init__(
        self,
        suite: Suite,
        settings: Settings,
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
        self.rows = {
            name: {
                "case": name,
                "config": dict(suite.known[name].config),
                "base": suite.base(name),
                "against": list(suite.known[name].against),
                "kind": suite.known[name].kind,
                **new_row(),
            }
            for name in self.chosen
        }
        self.turns = Turns(
            self.spawn, self.rows, interrupt=interrupt, progress=progress, title=suite.name,
            at_once=STARTS[settings.device], save=save,
        )  # fmt: skip

    def results(self) -> dict[str, Any]:
        """Return what is known so far, in plain values."""
        suite = self.suite
        aims = [aim for aim in suite.aims if {aim.case, aim.against or aim.case} <= set(self.rows)]
        return {
            "suite": suite.name,
            **{name: getattr(suite, name) for name in ("about", "unit", "quantity", "warmup", "lead")},
            "steps": self.steps,
            "left_out": [name for name in suite.known if name not in self.rows],
            "rows": list(self.rows.values()),
            "aims": [vars(aim) for aim in aims],
        }

    @property
    def steps(self) -> int:
        """Steps of a round."""
        return max(1, self.suite.steps // 3) if self.settings.quick else self.suite.steps

    @property
    def sweeps(self) -> int:
        """Rounds of each process."""
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
        return Process(["-m", "benchmarks.worker"], task, log=log, folder=self.folder, environment=environment)

    def left(self) -> list[list[str]]:
        """Return the groups that are measured together, without the cases that failed or were skipped."""
        able = {name for name in self.chosen if self.rows[name]["status"] in ("interrupted", "ok")}
        groups = [[name for name in group if name in able] for group in self.suite.groups()]
        return [group for group in groups if group]

    def _skip(self) -> None:
        """Leave out the cases whose packages are not installed."""
        for name in self.chosen:
            missing = [each for each in self.suite.known[name].needs if installed_version(each) is None]
            if missing:
                self.turns.lose(name, "skipped", f"{' and '.join(missing)} not installed")

    def run(self, later: int) -> None:
        """Measure the groups in turn; what is measured stays on any interruption.

        Args:
            later: Processes to start in the suites after this one.
        """
        settings = self.settings
        self._skip()
        try:
            for number in range(settings.processes):
                groups = self.left()
                again = (settings.processes - 1 - number) * sum(map(len, groups))
                for position, group in enumerate(groups):
                    self._measure(group, number, sum(map(len, groups[position:])) + again + later)
        except InterruptedRunError:
            for name, row in self.rows.items():
                if row["status"] == "interrupted" and not self.interrupt.pressed:
                    self.turns.lose(name, "skipped", LATE)

    def _measure(self, group: list[str], number: int, starts: int) -> None:
        """One process of each case of a group, in the group's share of the time that is left for so many starts."""
        settings, size, begun = self.settings, len(group), time.monotonic()
        share = self.interrupt.left * size / starts
        limit = QUICK_ROUNDS_SECONDS if settings.quick else math.inf if settings.rounds else self.suite.seconds
        seconds = limit * size / (len(self.chosen) * settings.processes)
        self.turns.run(
            group,
            {"lead": self.suite.lead, "steps": self.steps},
            rounds=self.sweeps,
            number=number,
            fewest=math.ceil(FEWEST_SWEEPS / settings.processes),
            start_until=begun + START_SHARE * share,
            until=begun + share,
            seconds=seconds,
        )


def _new_results(settings: Settings) -> dict[str, Any]:
    return {
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


def measure(settings: Settings, *, save: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Measure the suites that the settings name.

    A case that fails is reported in its row. Ctrl-C or SIGTERM ends the measuring and keeps what there is; a second one
    stops at once.

    Args:
        settings: What to measure and how.
        save: Called with the results so far after every sweep of rounds, and at the end.

    Returns:
        The results in plain values, as ``results.json`` holds them.

    Raises:
        BenchError: If ``only`` matches no case of any suite.
    """
    suites, results = choose_suites(settings), _new_results(settings)
    interrupt = Interrupt(settings.seconds)

    def keep() -> None:
        results.update(suites=[run.results() for run in begun], interrupted=interrupt.pressed)
        save(results)

    begun: list[SuiteRun] = []
    with interrupt.caught(), Progress(interrupt.deadline) as progress, tempfile.TemporaryDirectory() as folder:
        runs = [SuiteRun(s, settings, Path(folder), progress, interrupt, keep) for s in suites]
        for position, run in enumerate(runs):
            if interrupt.left < 0:
                results["not_run"].append(run.suite.name)
                progress.say(f"{run.suite.name}: not run, because no time is left for it")
                continue
            begun.append(run)
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
