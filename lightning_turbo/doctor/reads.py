"""How many bytes loading reads, as Linux counts them: what is mapped into memory is not among them."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import threading

from lightning_turbo.doctor.clock import Listener, Plan

__all__ = ["BytesRead"]


class BytesRead(Listener):
    """Counts what is read in the timed steps.

    Who starts it: the clock, with the first step that the plan times. What ends it: that the plan times no more. What
    always holds: ``steps`` has the bytes of whole steps only.

    Args:
        plan: The steps to count in.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.steps: list[int] = []
        self._before: int | None = None

    def begin_step(self, step: int) -> None:
        """Begin a step, if it is one of those to count in."""
        self._before = _bytes_read() if self.plan.times(step) else None

    def end_step(self, step: int) -> None:
        """End the step, if one was begun."""
        if self._before is not None:
            self.steps.append(max(_bytes_read() - self._before, 0))
        self._before = None

    def drop_step(self, step: int) -> None:
        """Forget the step."""
        self._before = None

    @property
    def mean(self) -> float:
        """Bytes a step; 0 where nobody counts."""
        return sum(self.steps) / max(len(self.steps), 1)


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
