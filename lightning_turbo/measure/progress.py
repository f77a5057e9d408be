"""Shows progress: a bar with the remaining time on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

__all__ = ["Progress"]

EVERY = 15.0  # seconds between two plain lines
BAR = 30  # characters
ERASE = "\r\x1b[K"  # return to the first column of a terminal and clear the line


class Progress:
    """Shows the progress of a run on standard error.

    On a terminal, each ``show`` redraws the last line: the elapsed time, what is being measured and, with a deadline, a
    bar and the remaining time. Permanent lines are printed above it. Nothing is drawn between calls, so that no thread
    disturbs a measurement.

    Args:
        deadline: When the measurement ends, on the clock of ``time.monotonic``; infinite if unknown.
        stream: The output stream; ``None`` means standard error.
    """

    def __init__(self, deadline: float = math.inf, stream: TextIO | None = None) -> None:
        self._deadline = deadline
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._text = "starting"
        self._start = self._said = time.monotonic()

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._erase()

    def show(self, text: str) -> None:
        """Show what is being measured; if not on a terminal, print a line occasionally."""
        self._text = text
        if self._terminal:
            self._draw()
        elif time.monotonic() - self._said > EVERY:
            self.say(self._describe())

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._said = time.monotonic()
        # The changing line is cleared, this line takes its place, and the changing line is redrawn below.
        self._erase()
        self._stream.write(f"{text}\n")
        self._stream.flush()
        self._draw()

    def _describe(self) -> str:
        passed = time.monotonic() - self._start
        left = max(0.0, self._deadline - time.monotonic())
        return f"{passed:.0f} s passed" + ("" if left == math.inf else f", {left:.0f} s left") + f": {self._text}"

    def _draw(self) -> None:
        """Redraw the last line of a terminal."""
        if self._terminal:
            bar = ""
            whole = self._deadline - self._start
            if whole < math.inf:
                share = min(1.0, (time.monotonic() - self._start) / whole)
                bar = f"[{'#' * int(BAR * share):{BAR}}] "
            # A line as wide as the terminal would wrap, and the wrapped part could not be cleared.
            line = (bar + self._describe())[: shutil.get_terminal_size().columns - 1]
            self._stream.write(f"{ERASE}{line}")
            self._stream.flush()

    def _erase(self) -> None:
        if self._terminal:
            self._stream.write(ERASE)
