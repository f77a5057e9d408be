"""No error of the Doctor's own ends a run that it watches."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["Guard", "describe_error", "say"]

RAISES = False
"""Whether errors of the Doctor's own are raised: the tests of this project set it, to see them."""


class Guard:
    """Keeps errors of the Doctor's own work away from the run.

    Who starts it: the ``Doctor``, which keeps it. What ends it: the first error, which is said in one line; then the
    Doctor is taken away from the run, and no work is done any more. What always holds: nothing that it runs raises an
    ``Exception`` into the run. ``SystemExit`` and Ctrl-C pass.

    Args:
        give_up: Takes the Doctor away from the run, after an error.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self.failed = False
        self._give_up = give_up
        self._gave_up = False

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return what ``work`` returns; ``None`` after an error, of this call or of an earlier one."""
        result = self.note(work, *args)
        if self.failed and not self._gave_up:
            self._gave_up = True
            # What was not begun cannot be taken away, and that is no error of the run's either.
            with contextlib.suppress(Exception):
                self._give_up()
        return result

    def note(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do the same within a call of the user's, such as one of torch: the Doctor leaves at the next ``run``."""
        if self.failed:
            return None
        try:
            return work(*args)
        except Exception as error:
            if RAISES:
                raise
            self.failed = True
            say(f"Doctor: {describe_error(error)} ended its look at this run. Training goes on without it.")
            return None


def describe_error(error: Exception) -> str:
    """Return an error and its place in one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{words} ({os.path.basename(place.filename)}:{place.lineno})"


def say(text: str) -> None:
    """Write a text to the standard output, whatever letters that takes; a closed one takes none."""
    with contextlib.suppress(OSError, ValueError):
        # An object in its place may have no encoding.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(f"{text}\n".encode(encoding, "backslashreplace").decode(encoding))
