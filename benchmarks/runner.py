"""Measuring suites, one after another, into one set of results."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning_turbo
from benchmarks.settings import BenchSettings
from benchmarks.suite import BenchError, Suite, load_suite
from lightning_turbo._optional import installed_version
from lightning_turbo.measure import (
    LATE,
    Interrupt,
    InterruptedRunError,
    Process,
    ProcessError,
    Progress,
    Turns,
    Work,
    describe_machine,
    new_row,
)

__all__ = ["FORMAT", "SuiteRun", "choose_suites", "run_suites"]

FORMAT = 1  # of results.json; raised when a field changes its meaning
PREPARE_TIMEOUT = 300.0
FEWEST_SWEEPS = 3  # however little time there is: a median needs some values
START_SHARE = 2 / 3  # of a group's time; after it no further case is started, so that those which are get some rounds
# Cases that start at the same time. The largest groups are some 20 ResNet-50 at batch 128 on one GPU. Computed, not
# measured: a step in float32 takes 13 GiB (10.3 of them activations), a case that is held 1.2; two starts 50 of 80 GiB.
STARTS = {"cpu": 4, "cuda": 2}


class SuiteRun:
    """One suite while it is measured.

    Args:
        suite: What to measure.
        settings: How.
        folder: Working directory of the cases.
        progress: Where to show how far it is.
        interrupt: Whether to stop.
        save: Called after each sweep, when there is something new to keep.
    """

    def __init__(
        self,
        suite: Suite,
        settings: BenchSettings,
        folder: Path,
        progress: Progress,
        interrupt: Interrupt,
        *,
        save: Callable[[], object] = lambda: None,
    ) -> None:
        self.suite = suite
        self.settings = settings
        self.folder = folder
        self.progress = progress
        self.interrupt = interrupt
        self.save = save
        self.chosen = settings.chosen(suite)
        self.sweeps = math.ceil((settings.rounds or suite.rounds) / settings.processes)  # of each process
        self.steps = suite.quick_steps if settings.quick else suite.steps
        self.prepared: dict[str, Any] = {}
        self.rows = {name: self._row(name) for name in self.chosen}
        self.turns = Turns(
            self.spawn, self.rows, interrupt=interrupt, progress=progress, title=suite.name,
            at_once=STARTS[settings.device], save=save,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Time for the rounds of all groups; a given number of rounds has no limit."""
        if self.settings.quick:
            return self.suite.quick_seconds
        return math.inf if self.settings.rounds else self.suite.seconds

    def _row(self, name: str) -> dict[str, Any]:
        case = self.suite.cases[name]
        return {
            "case": name,
            "config": dict(case.config),
            "environment": dict(case.environment),
            "base": case.base or self.suite.baseline,
            "against": list(case.against),
            "peer": case.peer,
            "ours": case.ours,
            **new_row(),
        }

    def results(self) -> dict[str, Any]:
        """Return what is known so far, in plain values."""
        suite, device = self.suite, self.settings.device
        left_out = [n for n, case in suite.cases.items() if n not in self.rows and device in case.devices]
        aims = [a for a in suite.aims if device in a.devices and {a.case, a.against or a.case} <= set(self.rows)]
        fields = ("case", "against", "at_most", "quantity", "condition", "fact")
        return {
            "suite": suite.name,
            "about": suite.about,
            "unit": suite.unit,
            "quantity": suite.quantity,
            "baseline": suite.baseline,
            "steps": self.steps,
            "warmup": suite.warmup,
            "lead": suite.lead,
            "prepared": self.prepared,
            "left_out": left_out,
            "rows": list(self.rows.values()),
            "aims": [{field: getattr(aim, field) for field in fields} for aim in aims],
        }

    def spawn(self, name: str | None) -> Process:
        """Start the process of a case, or with ``None`` that of the suite's preparation.

        Args:
            name: Of the case.
        """
        threads = self.settings.threads
        environment = dict(self.suite.environment) | ({} if name is None else dict(self.suite.cases[name].environment))
        if threads is not None:
            environment.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        task = {
            "suite": self.suite.name,
            "suites": dict(self.settings.suites),
            "case": name,
            "device": self.settings.device,
            "threads": threads,
            "seed": self.settings.seed,
            "quick": self.settings.quick,
            "warmup": self.suite.warmup,
            "prepared": self.prepared,
        }
        safe = "".join(letter if letter.isalnum() else "_" for letter in name or "prepare")
        return Process(
            ["-m", "benchmarks.worker"],
            task,
            log=self.settings.out.absolute() / "logs" / f"{self.suite.name}.{safe}.log",
            folder=self.folder,
            environment=environment,
        )

    def works(self) -> list[Work]:
        """Return what there is to do: the groups of the first process of each case, then of the second, and so on."""
        starts = max(1, self.settings.processes * len(self.chosen))
        return [
            Work(len(group), len(group) * self.sweeps, self.seconds * len(group) / starts)
            for _ in range(self.settings.processes)
            for group in self.groups()
        ]

    def run(self, later: list[Work]) -> None:
        """Measure the groups in turn; what is measured stays on any interruption.

        Args:
            later: What is to do in the suites after this one.
        """
        for name in self.chosen:
            missing = [each for each in self.suite.cases[name].needs if installed_version(each) is None]
            if missing:
                self.turns.lose(name, "skipped", f"{' and '.join(missing)} not installed")
        try:
            if self._prepare():
                todo = [*self.works(), *later]
                for number in range(self.settings.processes):
                    for group in self.groups():
                        self._measure(group, number, todo)
                        todo.pop(0)
        except InterruptedRunError:
            for name, row in self.rows.items():
                if row["status"] == "interrupted" and not self.interrupt.pressed:
                    self.turns.lose(name, "skipped", LATE)

    def _measure(self, group: list[str], number: int, todo: list[Work]) -> None:
        """One process of each case of a group, in the group's share of the time."""
        begun = time.monotonic()
        share = self.interrupt.left * len(group) / sum(work.starts for work in todo)
        self.progress.expect([Work(**vars(work)) for work in todo])
        self.turns.run(
            group,
            {"lead": self.suite.lead, "steps": self.steps},
            rounds=self.sweeps,
            number=number,
            fewest=math.ceil(FEWEST_SWEEPS / self.settings.processes),
            start_until=begun + START_SHARE * share,
            until=begun + share,
            seconds=todo[0].seconds,
        )
        self.save()

    def _prepare(self) -> bool:
        """Get the numbers that all cases share; without them, no case can run."""
        if self.suite.prepare is None:
            return True
        self.progress.show(f"{self.suite.name}: preparing")
        process = self.spawn(None)
        event: dict[str, Any]
        try:
            event = process.listen(PREPARE_TIMEOUT, self.interrupt.check)
        except ProcessError as error:
            event = {"event": "failed", "reason": str(error)}
        finally:
            process.close(grace=0.0)
        if event["event"] == "done":
            self.prepared = event["numbers"]
            return True
        for name in self.chosen:
            self.turns.lose(name, event["event"], f"preparation: {event['reason']}")
        return False

    def groups(self) -> list[list[str]]:
        """Return the cases that are compared with one another, by base, further pairs and aims; each group takes turns.

        What is not compared need not be in memory at the same time.
        """
        suite = self.suite
        pairs = [(name, suite.cases[name].base or str(suite.baseline)) for name in self.chosen]
        pairs += [(name, other) for name in self.chosen for other in suite.cases[name].against]
        pairs += [(aim.case, aim.against) for aim in suite.aims if aim.against]
        group_of = {name: {name} for name in suite.cases}
        for one, other in pairs:
            merged = group_of[one] | group_of[other]
            group_of.update(dict.fromkeys(merged, merged))
        groups = dict.fromkeys(frozenset(group_of[name]) for name in self.chosen)
        return [[name for name in self.chosen if name in group] for group in groups]


