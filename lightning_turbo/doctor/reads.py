"""How many bytes loading reads, as Linux counts them: what is mapped into memory is not among them."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import threading

__all__ = ["Reads"]


class Reads:
    """Counts what is read in the timed steps, between ``begin`` and ``end``; ``drop`` forgets a step that was begun."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._before: int | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._before = _bytes_read()

    def end(self) -> None:
        """End the step, if one was begun."""
        if self._before is not None:
            self.steps.append(max(_bytes_read() - self._before, 0))
        self.drop()

    def drop(self) -> None:
        """Forget the step, because something else came between."""
        self._before = None


def _bytes_read() -> int:
    """Return the bytes that this process's Python threads and its worker processes have read; 0 where nobody counts.

    Threads of libraries are left out: with gloo they read what other ranks send.
    """
    tasks = [f"self/task/{each.native_id}" for each in threading.enumerate()]
    workers = [str(each.pid) for each in multiprocessing.active_children()]
    return sum(map(_bytes_of, tasks + workers))


def _bytes_of(task: str) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{task}/io", encoding="ascii") as file:
        return int(re.findall(r"rchar: (\d+)", file.read())[0])
    return 0
