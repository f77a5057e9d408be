"""``Ahead``: the thread that loads batches ahead of the caller, and the lock under which dataset code runs."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prefetch_generator import BackgroundGenerator

from lightning_turbo._random import changed_generators, shared_state, states_lock
from lightning_turbo.data.loading.thread_state import ThreadState, add_thread_note
from lightning_turbo.errors import TurboWarning

__all__ = [
    "TURNS",
    "Ahead",
    "Item",
    "expected_draws",
    "is_loading",
    "may_wait",
    "serve_in_this_thread",
    "starting_workers",
]

# Seconds. How long a load or a fork waits for dataset code that runs in another thread.
LOCK_TIMEOUT = 30.0
# The states of the global RNGs are compared after each so many batches: to read and compare them costs half a
# millisecond in a thread that has slept before.
WATCHED = 8
# Seconds. How long close() waits for the batch that the thread is loading.
PATIENCE = 20.0

_logger = logging.getLogger("lightning_turbo.data")


class _Here(threading.local):
    """What the calling thread is doing. A forked child begins with a new one."""

    loads = 0  # loads that are under way in this thread, one inside another
    serves = False  # whether it loads samples for a thread that holds the lock meanwhile
    collects = False  # whether the garbage collector runs in it
    starts_workers = False  # whether the processes that it forks are workers of a loader


_here = _Here()

# The number of this process, set again after a fork: to ask the system for each batch costs as much as a lock.
process = os.getpid()


def is_loading() -> bool:
    """Whether the calling thread loads a batch at this moment, or samples for a thread that does."""
    return _here.loads > 0 or _here.serves


def may_wait() -> bool:
    """Whether the calling thread may wait until another one has ended.

    Not while it loads, as the other may wait for its lock. Not in the garbage collector, which may run at any line: a
    thread that collects while it starts holds a lock of ``threading`` without which no other one ends.
    """
    return not (is_loading() or _here.collects)


def _follow_collector(phase: str, _: dict[str, int]) -> None:
    _here.collects = phase == "start"


gc.callbacks.append(_follow_collector)


def serve_in_this_thread() -> None:
    """Mark the calling thread as one that loads samples for another, which holds the lock and waits for it."""
    _here.serves = True


class _Turns:
    """Held while dataset code runs for a loader of this process, and while the process forks.

    So dataset code never runs in two loading threads at once, whatever files and readers their datasets share, and no
    process is born while a lock of a dataset is held. A thread may enter again what it has entered. Nobody waits for
    ever, as a stream may never return: who has waited for ``LOCK_TIMEOUT`` goes on beside the other, with a warning,
    because that is right for most datasets, and a run that stands still is right for none.

    There is one, ``TURNS``, as long as the process. Always: a thread that is inside counts as loading.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        # To ask with a timeout costs seven times as much, even where nobody holds the lock.
        if not (_here.serves or self._lock.acquire(blocking=False) or self._lock.acquire(timeout=LOCK_TIMEOUT)):
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
        except RuntimeError:  # the lock is not this thread's: it serves another, or has waited in vain
            pass
        finally:
            _here.loads -= 1

    def renew(self) -> None:
        """Begin afresh in a forked child, where the threads of the parent do not exist."""
        self._lock = threading.RLock()


TURNS = _Turns()


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


def _after_fork_in_child() -> None:
    global process
    process = os.getpid()
    if _here.starts_workers:
        gc.freeze()
    _here.starts_workers = _here.serves = False
    _here.loads = 0
    TURNS.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=TURNS.__enter__, after_in_parent=TURNS.__exit__, after_in_child=_after_fork_in_child)


class Item(NamedTuple):
    """The result of one load.

    Attributes:
        batch: The batch; ``None`` if there is an error.
        error: The error that was raised instead; ``StopIteration`` at the end of the source.
        state: The state of the source after the batch, if it was asked for it.
        changed: The global RNGs that have changed while a thread was loading; empty for none.
    """

    batch: Any
    error: BaseException | None = None
    state: Any = None
    changed: tuple[str, ...] = ()


