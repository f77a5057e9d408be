"""Ensures that no error of the Doctor itself ends a run that it watches."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from typing import Any

from lightning_turbo.measure import print_lines

__all__ = ["Guard", "describe_error", "say"]

RAISES = False
"""Whether errors of the Doctor itself are raised; the tests of this project set it, to see them."""


class Guard:
    """Keeps errors of the Doctor's own work away from the run.

    The ``Doctor`` owns it. The first error is reported in one line; then the Doctor is removed from the run and does no
    more work. No ``Exception`` in guarded work reaches the run; ``SystemExit`` and Ctrl-C pass through.

    Args:
        give_up: Removes the Doctor from the run, after an error.

    Attributes:
        outlook: What the message about an error says of the run.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self.failed = False
        self.outlook = "Training goes on without it."
        self._give_up = give_up
        self._gave_up = False

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return the result of ``work``, or ``None`` after an error in this call or an earlier one."""
        result = self.note(work, *args)
        if self.failed and not self._gave_up:
            self._gave_up = True
            # Parts that never started cannot be removed; that must not become an error of the run either.
            with contextlib.suppress(Exception):
                self._give_up()
        return result

    def note(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do the same inside a call of the user's, such as a torch function: the Doctor leaves at the next ``run``."""
        if self.failed:
            return None
        try:
            return work(*args)
        except Exception as error:
            if RAISES:
                raise
            self.failed = True
            say(f"Doctor: {describe_error(error)} ended its look at this run. {self.outlook}")
            return None


def describe_error(error: Exception) -> str:
    """Return an error and its location in one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{words} ({os.path.basename(place.filename)}:{place.lineno})"


def say(text: str) -> None:
    """Write text to standard output, whatever characters its encoding has; ignore a closed one."""
    with contextlib.suppress(OSError, ValueError):
        print_lines(text)
