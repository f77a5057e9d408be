"""Ctrl-C as a flag, so that what was measured is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupt", "InterruptedRunError"]


class InterruptedRunError(Exception):
    """Ctrl-C was pressed."""


class Interrupt:
    """Turns Ctrl-C into a flag that is looked at between events; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.pressed = False

    def check(self) -> None:
        """Leave the measuring if Ctrl-C was pressed.

        Raises:
            InterruptedRunError: If it was.
        """
        if self.pressed:
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
