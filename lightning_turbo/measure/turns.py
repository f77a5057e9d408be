"""Turns: processes that are alive at the same time, and are measured one after another, one round each."""

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

__all__ = ["LATE", "UNENDED", "Interrupt", "InterruptedRunError", "Turns", "new_row"]

# Seconds after which a process counts as hung.
START_TIMEOUT = 300.0
ROUND_TIMEOUT = 300.0  # the first one compiles
END_TIMEOUT = 120.0
END_TIMEOUT_INTERRUPTED = 20.0

UNENDED = "interrupted"  # the status of a row until its process ends otherwise
LATE = "no time was left for it"


class InterruptedRunError(Exception):
    """Ctrl-C was pressed, SIGTERM was sent, or the time is up."""


class Interrupt:
    """Turns Ctrl-C and SIGTERM into a flag that is looked at between events; the second of them stops at once.

    Args:
        seconds: How long the measuring may take from now.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.pressed = False
        self.deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the time is up; below 0 after it."""
        return self.deadline - time.monotonic()

    def check(self) -> None:
        """Leave the measuring if it was interrupted or the time is up.

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
        """Catch both signals within the block; the handlers that were there before come back after it."""
        before = {number: signal.signal(number, self._press) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def new_row() -> dict[str, Any]:
    """Return the row of something that is not measured yet: its state, its rounds, and what it returned."""
    return {"status": UNENDED, "reason": "", "rounds": [], "numbers": {}, "peak_bytes": None}


class Turns:
    """Starts processes, lets each measure a round in turn while all others are held still, and ends them.

    ``run`` starts processes, and none of them is left when it returns or raises. While one measures, every other one is
    stopped by a signal; on a system without such a signal, each process measures all its rounds before the next one
    starts. A process that fails takes itself out, with its reason in its row, and never the others.

    Args:
        spawn: Starts the process of a name.
        rows: The row of each name, as ``new_row`` makes it; rounds and results are written there.
        interrupt: Whether to stop.
        progress: Where to show how far it is.
        title: What lines of the progress begin with.
        at_once: Most processes that start at the same time.
        save: Called after each sweep of rounds, when there is something new to keep.
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
        order: Mapping[str, float],
        *,
        rounds: int,
        number: int = 0,
        fewest: int = 1,
        start_until: float = float("inf"),
        until: float = float("inf"),
        seconds: float = float("inf"),
        border: bool = False,
    ) -> None:
        """Measure one fresh process of each name.

        Args:
            names: Which; those that failed or were skipped before are left out.
            order: ``steps`` of a round, and ``lead``: the steps before it that are not measured; with ``seconds``, a
                round has as many steps as fit into these.
            rounds: Rounds of each process.
            number: Which process of its name this is, counted from 0; it is written into the rounds.
            fewest: Rounds that are measured even beyond ``until``.
            start_until: Time on the clock of ``time.monotonic`` after which no process is started any more.
            until: Time after which no further sweep of rounds begins.
            seconds: The same, in seconds after the start of the first round.
            border: Whether each process goes to the end of an epoch and over it, after its rounds and in its turn.

        Raises:
            InterruptedRunError: If the run was interrupted; what was measured is in the rows.
        """
        able = [name for name in names if self.rows[name]["status"] in (UNENDED, "ok")]
        groups = [able] if CAN_HOLD else [[name] for name in able]
        try:
            for position, group in enumerate(groups):
                self._start(group, start_until)
                now = time.monotonic()
                left = len(groups) - position
                # What is left of the time, in equal parts for the groups that are left; of seconds, for all groups.
                share = min((until - now) / left, seconds / len(groups))
                self._measure(group, order, rounds, number, fewest, now + share)
                for name in [each for each in group if border and each in self.alive]:
                    self._go_over_border(name)
                self._finish(number, END_TIMEOUT)
        except InterruptedRunError:
            # The rounds so far count only with what their process returns at its end, so that this much is waited for.
            self._finish(number, END_TIMEOUT_INTERRUPTED)
            raise
        finally:
            for process in self.alive.values():
                process.close(grace=0.0)
            self.alive.clear()

    def lose(self, name: str, status: str, reason: str) -> None:
        """Take something out of the run, as ``"failed"`` or ``"skipped"``, and say why in its row."""
        self.rows[name].update(status=status, reason=reason)
        if name in self.alive:
            self.alive.pop(name).close()
        self._progress.say(f"{self._title}{name}: {status}: {reason}")

    def _event(self, name: str, timeout: float, check: Callable[[], None] = lambda: None) -> dict[str, Any] | None:
        """The next event of a process, or ``None`` if it is lost."""
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
        """Bring each process behind its warm-up, a few at a time, and hold it there."""
        todo = list(names)
        waiting = list[str]()
        while todo or waiting:
            self._interrupt.check()
            # Starts are slow and need no quiet, so that some go on beside one another; each is held as soon as it is
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
                event = self._event(name, START_TIMEOUT, self._interrupt.check)
                if event is not None and event["event"] == "done":
                    self.lose(name, "failed", "ended before its first round")
                elif event is not None:
                    self.alive[name].hold()

    def _measure(
        self, names: Sequence[str], order: Mapping[str, float], rounds: int, number: int, fewest: int, until: float
    ) -> None:
        """One round of each in turn, until there are enough or the time is up.

        Each sweep begins with another process, so that none always follows the same neighbour.
        """
        begun = time.monotonic()
        # Sweeps are numbered on from those of earlier processes: a ratio is taken of rounds of one sweep.
        for sweep in range(rounds if self.alive else 0):
            first = sweep % max(len(names), 1)
            for name in [*names[first:], *names[:first]]:
                if name in self.alive:
                    self._progress.show(f"{self._title}{name}, round {number * rounds + sweep + 1}")
                    self._round(name, order, number * rounds + sweep, number)
                    self._interrupt.check()
            self._save()
            now = time.monotonic()
            # A sweep that takes as long as those before took in the mean has to end in time.
            if sweep + 1 >= fewest and now + (now - begun) / (sweep + 1) > until:
                break

    def _round(self, name: str, order: Mapping[str, float], sweep: int, number: int) -> None:
        """Let one process measure a round."""
        if not self._tell(name, {"order": "round", **order}):
            return
        # The first round of a process may compile for minutes. Any other is nearly over, and ends, because the numbers
        # of a process that is broken off are lost.
        fresh = all(part["process"] != number for part in self.rows[name]["rounds"])
        event = self._event(name, ROUND_TIMEOUT, self._interrupt.check if fresh else lambda: None)
        if event is None:
            return
        if event["event"] == "done":
            self.lose(name, "failed", "ended before its rounds were over")
            return
        self.alive[name].hold()
        round_ = {key: event[key] for key in ("seconds", "steps", "samples")}
        self.rows[name]["rounds"].append({"sweep": sweep, "process": number, **round_})

    def _go_over_border(self, name: str) -> None:
        """Let one process go over the border of an epoch."""
        self._progress.show(f"{self._title}{name}, end of an epoch")
        if not self._tell(name, {"order": "border"}):
            return
        event = self._event(name, ROUND_TIMEOUT, self._interrupt.check)
        if event is not None and event["event"] == "done":
            self.lose(name, "failed", "ended before the end of its epoch")
        elif event is not None:
            self.alive[name].hold()

    def _finish(self, number: int, timeout: float) -> None:
        """Let every process that has measured something return its numbers."""
        for name in list(self.alive):
            # Without a round there is nothing to wait for. The others are all told before the first is waited for.
            if not any(part["process"] == number for part in self.rows[name]["rounds"]):
                self.alive.pop(name).close(grace=0.0)
            else:
                self._tell(name, {"order": "end"})
        for name in list(self.alive):
            self._progress.show(f"{self._title}{name}, ending")
            event = self._event(name, timeout)
            # A process whose way over a border was interrupted answers that order first.
            while event is not None and event["event"] != "done":
                event = self._event(name, timeout)
            if event is not None:
                self.rows[name].update(status="ok", numbers=event["numbers"], peak_bytes=event["peak_bytes"])
                self.alive.pop(name).close()
