"""Interleaved rounds: processes that are alive at the same time and are measured one at a time, in rounds."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning_turbo.measure.process import CAN_HOLD, Process, ProcessError
from lightning_turbo.measure.progress import Progress

__all__ = ["LATE", "UNENDED", "InterleavedRounds", "Interrupt", "InterruptedRunError", "new_row"]

# A process that takes longer than this many seconds counts as hung.
START_TIMEOUT = 300.0
ROUND_TIMEOUT = 300.0  # the first one compiles
END_TIMEOUT = 120.0
END_TIMEOUT_INTERRUPTED = 20.0

UNENDED = "interrupted"  # the status of a row until its process ends in another way
LATE = "no time was left for it"
# What a process has not reached that ends instead of the event that is expected.
UNREACHED = {"ready": "its first round", "round": "its rounds were over"}
TWICE = "sent {got!r} in place of {expected!r}: expected one process that trains, got a fork that trains too"


class InterruptedRunError(Exception):
    """Ctrl-C was pressed, SIGTERM was sent, or the time is up."""


class Interrupt:
    """Turns Ctrl-C and SIGTERM into a flag that is checked between events; a second signal stops at once.

    Args:
        seconds: Time limit for the measurement, from now.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.pressed = False
        self.deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the time limit; negative after it."""
        return self.deadline - time.monotonic()

    def check(self) -> None:
        """End the measurement if it was interrupted or the time is up.

        Raises:
            InterruptedRunError: If so.
        """
        if self.pressed or self.left < 0:
            raise InterruptedRunError

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    @contextmanager
    def caught(self) -> Iterator[Interrupt]:
        """Catch both signals inside the block, and restore the previous handlers after it."""
        before = {number: signal.signal(number, self._press) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def new_row() -> dict[str, Any]:
    """Return the row of something that has not been measured: its status, rounds and results."""
    return {"status": UNENDED, "reason": "", "rounds": [], "numbers": {}, "peak_bytes": None}


class InterleavedRounds:
    """Starts processes, lets each measure one round at a time while all others are held, and ends them.

    ``run`` starts processes, and ends all of them before it returns or raises. While one measures, every other one is
    stopped by a signal; on a system without such a signal, each process measures all its rounds before the next one
    starts. A process that fails drops out, with the reason in its row, without affecting the others.

    Args:
        spawn: Starts the process with a given name.
        rows: The row of each name, from ``new_row``; rounds and results are stored there.
        interrupt: Whether to stop.
        progress: Where to show the progress.
        title: Prefix of progress lines.
        at_once: Largest number of processes that start at the same time.
        save: Called after each sweep of rounds, to save the results so far.
    """

    def __init__(
        self,
        spawn: Callable[[str], Process],
        rows: Mapping[str, dict[str, Any]],
        *,
        interrupt: Interrupt,
        progress: Progress,
        title: str = "",
        at_once: int = 4,
        save: Callable[[], object] = lambda: None,
    ) -> None:
        self.rows = rows
        self.alive: dict[str, Process] = {}
        self._spawn = spawn
        self._interrupt = interrupt
        self._progress = progress
        self._title = f"{title}: " if title else ""
        self._at_once = min(at_once, os.cpu_count() or 1)
        self._save = save

    def run(
        self,
        names: Sequence[str],
        rounds: Sequence[Mapping[str, float]],
        *,
        number: int = 0,
        fewest: int = 1,
        start_until: float = float("inf"),
        until: float = float("inf"),
        seconds: float = float("inf"),
    ) -> None:
        """Measure a fresh process for each name.

        Args:
            names: The names; those that failed or were skipped before are left out.
            rounds: For each round of a process its ``steps``, and ``lead``, the unmeasured steps before it; with
                ``seconds``, a round has as many steps as fit into this time.
            number: Index of the process among those with its name, from 0; stored with the rounds.
            fewest: Number of rounds that are measured even after ``until``.
            start_until: Time on the clock of ``time.monotonic`` after which no process is started.
            until: Time after which no further sweep of rounds begins.
            seconds: The same, in seconds from the start of the first round.

        Raises:
            InterruptedRunError: If the run was interrupted; the rows hold what was measured.
        """
        able = [name for name in names if self.rows[name]["status"] in (UNENDED, "ok")]
        groups = [able] if CAN_HOLD else [[name] for name in able]
        try:
            for position, group in enumerate(groups):
                self._start(group, start_until)
                now = time.monotonic()
                left = len(groups) - position
                # The remaining time is split equally among the remaining groups; ``seconds`` among all groups.
                share = min((until - now) / left, seconds / len(groups))
                self._measure(group, rounds, number, fewest, now + share)
                self._finish(number, END_TIMEOUT)
        except InterruptedRunError:
            # The rounds so far only count with the results that a process returns at its end, so it is given some time.
            self._finish(number, END_TIMEOUT_INTERRUPTED)
            raise
        finally:
            for process in self.alive.values():
                process.close(grace=0.0)
            self.alive.clear()

    def lose(self, name: str, status: str, reason: str) -> None:
        """Drop something from the run as ``"failed"`` or ``"skipped"``, and store the reason in its row."""
        self.rows[name].update(status=status, reason=reason)
        if name in self.alive:
            self.alive.pop(name).close()
        self._progress.say(f"{self._title}{name}: {status}: {reason}")

    def _expect(
        self, name: str, expected: str, timeout: float, check: Callable[[], None] = lambda: None
    ) -> dict[str, Any] | None:
        """Return the next event of a process; drop the process and return ``None`` if it is another than expected."""
        event = self._event(name, timeout, check)
        if event is None or event["event"] == expected:
            return event
        got = event["event"]
        unreached = f"ended before {UNREACHED[expected]}"
        self.lose(name, "failed", unreached if got == "done" else TWICE.format(got=got, expected=expected))
        return None

    def _event(self, name: str, timeout: float, check: Callable[[], None] = lambda: None) -> dict[str, Any] | None:
        """Return the next event of a process, or ``None`` if the process was dropped."""
        try:
            event = self.alive[name].listen(timeout, check)
        except ProcessError as error:
            event = {"event": "failed", "reason": str(error)}
        if event["event"] in ("failed", "skipped"):
            self.lose(name, event["event"], event["reason"])
            return None
        return event

    def _tell(self, name: str, order: Mapping[str, Any]) -> bool:
        try:
            self.alive[name].tell(order)
        except ProcessError as error:
            self.lose(name, "failed", str(error))
            return False
        return True

    def _start(self, names: Sequence[str], until: float) -> None:
        """Run each process through its warm-up, a few at a time, and hold it there."""
        todo = list(names)
        waiting = list[str]()
        while todo or waiting:
            self._interrupt.check()
            # Starts are slow and need no quiet machine, so several run at once; each process is held as soon as it is
            # ready.
            while todo and len(waiting) < self._at_once:
                name = todo.pop(0)
                if time.monotonic() <= until:
                    self.alive[name] = self._spawn(name)
                    waiting.append(name)
                elif self.rows[name]["status"] == UNENDED:
                    self.lose(name, "skipped", LATE)
            if waiting:
                name = waiting.pop(0)
                self._progress.show(f"{self._title}{name}, starting")
                if self._expect(name, "ready", START_TIMEOUT, self._interrupt.check) is not None:
                    self.alive[name].hold()

    def _measure(
        self, names: Sequence[str], rounds: Sequence[Mapping[str, float]], number: int, fewest: int, until: float
    ) -> None:
        """Measure one round of each process in turn, until there are enough or the time is up.

        Each sweep begins with another process, so that a process does not always follow the same one.
        """
        begun = time.monotonic()
        # Sweep numbers continue from earlier processes, because a ratio compares rounds of the same sweep.
        for sweep, order in enumerate(rounds if self.alive else ()):
            first = sweep % max(len(names), 1)
            for name in [*names[first:], *names[:first]]:
                if name in self.alive:
                    self._progress.show(f"{self._title}{name}, round {number * len(rounds) + sweep + 1}")
                    self._round(name, order, number * len(rounds) + sweep, number)
                    self._interrupt.check()
            self._save()
            now = time.monotonic()
            # Stop if another sweep of average duration would not end in time.
            if sweep + 1 >= fewest and now + (now - begun) / (sweep + 1) > until:
                break

    def _round(self, name: str, order: Mapping[str, float], sweep: int, number: int) -> None:
        """Let one process measure one round."""
        if not self._tell(name, {"order": "round", **order}):
            return
        # The first round of a process may compile for minutes, so it can be interrupted. Any other round is nearly over
        # and runs to its end, because the results of an aborted process are lost.
        fresh = all(part["process"] != number for part in self.rows[name]["rounds"])
        event = self._expect(name, "round", ROUND_TIMEOUT, self._interrupt.check if fresh else lambda: None)
        if event is None:
            return
        self.alive[name].hold()
        round_ = {key: event[key] for key in ("seconds", "steps", "samples")}
        self.rows[name]["rounds"].append({"sweep": sweep, "process": number, **round_})

    def _finish(self, number: int, timeout: float) -> None:
        """Let every process that has measured something return its results."""
        for name in list(self.alive):
            # Processes without a round have no results. All others are sent the order before the first one is waited
            # for.
            if not any(part["process"] == number for part in self.rows[name]["rounds"]):
                self.alive.pop(name).close(grace=0.0)
            else:
                self._tell(name, {"order": "end"})
        for name in list(self.alive):
            self._progress.show(f"{self._title}{name}, ending")
            event = self._expect(name, "done", timeout)
            if event is not None:
                self.rows[name].update(status="ok", numbers=event["numbers"], peak_bytes=event["peak_bytes"])
                self.alive.pop(name).close()
