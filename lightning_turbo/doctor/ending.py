"""``end_program``: ends the script that is examined or measured, and with it this process, without its handlers."""

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
    """A program that runs: what is called before it is ended, and what is taken out of the process then."""

    at_end: Callable[[int], int]
    put_in: ExitStack


_runs: list[_Run] = []  # the one under way, if there is one


@contextmanager
def ended_by(at_end: Callable[[int], int], put_in: ExitStack) -> Iterator[None]:
    """Within the block, ``end_program`` calls a function and closes a stack before it ends the process."""
    _runs.append(_Run(at_end, put_in))
    try:
        yield
    finally:
        _runs.pop()


def end_program(status: int = 0) -> NoReturn:
    """End the program that ``run_program`` runs, and with it this process, without the program's handlers.

    Of the program, which was trained for some steps only, nothing runs any more: see ``measure.end_process``. Outside
    of ``run_program`` this is ``end_process``.

    Args:
        status: The exit status of the process, unless the ``at_end`` of the run returns another one.
    """
    try:
        for run in _runs[-1:]:
            status = run.at_end(status)
            run.put_in.close()
    except BaseException:
        # An error must not go on into the program, whose handlers would run.
        traceback.print_exc()
        status = status or 1
    end_process(status)
