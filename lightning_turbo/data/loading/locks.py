"""The lock of dataset code, what a fork does with it, and what the calling thread is doing."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Iterator

from lightning_turbo.errors import TurboWarning

__all__ = ["TURNS", "LoadingLock", "is_loading", "load_in_this_thread", "starting_workers"]

# Seconds. How long a load or a fork waits for dataset code that runs in another thread.
LOCK_TIMEOUT = 30.0


class _Here(threading.local):
    """What the calling thread is doing. Each thread has its own; a forked child begins with a new one."""

    prefetches = False  # whether it is a thread of ours
    loads = 0  # loads of ours that are under way in this thread, one inside another
    serves = False  # whether it loads samples for a thread that holds the lock meanwhile
    starts_workers = False  # whether the processes that it forks are workers of a loader
    entered: tuple[LoadingLock, ...] = ()  # the locks that it holds for a fork


_here = _Here()
_locks: weakref.WeakSet[LoadingLock] = weakref.WeakSet()

# The number of this process, set again after a fork: to ask the system for each batch costs as much as a lock.
process = os.getpid()


def is_loading() -> bool:
    """Whether the calling thread is a prefetching one, or loads a batch at this moment."""
    return _here.prefetches or _here.loads > 0


def load_in_this_thread(*, serves: bool = False) -> None:
    """Mark the calling thread as a prefetching one: a loader that it iterates starts no other.

    Args:
        serves: Whether it loads samples for another thread, which holds the lock and waits for it.
    """
    _here.prefetches, _here.serves = True, serves


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Let worker processes that this thread forks in the block never collect objects that they inherit.

    Garbage of this process is theirs too. A collection there would run its destructors, and that of a DALI pipeline,
    for example, joins threads that a forked process does not have: the process hangs or dies of a segmentation fault.
    It would also write to each inherited object, and so copy the memory that the processes share.
    """
    before = _here.starts_workers
    _here.starts_workers = True
    try:
        yield
    finally:
        _here.starts_workers = before


class LoadingLock:
    """Held while dataset code runs for a loader, and while the process forks.

    Loaders with one thread share ``TURNS``, so that dataset code never runs in two of their threads at once, whatever
    files and readers their datasets share. A loader with several threads has a lock of its own: its dataset was
    declared safe for threads, and only forks wait for it, so that no process is born with a lock of the dataset held.
    A thread may enter a lock again that it holds. Nobody waits for ever, as a stream may never return: who has waited
    for ``LOCK_TIMEOUT`` goes on without the lock, with a warning, because two loads beside each other are right for
    most datasets, and a run that stands still is right for none.

    ``TURNS`` lives as long as the process, a lock of a loader's own as long as its epoch. Always: a thread that is
    inside counts as loading (``is_loading``), and a forked child begins with all locks free.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        # To ask with a timeout costs seven times as much, even where nobody holds the lock.
        if not self._lock.acquire(blocking=False) and not self._lock.acquire(timeout=LOCK_TIMEOUT):
            warnings.warn(
                f"A loader or a fork waited {LOCK_TIMEOUT:g} s for the batch that another thread loads, and goes on "
                "beside it. Load that dataset with num_workers=1 if the two share a file or a lock.",
                TurboWarning,
                stacklevel=2,
            )
        _here.loads += 1

    def __exit__(self, *error: object) -> None:
        try:
            self._lock.release()  # before all else, which an interrupt may keep from happening
        except RuntimeError:  # of a thread that waited in vain, and does not hold it
            pass
        finally:
            _here.loads -= 1

    def renew(self) -> None:
        """Begin afresh in a forked child, where the threads of the parent do not exist."""
        self._lock = threading.RLock()


TURNS = LoadingLock()


def _before_fork() -> None:
    # A serving thread takes no lock: the thread that it loads for holds one, and waits for it. What is entered here is
    # left behind the fork, whatever locks are made or collected in between.
    _here.entered = () if _here.serves else tuple(_locks)
    for lock in _here.entered:
        lock.__enter__()


def _after_fork_in_parent() -> None:
    entered, _here.entered = _here.entered, ()
    for lock in entered:
        lock.__exit__()


def _after_fork_in_child() -> None:
    global process
    process = os.getpid()
    if _here.starts_workers:
        gc.freeze()
    _here.starts_workers = False
    _here.prefetches = False
    _here.loads = 0
    _here.serves = False
    _here.entered = ()
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
