"""How far a run is: a bar with the remaining time in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

__all__ = ["Progress", "Work"]

EVERY = 15.0  # seconds between two plain lines
RECENT = 20  # starts, and rounds, of which the mean tells how long the next ones take


@dataclass
class Work:
    """What is left to do of one part of a run.

    Args:
        starts: Processes to start.
        rounds: Rounds to measure.
        seconds: After which no more of the rounds are measured; infinite without a limit.
    """

    starts: int
    rounds: int
    seconds: float


class Progress:
    """Shows on standard error how far a run is.

    Args:
        deadline: When the measuring ends, on the clock of ``time.monotonic``, whatever is left to do.
        console: A rich console; ``None`` makes one on standard error.
    """

    def __init__(self, deadline: float = math.inf, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._deadline = deadline
        self._console = console or Console(stderr=True)
        text = TextColumn("{task.description}", markup=False)
        left = TextColumn("left {task.fields[left]}")
        self._bar = RichProgress(
            text, BarColumn(), TimeElapsedColumn(), left, console=self._console, disable=not self._console.is_terminal
        )
        self._task = self._bar.add_task("starting", total=None, left="-:--:--")
        self._work: list[Work] = []
        self._took = {kind: deque[float](maxlen=RECENT) for kind in ("starts", "rounds")}
        self._start = self._said = self._last = time.monotonic()
        self._end = math.inf

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    @property
    def left(self) -> float:
        """Seconds until the measuring ends, as far as can be told; infinite if it cannot."""
        return max(0.0, min(self._end, self._deadline) - time.monotonic())

    def expect(self, work: Iterable[Work]) -> None:
        """Say what is left to do: first the part that is measured now, where ``advance`` counts."""
        self._work = list(work)
        self._last = time.monotonic()
        self._estimate()

    def advance(self, kind: Literal["starts", "rounds"]) -> None:
        """Count a start or a round as done."""
        now = time.monotonic()
        took, self._last = now - self._last, now
        self._took[kind].append(took)
        for work in self._work[:1]:
            setattr(work, kind, getattr(work, kind) - 1)
            work.seconds -= took if kind == "rounds" else 0.0
        self._estimate()
        if self._bar.disable and now - self._said > EVERY:
            left = "" if self.left == math.inf else f", about {self.left:.0f} s left"
            self.say(f"{now - self._start:.0f} s passed{left}")

    def _estimate(self) -> None:
        """Estimate when all is done: from what starts and rounds took, and from the time that rounds may take."""
        starts, rounds = (sum(took) / len(took) if took else math.inf for took in self._took.values())
        now = time.monotonic()
        self._end = now
        for work in self._work:
            self._end += work.starts * starts if work.starts > 0 else 0.0
            self._end += min(work.rounds * rounds, max(0.0, work.seconds)) if work.rounds > 0 else 0.0
        if self.left < math.inf:
            done = now - self._start
            left = str(timedelta(seconds=math.ceil(self.left)))
            self._bar.update(self._task, completed=done, total=done + max(1.0, self.left), left=left)

    def show(self, text: str) -> None:
        """Show what is measured now, if there is a bar."""
        self._bar.update(self._task, description=text)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._said = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
