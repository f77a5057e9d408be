"""How far a run is: a bar with the remaining time in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TextIO

__all__ = ["Progress", "Work"]

EVERY = 15.0  # seconds between two plain lines
BAR = 30  # characters
ERASE = "\r\x1b[K"  # back to the first column of a terminal, and empty the line
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

    On a terminal the last line is drawn again with each start and round: a bar, what is measured, and the time left.
    Lines that stay are printed above it. Nothing is drawn between two calls, so that no thread disturbs a measurement.

    Args:
        deadline: When the measuring ends, on the clock of ``time.monotonic``, whatever is left to do.
        stream: Where to write; ``None`` takes standard error.
    """

    def __init__(self, deadline: float = math.inf, stream: TextIO | None = None) -> None:
        self._deadline = deadline
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._text = "starting"
        self._work: list[Work] = []
        self._took = {kind: deque[float](maxlen=RECENT) for kind in ("starts", "rounds")}
        self._start = self._said = self._last = time.monotonic()
        self._end = math.inf

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._erase()

    @property
    def left(self) -> float:
        """Seconds until the measuring ends, as far as can be told; infinite if it cannot."""
        return max(0.0, min(self._end, self._deadline) - time.monotonic())

    def expect(self, work: Iterable[Work]) -> None:
        """Say what is left to do: first the part that is measured now, where ``advance`` counts."""
        self._work = list(work)
        self._last = time.monotonic()
        self._estimate()
        self._draw()

    def advance(self, kind: Literal["starts", "rounds"]) -> None:
        """Count a start or a round as done."""
        now = time.monotonic()
        took, self._last = now - self._last, now
        self._took[kind].append(took)
        for work in self._work[:1]:
            setattr(work, kind, getattr(work, kind) - 1)
            work.seconds -= took if kind == "rounds" else 0.0
        self._estimate()
        self._draw()
        if not self._terminal and now - self._said > EVERY:
            self.say(self._describe_time())

    def _estimate(self) -> None:
        """Estimate when all is done: from what starts and rounds took, and from the time that rounds may take."""
        starts, rounds = (sum(took) / len(took) if took else math.inf for took in self._took.values())
        self._end = time.monotonic()
        for work in self._work:
            self._end += work.starts * starts if work.starts > 0 else 0.0
            self._end += min(work.rounds * rounds, max(0.0, work.seconds)) if work.rounds > 0 else 0.0

    def _describe_time(self) -> str:
        left = "" if self.left == math.inf else f", about {self.left:.0f} s left"
        return f"{time.monotonic() - self._start:.0f} s passed{left}"

    def _draw(self) -> None:
        """Draw the last line of a terminal again."""
        if self._terminal:
            done = time.monotonic() - self._start
            share = 0.0 if self.left == math.inf else done / (done + max(1.0, self.left))
            line = f"[{'#' * int(BAR * share):{BAR}}] {self._describe_time()}: {self._text}"
            # A line as wide as the terminal would go on in the next one, where it could not be erased.
            self._stream.write(f"{ERASE}{line[: shutil.get_terminal_size().columns - 1]}")
            self._stream.flush()

    def _erase(self) -> None:
        if self._terminal:
            self._stream.write(ERASE)

    def show(self, text: str) -> None:
        """Show what is measured now, on a terminal."""
        self._text = text
        self._draw()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._said = time.monotonic()
        self._erase()
        self._stream.write(f"{text}\n")
        self._stream.flush()
        self._draw()