class Ahead:
    """A thread that loads ahead, by ``prefetch_generator``.

    A ``PrefetchIterator`` starts one when loading is slow and draws no random numbers. The thread ends with the source,
    after an error (its traceback may keep the iterator, which would end it otherwise), after ``limit`` batches, on
    ``close``, and ``WATCHED`` batches after a global RNG has changed at the latest: whoever drew, the dataset or the
    step, their numbers depend on timing from then on. Always: at most ``depth + 1`` batches are loaded and not returned
    yet, in order; it does not refer to the iterator.

    Args:
        load: Loads one batch, and returns its errors as part of the item.
        depth: How many batches are kept ready, 1 or more.
        limit: How many batches are loaded at most.
        watches: Whether the states of the global RNGs are compared.
    """

    def __init__(self, load: Callable[[], Item], depth: int, limit: float, watches: bool) -> None:
        self.is_closed = False
        self.process = process
        self._states = shared_state() if watches else None
        # An entry for each batch that the thread may still load. The collector may call ``close`` in any thread at any
        # line, also in the thread that waits for room. With a lock of Python's that thread would wait for itself; a
        # SimpleQueue has none.
        self._room = queue.SimpleQueue[None]()
        try:
            self._thread: Any = BackgroundGenerator(self._boxes(load, limit, ThreadState()), max_prefetch=0)
        except BaseException:  # an interrupt, after which nobody knows the thread; it has no room yet
            self.is_closed = True
            self._room.put(None)
            raise
        self._thread.name = f"lightning_turbo-prefetch-{id(self):x}"
        with states_lock:
            _running.add(self)
        for _ in range(depth + 1):
            self._room.put(None)

    def _boxes(self, load: Callable[[], Item], limit: float, modes: ThreadState) -> Iterator[list[Item]]:
        """Yield the items of the thread, each in a list that ``get`` empties.

        ``BackgroundGenerator`` keeps a reference to what it yielded last. Without the list that would keep a batch
        longer than its taker does and, if it is an error, through its traceback the iterator.
        """
        modes.enter()
        _logger.debug("thread started")
        loaded = 0
        try:
            while loaded < limit:
                self._room.get()
                if self.is_closed:
                    return
                item = load()
                loaded += 1
                add_thread_note(item.error)
                is_last = item.error is not None or loaded == limit
                if is_last or loaded % WATCHED == 0:
                    item = item._replace(changed=self._changes())
                box = [item]
                is_last = is_last or bool(item.changed)
                del item  # the box has it now, which ``get`` empties
                yield box
                if is_last:
                    return
        finally:
            _logger.debug("thread ended: %d batches were loaded", loaded)

    def _changes(self) -> tuple[str, ...]:
        # Who holds the states may put them back, and may wait for this thread: they are compared after another batch.
        if self._states is None or not states_lock.acquire(blocking=False):
            return ()
        try:
            return tuple(changed_generators(self._states, shared_state()))
        finally:
            states_lock.release()

    def get(self, timeout: float | None) -> Item | None:
        """Return the next item of the thread; ``None`` once it has ended and all items were returned.

        Args:
            timeout: Seconds to wait for it; ``None`` for as long as it takes.

        Raises:
            RuntimeError: If the item does not come in time, or in a forked child, where there is no thread.
        """
        if self.process != process:
            raise RuntimeError(
                "A prefetching iterator does not work in a forked child of the process that made it. Call iter() on "
                "the loader in the child."
            )
        # BackgroundGenerator puts (True, box) for each box, and (False, ...) once the generator has ended.
        try:
            success, box = self._thread.queue.get(timeout=timeout)
        except queue.Empty:
            raise RuntimeError(f"DataLoader timed out after {timeout} seconds") from None
        if not success:
            self._thread.join()
            return None
        self._room.put(None)
        return box.pop()

    def ready(self) -> bool:
        """Tell whether ``get`` would return an item at once."""
        with self._thread.queue.mutex:
            waiting = self._thread.queue.queue
            return bool(waiting) and waiting[0][0] is True

    def close(self, patience: float = PATIENCE) -> None:
        """End the thread, and wait for it where that may be waited for. May be called twice, and by the collector.

        Args:
            patience: Seconds to wait for the batch that it is loading; then it ends after that batch.

        Warns:
            TurboWarning: If the thread has not ended by then.
        """
        if self.process != process:
            return
        self.is_closed = True
        self._room.put(None)
        if not may_wait() or threading.current_thread() is self._thread:
            return
        self._thread.join(patience)
        if self._thread.is_alive():
            warnings.warn(
                f"A prefetching thread still waits for its batch after {patience:g} s. It ends after that batch, and "
                "what it loads is lost.",
                TurboWarning,
                stacklevel=2,
            )


_running: weakref.WeakSet[Ahead] = weakref.WeakSet()


@contextlib.contextmanager
def expected_draws() -> Iterator[None]:
    """Let threads that watch the global RNGs expect what is drawn in the block, as where a loader begins an epoch.

    Not where a dataset begins one: what it draws is its own, and it may put that back.
    """
    with states_lock:  # while they are counted, no other thread adds one
        watching = [each for each in _running if each._states is not None and each._thread.is_alive()]
    if not watching or is_loading():
        yield
        return
    with TURNS, states_lock:
        before = shared_state()
        yield
        after = shared_state()
        for each in watching:
            if each._states is not None and not changed_generators(each._states, before):
                each._states = after
