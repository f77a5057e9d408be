"""How far a run is: a bar with the remaining time in a terminal, plain lines elsewhere."""

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
ERASE = "\r\x1b[K"  # back to the first column of a terminal, and empty the line


class Progress:
    """Shows on standard error how far a run is.

    On a terminal the last line is drawn again with each ``show``: the time that passed, what is measured and, if there
    is a deadline, a bar and the time left. Lines that stay are printed above it. Nothing is drawn between two calls, so
    that no thread disturbs a measurement.

    Args:
        deadline: When the measuring ends, on the clock of ``time.monotonic``; infinite if it is not known.
        stream: Where to write; ``None`` takes standard error.
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
        """Show what is measured now; elsewhere than on a terminal, in a line now and then."""
        self._text = text
        if self._terminal:
            self._draw()
        elif time.monotonic() - self._said > EVERY:
            self.say(self._describe())

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._said = time.monotonic()
        # The changing line goes, this one takes its place, and the changing one comes back below.
        self._erase()
        self._stream.write(f"{text}\n")
        self._stream.flush()
        self._draw()

    def _describe(self) -> str:
        passed, left = time.monotonic() - self._start, max(0.0, self._deadline - time.monotonic())
        return f"{passed:.0f} s passed" + ("" if left == math.inf else f", {left:.0f} s left") + f": {self._text}"

    def _draw(self) -> None:
        """Draw the last line of a terminal again."""
        if self._terminal:
            bar = ""
            whole = self._deadline - self._start
            if whole < math.inf:
                share = min(1.0, (time.monotonic() - self._start) / whole)
                bar = f"[{'#' * int(BAR * share):{BAR}}] "
            # A line as wide as the terminal would go on in the next one, where it could not be erased.
            line = (bar + self._describe())[: shutil.get_terminal_size().columns - 1]
            self._stream.write(f"{ERASE}{line}")
            self._stream.flush()

    def _erase(self) -> None:
        if self._terminal:
            self._stream.write(ERASE)
