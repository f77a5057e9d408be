"""How far a run is: a bar with the remaining time in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

__all__ = ["Progress"]

EVERY = 15.0  # seconds between two plain lines


class Progress:
    """Shows on standard error how far the benchmarks are.

    Args:
        console: A rich console; ``None`` makes one on standard error.
    """

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._console = console or Console(stderr=True)
        self._bar = None
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=self._console, speed_estimate_period=60.0)
            self._task = self._bar.add_task("starting", total=None)
        self._done = 0
        self._left = 0
        self._later = 0
        self._start = self._said = time.monotonic()

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def open(self, later: int) -> None:
        """Begin a suite.

        Args:
            later: Units of work of all the suites after this one.
        """
        self._later = later

    def expect(self, units: int) -> None:
        """Say how many units of work (starts and rounds) are left in this suite."""
        self._left = units
        if self._bar is not None:
            self._bar.update(self._task, total=self._done + self._left + self._later)

    def advance(self) -> None:
        """Note that a unit of work is done."""
        self._done += 1
        self._left = max(0, self._left - 1)
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif now - self._said > EVERY:
            left = (self._left + self._later) * (now - self._start) / self._done
            self.say(f"{now - self._start:.0f} s passed, about {left:.0f} s left")

    def show(self, text: str) -> None:
        """Say what is going on, where there is a bar to say it in."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._said = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
