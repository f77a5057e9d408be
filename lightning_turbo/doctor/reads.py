"""Counts the bytes that loading reads, as reported by Linux; memory-mapped data are not included."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import threading

from lightning_turbo.doctor.clock import Listener, Plan

__all__ = ["BytesRead"]


class BytesRead(Listener):
    """Counts the bytes read in the timed steps.

    It counts from the first step that the plan times to the last. ``steps`` contains only complete steps.

    Args:
        plan: The plan of steps.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.steps: list[int] = []
        self._before: int | None = None

    def begin_step(self, step: int) -> None:
        """Begin a step, if it is to be counted."""
        self._before = _bytes_read() if self.plan.times(step) else None

    def end_step(self, step: int) -> None:
        """End the step, if it is counted."""
        if self._before is not None:
            self.steps.append(max(_bytes_read() - self._before, 0))
        self._before = None

    def drop_step(self, step: int) -> None:
        """Discard the step."""
        self._before = None

    @property
    def mean(self) -> float:
        """Bytes per step; 0 if unknown."""
        return sum(self.steps) / max(len(self.steps), 1)


def _bytes_read() -> int:
    """Return the bytes read so far by this process's Python threads and its worker processes; 0 if unknown.

    Threads of libraries are excluded: with gloo they read what other ranks send.
    """
    tasks = [f"self/task/{each.native_id}" for each in threading.enumerate()]
    workers = [str(each.pid) for each in multiprocessing.active_children()]
    return sum(map(_bytes_of, tasks + workers))


def _bytes_of(task: str) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{task}/io", encoding="ascii") as file:
        return int(re.findall(r"rchar: (\d+)", file.read())[0])
    return 0
