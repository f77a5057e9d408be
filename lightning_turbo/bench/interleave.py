"""The measuring of one suite: every case in a process of its own, one round of each in turn."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_turbo._optional import installed_version
from lightning_turbo.bench.case import Suite
from lightning_turbo.bench.interrupt import Interrupt, InterruptedRunError
from lightning_turbo.bench.process import CaseFailedError, CaseProcess
from lightning_turbo.bench.progress import Progress, Work
from lightning_turbo.bench.settings import BenchSettings

__all__ = ["SuiteRun", "work_of"]

# Seconds after which a case counts as hung.
START_TIMEOUT = 300.0
ROUND_TIMEOUT = 180.0
END_TIMEOUT = 120.0
END_TIMEOUT_INTERRUPTED = 20.0

UNENDED = "interrupted"  # the status of a case until it ends otherwise
FEWEST_SWEEPS = 3  # however little time there is: a median needs some values
START_SHARE = 2 / 3  # of a group's time; after it no further case is started, so that those which are get some rounds
LATE = "no time was left for it"
# Cases that start at the same time. The largest groups are some 20 ResNet-50 at batch 128 on one GPU. Reckoned, not
# measured: a step in float32 takes 13 GiB (10.3 of them activations), a case that is held 1.2; two starts 50 of 80 GiB.
STARTS = {"cpu": 4, "cuda": 2}


def work_of(suite: Suite, settings: BenchSettings) -> Work:
    """Return all that is to do in a suite.

    Args:
        suite: What to measure.
        settings: How.
    """
    cases = settings.processes * len(settings.chosen(suite))
    sweeps = math.ceil((settings.rounds or suite.rounds) / settings.processes)  # of each process
    seconds = suite.quick_seconds if settings.quick else math.inf if settings.rounds else suite.seconds
    return Work(cases, cases * sweeps, seconds)


class SuiteRun:
    """One suite while it is measured.

    Args:
        suite: What to measure.
        settings: How.
        folder: Working directory of the cases.
        progress: Where to show how far it is.
        interrupt: Whether to stop.
        later: What is to do in the suites after this one.
        save: Called after each sweep and each group, when there is something new to keep.
    """

    def __init__(
        self,
        suite: Suite,
        settings: BenchSettings,
        folder: Path,
        progress: Progress,
        interrupt: Interrupt,
        *,
        later: list[Work],
        save: Callable[[], object],
    ) -> None:
        self.suite = suite
        self.settings = settings
        self.folder = folder
        self.progress = progress
        self.interrupt = interrupt
        self.save = save
        self.alive: dict[str, CaseProcess] = {}
        self.measured: set[str] = set()  # those of them that have done a round
        self.work = work_of(suite, settings)
        self.sweeps = self.work.rounds // self.work.starts  # of each process
        self.steps = suite.quick_steps if settings.quick else suite.steps
        self.chosen = settings.chosen(suite)
        self.prepared: dict[str, Any] = {}
        self.later = later  # first the groups of this suite that are not begun, one process after the other
        self.rows: dict[str, dict[str, Any]] = {name: self._row(name) for name in self.chosen}

    def _row(self, name: str) -> dict[str, Any]:
        case = self.suite.cases[name]
        return {
            "case": name,
            "status": UNENDED,
            "reason": "",
            "config": dict(case.config),
            "environment": dict(case.environment),
            "base": case.base or self.suite.baseline,
            "against": list(case.against),
            "peer": case.peer,
            "ours": case.ours,
            "rounds": [],
            "numbers": {},
            "start_bytes": None,
            "peak_bytes": None,
            "threads": None,
        }

    def results(self) -> dict[str, Any]:
        """What is known so far, in plain values."""
        suite = self.suite
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
            "left_out": [
                name
                for name, case in suite.cases.items()
                if name not in self.rows and self.settings.device in case.devices
            ],
            "rows": list(self.rows.values()),
            "aims": [
                {
                    "case": aim.case,
                    "against": aim.against,
                    "at_most": aim.at_most,
                    "quantity": aim.quantity,
                    "condition": aim.condition,
                    "fact": aim.fact,
                }
                for aim in suite.aims
                if self.settings.device in aim.devices and {aim.case, aim.against or aim.case} <= set(self.rows)
            ],
        }

    def run(self) -> None:
        """Start the cases, measure them in turn, and end them; what is measured stays on any interruption."""
        try:
            if self._prepare():
                turns = [(number, group) for number in range(self.settings.processes) for group in self._groups()]
                self.later = [self._part(group) for _, group in turns] + self.later
                for number, group in turns:
                    ahead = sum(work.starts for work in self.later)
                    begun, share = time.monotonic(), self.interrupt.left * len(group) / ahead
                    self.progress.expect(self.later)
                    self.later.pop(0)
                    able = [name for name in group if self.rows[name]["status"] in (UNENDED, "ok")]
                    self._start(able, begun + START_SHARE * share)
                    self._measure(group, number, begun + share)
                    self._finish(END_TIMEOUT)
                    self.save()
        except InterruptedRunError:
            self._finish(END_TIMEOUT_INTERRUPTED)
            for name in self.chosen:
                if self.rows[name]["status"] == UNENDED and not self.interrupt.pressed:
                    self._lose(name, "skipped", LATE)
        finally:
            for process in self.alive.values():
                process.close(grace=0.0)
            self.alive.clear()

    def _lose(self, name: str, status: str, reason: str) -> None:
        """Take a case out of the run and say why in its row."""
        self.rows[name].update(status=status, reason=reason)
        if name in self.alive:
            self.alive.pop(name).close()
        self.progress.say(f"{self.suite.name}: {name}: {status}: {reason}")

    def _absent(self, name: str) -> str:
        """Why a case cannot run here, as far as that is known without starting it."""
        case = self.suite.cases[name]
        missing = [package for package in case.needs if installed_version(package) is None]
        return f"{' and '.join(missing)} not installed" if missing else ""

    def _prepare(self) -> bool:
        """Get the numbers that all cases share; without them, no case can run."""
        if self.suite.prepare is None:
            return True
        self.progress.show(f"{self.suite.name}: preparing")
        process = self.alive["prepare"] = self._spawn(None)
        event: dict[str, Any]
        try:
            event = process.listen(START_TIMEOUT, self.interrupt.check)
        except CaseFailedError as error:
            event = {"event": "failed", "reason": str(error)}
        self.alive.pop("prepare").close()
        if event["event"] == "done":
            self.prepared = event["numbers"]
            return True
        for name in self.chosen:
            self._lose(name, event["event"], f"preparation: {event['reason']}")
        return False

    def _part(self, group: list[str]) -> Work:
        """What of the suite's work a group has to do in each process."""
        share = len(group) / self.work.starts
        return Work(len(group), len(group) * self.sweeps, self.work.seconds * share)

    def _groups(self) -> list[list[str]]:
        """The cases that are compared with one another, by base, further pairs and aims; each group takes turns.

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

    def _start(self, group: list[str], until: float) -> None:
        """Bring every case that is begun before ``until`` behind its warm-up, a few at a time, and hold it there."""
        waiting: list[str] = []
        at_once = min(STARTS[self.settings.device], os.cpu_count() or 1)
        todo = list(group)
        while todo or waiting:
            self.interrupt.check()
            while todo and len(waiting) < at_once:
                name = todo.pop(0)
                if reason := self._absent(name) or (LATE if time.monotonic() > until else ""):
                    if self.rows[name]["status"] == UNENDED:
                        self._lose(name, "skipped", reason)
                    self.progress.advance("starts")
                    continue
                self.alive[name] = self._spawn(name)
                waiting.append(name)
            if waiting:
                name = waiting.pop(0)
                self.progress.show(f"{self.suite.name}: starting {name}")
                if self._event(name, START_TIMEOUT):
                    self.alive[name].hold()
                self.progress.advance("starts")

    def _spawn(self, name: str | None) -> CaseProcess:
        settings = self.settings
        environment = {**self.suite.environment, **(self.suite.cases[name].environment if name else {})}
        if settings.threads is not None:
            environment.update(OMP_NUM_THREADS=str(settings.threads), MKL_NUM_THREADS=str(settings.threads))
        task = {
            "suite": self.suite.name,
            "suites": dict(settings.suites),
            "case": name,
            "device": settings.device,
            "threads": settings.threads,
            "seed": settings.seed,
            "quick": settings.quick,
            "warmup": self.suite.warmup,
            "prepared": self.prepared,
        }
        plain = "".join(letter if letter.isalnum() else "_" for letter in name or "prepare")
        log = settings.out.absolute() / "logs" / f"{self.suite.name}.{plain}.log"
        return CaseProcess(task, log, self.folder, environment)

    def _event(self, name: str, timeout: float, check: Callable[[], None] | None = None) -> dict[str, Any] | None:
        """The next event of a case, or ``None`` if it was its last, which is then noted in its row."""
        try:
            event = self.alive[name].listen(timeout, check or self.interrupt.check)
        except CaseFailedError as error:
            self._lose(name, "failed", str(error))
            return None
        if event["event"] in ("failed", "skipped"):
            self._lose(name, event["event"], event["reason"])
            return None
        return event

    def _measure(self, group: list[str], number: int, until: float) -> None:
        """One round of each case in turn, until there are enough or the group's share of the time is up.

        Each sweep begins with another case, so that none has the better place. Beyond ``until`` there are no more than
        the fewest.
        """
        start = time.monotonic()
        done = number * self.sweeps
        budget, spent = min(self._part(group).seconds, until - start), 0.0
        fewest = math.ceil(FEWEST_SWEEPS / self.settings.processes)
        order = {"order": "round", "lead": self.suite.lead, "steps": self.steps}
        for sweep in range(self.sweeps):
            rounds = (self.sweeps - sweep) * len(self.alive)
            self.progress.expect([Work(0, rounds, budget - spent), *self.later])
            first = sweep % len(group)
            for name in [name for name in group[first:] + group[:first] if name in self.alive]:
                self.progress.show(f"{self.suite.name}: {name}, round {done + sweep + 1}")
                try:
                    self.alive[name].tell(order)
                except CaseFailedError as error:
                    self._lose(name, "failed", str(error))
                    continue
                event = self._event(name, ROUND_TIMEOUT, check=lambda: None)
                if event is not None:
                    self.alive[name].hold()
                    self.measured.add(name)
                    round_ = {key: event[key] for key in ("seconds", "steps", "samples")}
                    self.rows[name]["rounds"].append({"sweep": done + sweep, "process": number, **round_})
                self.progress.advance("rounds")
                self.interrupt.check()
            self.save()
            spent = time.monotonic() - start
            if sweep + 1 >= fewest and spent * (sweep + 2) / (sweep + 1) > budget:
                break

    def _finish(self, timeout: float) -> None:
        """Let every case that is left return its numbers."""
        for name in list(self.alive):
            if name not in self.measured:
                self.alive.pop(name).close(grace=0.0)
                continue
            try:
                self.alive[name].tell({"order": "end"})
            except CaseFailedError as error:
                self._lose(name, "failed", str(error))
        for name in list(self.alive):
            self.progress.show(f"{self.suite.name}: {name}, ending")
            event = self._event(name, timeout, check=lambda: None)
            if event is not None:
                keys = ("numbers", "start_bytes", "peak_bytes", "threads")
                self.rows[name].update(status="ok", **{key: event[key] for key in keys})
                self.alive.pop(name).close()
        self.measured.clear()
