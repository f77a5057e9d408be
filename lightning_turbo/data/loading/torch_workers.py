"""The one door to what torch keeps private in the iterators of ``DataLoader``: worker processes, fetchers, waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = [
    "end_workers",
    "has_workers",
    "is_timeout",
    "samples_of_stream",
    "stream_has_ended",
    "take_batch",
    "take_in_slices",
    "timeout_message",
]

# Seconds. How long a thread waits for a worker process before it looks whether it is to end.
POLL_INTERVAL = 0.1
# Seconds. How long a process that died may take to be seen as dead: a killed one closes its files first.
DEATH_SECONDS = 1.0
ENDED = (
    "The worker processes of this iterator were ended before it was, by its loader or by the Trainer that used it. "
    "Call iter() on the loader again."
)
TIMED_OUT = "DataLoader timed out after"


def has_workers(source: Any) -> bool:
    """Whether an iterator is torch's over worker processes."""
    return hasattr(source, "_try_get_data")


def samples_of_stream(source: Any) -> Iterator[Any] | None:
    """Return the iterator of samples that torch's iterator fetches from a stream; ``None`` if worker processes do."""
    fetcher = getattr(source, "_dataset_fetcher", None)
    return None if fetcher is None else fetcher.dataset_iter


def stream_has_ended(source: Any) -> bool:
    """Whether torch's iterator has met the end of a stream in this process, with its last batch or after it."""
    return bool(getattr(getattr(source, "_dataset_fetcher", None), "ended", False))


def end_workers(source: Any) -> None:
    """End the worker processes of an iterator, if it has any. May be called twice."""
    end = getattr(source, "_shutdown_workers", None)
    if end is not None:
        end()


def timeout_message(seconds: float) -> str:
    """Return what torch says where a batch does not come in time."""
    return f"{TIMED_OUT} {seconds} seconds"


def is_timeout(error: BaseException) -> bool:
    """Whether an error is torch's of a batch that did not come in time."""
    return isinstance(error, RuntimeError) and str(error).startswith(TIMED_OUT)


def take_batch(source: Any) -> Any:
    """Take a batch of an iterator over worker processes, unless somebody else has ended these.

    Raises:
        RuntimeError: If they were ended; torch itself would wait for ever, or raise an error about something else.
    """
    try:
        batch = next(source)
    except Exception as error:
        # It shuts down by itself at the end of an epoch, after which persistent processes stay.
        is_over = isinstance(error, StopIteration) and not source._persistent_workers
        if source._shutdown and not is_over:
            raise RuntimeError(ENDED) from error
        raise
    if source._shutdown:
        raise RuntimeError(ENDED)
    return batch


def take_in_slices(source: Any, is_closed: Callable[[], bool]) -> Any:
    """Take a batch of worker processes, in waits that end by themselves, until ``is_closed()``.

    A wait that times out takes nothing, and torch looks for dead processes each time. Left to itself it would not see
    that the thread that waits is to end.
    """
    own, source._timeout = source._timeout, POLL_INTERVAL
    try:
        while True:
            try:
                return take_batch(source)
            except (OSError, EOFError) as error:
                # A process that died left a broken pipe, which may be seen before torch looks for dead ones.
                if dead := _dead_workers(source):
                    raise RuntimeError(f"DataLoader worker (pid(s) {dead}) exited unexpectedly") from error
                raise
            except RuntimeError as error:
                if is_closed() or not is_timeout(error):
                    raise
                # torch looks for this thread only in a wait without a limit.
                pinning = getattr(source, "_pin_memory_thread", None)
                if pinning is not None and not pinning.is_alive():
                    raise RuntimeError("Pin memory thread exited unexpectedly") from error
    finally:
        source._timeout = own


def _dead_workers(source: Any) -> str:
    """Return the pids of worker processes that died, as soon as there are any."""
    end = time.monotonic() + DEATH_SECONDS
    while True:
        dead = [str(worker.pid) for worker in source._workers if not worker.is_alive()]
        if dead or time.monotonic() >= end:
            return ", ".join(dead)
        time.sleep(0.01)
