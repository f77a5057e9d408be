"""Waits for worker processes that end when the processes do, or when nobody wants the batch any more."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["end_workers", "guard_workers"]

# Seconds. How long a wait for a worker process goes on before it is asked whether there is still a reason to.
SLICE = 0.1


class _Dropped(BaseException):
    """Ends a wait for a batch that nobody will ask for."""


def guard_workers(source: Any, dropped: Callable[[], bool]) -> None:
    """Have torch's iterator ``source`` wait safely in one thread while another one may end its worker processes.

    A Trainer does so with persistent ones. Left to itself the wait would go on for ever, or the epoch end before its
    time without a word; here that is an error. The methods are set on this one object.

    Args:
        source: An iterator; one without worker processes is left alone.
        dropped: Tells that nobody will ask for a batch any more.
    """
    if hasattr(source, "_try_get_data"):
        reference = weakref.ref(source)  # torch ends the processes when the last reference to the iterator goes
        source._next_data = functools.partial(_next_data, reference)
        source._try_get_data = functools.partial(_try_get_data, reference, dropped)


def end_workers(source: Any) -> None:
    """End the worker processes of an iterator, if it has any."""
    end = getattr(source, "_shutdown_workers", None)
    if end is not None:
        end()


def _next_data(reference: Callable[[], Any]) -> Any:
    source = reference()
    try:
        return type(source)._next_data(source)
    finally:
        if source._persistent_workers:  # others are ended at the end; without them, batches are left out
            _check_workers(source)


def _try_get_data(reference: Callable[[], Any], dropped: Callable[[], bool], timeout: float = 5.0) -> tuple[bool, Any]:
    source, end = reference(), time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            got = type(source)._try_get_data(source, max(0.0, min(left, SLICE)))
        except (OSError, EOFError) as error:  # what a worker process sends it also has to hand over
            _check_workers(source)
            dead = _wait_for_death(source._workers)
            if not dead:
                raise
            raise RuntimeError(f"DataLoader worker (pid(s) {dead}) exited unexpectedly") from error
        if got[0] or left <= SLICE:
            return got
        _check_workers(source)
        if source._tasks_outstanding and dropped():  # without them it is being set up for its next epoch
            raise _Dropped


def _wait_for_death(workers: Any, patience: float = 1.0) -> str:
    """Return the pids of those that have died, as soon as there are any: a killed process closes its files first."""
    end = time.monotonic() + patience
    while True:
        dead = [str(worker.pid) for worker in workers if not worker.is_alive()]
        if dead or time.monotonic() >= end:
            return ", ".join(dead)
        time.sleep(0.01)


def _check_workers(source: Any) -> None:
    if source._shutdown:
        raise RuntimeError(
            "The worker processes of this iterator were ended before it was, by its loader or by the Trainer that used "
            "it. Call iter() on the loader again."
        )
