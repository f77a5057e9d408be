"""``end_program``: ends the examined or measured script and its process, without the script's handlers."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NoReturn

from lightning_turbo.measure import end_process

__all__ = ["end_program", "ended_by"]


@dataclass(frozen=True, slots=True)
class _Run:
    """A running program: what to call before it is ended, and what to remove from the process."""

    at_end: Callable[[int], int]
    put_in: ExitStack


_runs: list[_Run] = []  # the current run, if any


@contextmanager
def ended_by(at_end: Callable[[int], int], put_in: ExitStack) -> Iterator[None]:
    """Inside the block, ``end_program`` calls a function and closes a stack before it ends the process."""
    _runs.append(_Run(at_end, put_in))
    try:
        yield
    finally:
        _runs.pop()


def end_program(status: int = 0) -> NoReturn:
    """End the program run by ``run_program``, and this process, without running the program's handlers.

    The program has trained for a few steps only, so none of its code runs any more; see ``measure.end_process``.
    Outside ``run_program`` this is ``end_process``.

    Args:
        status: The exit status of the process, unless the run's ``at_end`` returns another one.
    """
    try:
        for run in _runs[-1:]:
            status = run.at_end(status)
            run.put_in.close()
    except BaseException:
        # An error must not reach the program, whose handlers would run.
        traceback.print_exc()
        status = status or 1
    end_process(status)