def choose_suites(settings: BenchSettings) -> list[Suite]:
    """Return the suites that have a case to run, in order.

    Args:
        settings: What to choose.

    Raises:
        BenchError: If ``only`` matches no case of any suite.
    """
    suites = [suite for suite in (load_suite(n, settings.suites) for n in settings.names()) if settings.chosen(suite)]
    if not suites:
        raise BenchError(
            f"only={settings.only!r} matches no case; `python -m benchmarks --list` shows their names. "
            "A pattern is as in a shell: 'O1*'."
        )
    return suites


def _new_results(settings: BenchSettings) -> dict[str, Any]:
    names = ("suite", "quick", "device", "threads", "rounds", "minutes", "processes", "seed")
    return {
        "format": FORMAT,
        "lightning_turbo": lightning_turbo.__version__,
        "command": ["python", "-m", "benchmarks", *sys.argv[1:]],
        "settings": {"only": list(settings.only), **{name: getattr(settings, name) for name in names}},
        "machine": describe_machine(settings.device),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "finished": None,
        "interrupted": False,
        "not_run": [],
        "suites": [],
    }


def run_suites(
    settings: BenchSettings, *, save: Callable[[dict[str, Any]], object] = lambda results: None
) -> dict[str, Any]:
    """Measure the suites that the settings name.

    A case that fails is reported in its row. Ctrl-C or SIGTERM ends the measuring and keeps what there is; a second one
    stops at once.

    Args:
        settings: What to measure and how.
        save: Called with the results so far after every sweep of rounds, and last of all at the end.

    Returns:
        The results in plain values, as ``results.json`` holds them.

    Raises:
        BenchError: If ``only`` matches no case of any suite.
    """
    suites = choose_suites(settings)
    results = _new_results(settings)
    interrupt = Interrupt(settings.seconds)
    begun: list[SuiteRun] = []

    def keep() -> None:
        results.update(suites=[run.results() for run in begun], interrupted=interrupt.pressed)
        save(results)

    with interrupt.caught(), Progress(interrupt.deadline) as progress, tempfile.TemporaryDirectory() as folder:
        runs = [SuiteRun(each, settings, Path(folder), progress, interrupt, save=keep) for each in suites]
        for position, run in enumerate(runs):
            if interrupt.left < 0:
                results["not_run"].append(run.suite.name)
                progress.say(f"{run.suite.name}: not run, because no time is left for it")
                continue
            begun.append(run)
            progress.say(f"{run.suite.name}: {len(run.chosen)} cases")
            try:
                run.run([work for other in runs[position + 1 :] for work in other.works()])
            except KeyboardInterrupt:
                interrupt.pressed = True
            keep()
            if interrupt.pressed:
                break
    results["finished"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    keep()
    return results
