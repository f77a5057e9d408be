"""Ctrl-C and a deadline as flags, so that what was measured is kept."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupt", "InterruptedRunError"]


class InterruptedRunError(Exception):
    """Ctrl-C was pressed, or the time is up."""


class Interrupt:
    """Turns Ctrl-C into a flag that is looked at between events; a second Ctrl-C stops at once.

    Args:
        seconds: How long the measuring may go on from now.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.pressed = False
        self.deadline = time.monotonic() + seconds

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline

    def check(self) -> None:
        """Leave the measuring if Ctrl-C was pressed or the time is up.

        Raises:
            InterruptedRunError: If so.
        """
        if self.pressed or self.late:
            raise InterruptedRunError

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    @contextmanager
    def caught(self) -> Iterator[Interrupt]:
        """Catch Ctrl-C within the block; the handler that was there before comes back after it."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._press)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)
