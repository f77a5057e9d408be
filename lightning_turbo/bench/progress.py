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
    """What is left to do of a group of cases or of a suite.

    Args:
        starts: Cases to start.
        rounds: Rounds to measure.
        seconds: After which no more of the rounds are measured; infinite without a limit.
    """

    starts: int
    rounds: int
    seconds: float


class Progress:
    """Shows on standard error how far the benchmarks are.

    Args:
        deadline: When the measuring ends, on the clock of ``time.monotonic``, whatever is left to do.
        console: A rich console; ``None`` makes one on standard error.
    """

    def __init__(self, deadline: float = math.inf, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        progress = self

        class Left(ProgressColumn):
            def render(self, task: Any) -> Text:
                left = progress.left
                return Text("-:--:--" if left == math.inf else str(timedelta(seconds=math.ceil(left))))

        self._deadline = deadline
        self._console = console or Console(stderr=True)
        self._bar = None
        if self._console.is_terminal:
            shown = TextColumn("{task.description}", markup=False)
            self._bar = Bar(shown, BarColumn(), TimeElapsedColumn(), TextColumn("left"), Left(), console=self._console)
            self._task = self._bar.add_task("starting", total=None)
        self._work: list[Work] = []
        self._took = {kind: deque[float](maxlen=RECENT) for kind in ("starts", "rounds")}
        self._start = self._said = self._last = time.monotonic()
        self._end = math.inf

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def left(self) -> float:
        """Seconds until the measuring ends, as far as can be told; infinite if it cannot."""
        return max(0.0, min(self._end, self._deadline) - time.monotonic())

    def expect(self, work: Iterable[Work]) -> None:
        """Say what is left to do.

        Args:
            work: What is going on now first; ``advance`` counts there.
        """
        self._work = list(work)
        self._last = time.monotonic()
        self._estimate()

    def advance(self, kind: Literal["starts", "rounds"]) -> None:
        """Note that a start or a round is done.

        Args:
            kind: Which of them.
        """
        now = time.monotonic()
        took, self._last = now - self._last, now
        self._took[kind].append(took)
        work = self._work[0]
        setattr(work, kind, getattr(work, kind) - 1)
        if kind == "rounds":
            work.seconds -= took
        self._estimate()
        if self._bar is None and now - self._said > EVERY:
            left = "" if self.left == math.inf else f", about {self.left:.0f} s left"
            self.say(f"{now - self._start:.0f} s passed{left}")

    def _estimate(self) -> None:
        """Reckon when all is done: by what starts and rounds took, and by the time that rounds may take."""
        starts, rounds = (sum(took) / len(took) if took else math.inf for took in self._took.values())
        now = time.monotonic()
        self._end = now
        for work in self._work:
            self._end += work.starts * starts if work.starts > 0 else 0.0
            self._end += min(work.rounds * rounds, max(0.0, work.seconds)) if work.rounds > 0 else 0.0
        if self._bar is not None and self.left < math.inf:
            done = now - self._start
            self._bar.update(self._task, completed=done, total=done + max(1.0, self.left))

    def show(self, text: str) -> None:
        """Say what is going on, where there is a bar to say it in."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._said = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
