"""Ctrl-C, SIGTERM and a deadline as flags, so that what was measured is kept."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupt", "InterruptedRunError"]


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
