"""``PrefetchIterator``: one background thread over any iterator, on ``prefetch_generator.BackgroundGenerator``."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from prefetch_generator import BackgroundGenerator

from lightning_turbo._checks import check_count
from lightning_turbo._random import GeneratorWatch
from lightning_turbo.data.loading.resume import Position
from lightning_turbo.data.loading.thread_state import ThreadState
from lightning_turbo.data.sample_seeds import SeededDataset
from lightning_turbo.errors import NoEffectWarning, TurboWarning

__all__ = ["LoadProfile", "LoadingLock", "PrefetchIterator", "is_loading", "load_in_this_thread"]

# Seconds. How long close() waits for the batch that the thread is making.
JOIN_TIMEOUT = 20.0
# Seconds. How long a load or a fork waits for dataset code that runs in another thread.
LOCK_TIMEOUT = 30.0
# Seconds. How long the thread waits for a worker process before it looks whether it is to end.
POLL_INTERVAL = 0.1
# Seconds. Batches that are loaded faster than this are loaded by the calling thread: to pass one from thread to thread
# costs 0.1 to 0.4 ms. Until FEW_BATCHES are loaded, their sum has to reach what FEW_BATCHES of this length would take:
# on a busy machine one takes milliseconds by chance, and a thread that was started stays for its epoch.
MIN_BATCH_SECONDS = 5e-4
FEW_BATCHES = 16
ENDED = (
    "The worker processes of this iterator were ended before it was, by its loader or by the Trainer that used it. "
    "Call iter() on the loader again."
)


class _Here(threading.local):
    prefetches = False  # whether it is a thread of ours
    loads = 0  # loads of ours that are under way in this thread, one inside another
    serves = False  # whether it loads samples for a thread that holds the lock meanwhile
    entered: tuple[LoadingLock, ...] = ()  # the locks that it holds for a fork


_here = _Here()
_process = os.getpid()  # set again after a fork: to ask the system for each batch costs as much as a lock
_locks: weakref.WeakSet[LoadingLock] = weakref.WeakSet()


def is_loading() -> bool:
    """Whether the calling thread is a prefetching one, or loads a batch at this moment."""
    return _here.prefetches or _here.loads > 0


def load_in_this_thread(*, serves: bool = False) -> None:
    """Mark the calling thread as a prefetching one: a loader that it iterates starts no other.

    Args:
        serves: Whether it loads samples for another thread, which holds the lock and waits for it.
    """
    _here.prefetches, _here.serves = True, serves


class LoadingLock:
    """Held while dataset code runs for a loader, and while the process forks.

    Loaders with one thread share ``TURNS``, so that dataset code never runs in two of their threads at once, whatever
    files and readers their datasets share. A loader with several threads has a lock of its own: its dataset was
    declared safe for threads, and only forks wait for it, so that no process is born with a lock of the dataset held.
    A thread may enter a lock again that it holds. Nobody waits for ever, as a stream may never return: who has waited
    for ``LOCK_TIMEOUT`` goes on without the lock, with a warning, because two loads beside each other are right for
    most datasets, and a run that stands still is right for none.
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
    global _process
    _process = os.getpid()
    _here.prefetches, _here.loads, _here.serves, _here.entered = False, 0, False, ()
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


class LoadProfile:
    """What the second batch of a loader showed. One object for each loader, so that it is found out, and told, once.

    Attributes:
        uses_rng: Whether loading draws from generators whose numbers would depend on timing in a background thread;
            ``None`` before the second batch.
    """

    def __init__(self) -> None:
        self.uses_rng: bool | None = None

    def decide(self, drew: list[str], workers: bool) -> None:
        """Decide, for good, whether a thread may load; if not, tell why."""
        self.uses_rng = bool(drew)
        if not drew:
            return
        what = "Drawing the indices of a batch" if workers else "Loading a batch"
        advice = (
            "Give the sampler a generator of its own."
            if workers
            else "Use num_workers=1 (a process has generators of its own), or draw from a generator that is made for "
            "each sample."
        )
        warnings.warn(
            f"{what} draws from {' and '.join(drew)}: in a background thread the numbers would depend on timing, "
            "whatever the seed. Batches are loaded in the training thread instead, as by a plain DataLoader, with "
            f"nothing gained. {advice}",
            NoEffectWarning,
            stacklevel=2,
        )

    def decide_for_seeds(self) -> None:
        """Decide, for good, that no thread may load, because the generators are seeded before each sample."""
        self.uses_rng = True
        warnings.warn(
            "sample_seeds seeds the random generators of this process before each sample: a background thread would "
            "do so while a training step draws from them. Batches are loaded in the training thread instead, as by a "
            "plain DataLoader, with nothing gained. Use num_workers=1: a worker process has generators of its own.",
            NoEffectWarning,
            stacklevel=2,
        )


class _PrefetchThread:
    """The source of a ``PrefetchIterator``, and the thread that takes batches from it.

    The iterator starts the thread after its second batch. The thread ends with the source, after an error (whoever
    keeps the error keeps the iterator), after ``limit`` batches, and on ``close``. It knows nothing of the iterator,
    whose end closes it. Always: one thread at a time takes from the source, in order, and at most ``depth + 1`` batches
    are loaded and not taken yet. Items are lists ``[batch, error, state]``, which their taker empties, as
    ``BackgroundGenerator`` holds on to the item that it passed on last.
    """

    def __init__(
        self,
        source: Iterator[Any],
        lock: LoadingLock,
        limit: float,
        snapshot: Callable[[], Any] | None,
        on_close: Callable[[], None] | None,
    ) -> None:
        self.source: Any = source
        self.has_workers = hasattr(source, "_try_get_data")  # torch's own iterator, of those over worker processes
        # While worker processes load, no dataset code runs in this process.
        self.lock: Any = contextlib.nullcontext() if self.has_workers else lock
        self.limit, self.snapshot, self.on_close = limit, snapshot, on_close
        self.stages: list[Callable[[Any], Any]] = []
        self.taken = 0
        self.process = _process
        self.background: Any = None  # the BackgroundGenerator, which is a thread; None again after its last item
        # The collector may call ``close`` in any thread at any line, in the one that waits for room too. A lock of
        # Python's would then be asked for by who holds it; a SimpleQueue and a bool have none.
        self.is_closed = False
        self.room = queue.SimpleQueue[None]()  # an entry for each batch that the thread may still load

    def load(self, take: Callable[[], Any]) -> list[Any]:
        """Load one batch, in whichever thread calls this; its errors are part of the item."""
        self.taken += 1
        try:
            with self.lock:
                batch = take()
                state = None if self.snapshot is None else self.snapshot()
            for stage in self.stages:
                batch = stage(batch)
            return [batch, None, state]
        except StopIteration as error:
            return [None, error, None if self.snapshot is None else self.snapshot()]
        except BaseException as error:
            return [None, error, None]

    def take(self) -> Any:
        """Take a batch from the source, in the calling thread."""
        return self._take_of_workers() if self.has_workers else next(self.source)

    def _take_of_workers(self) -> Any:
        """Take a batch of torch's iterator, unless somebody else has ended its worker processes.

        It would leave out the batches that they had not sent yet, and return a later one or end before its time.
        """
        source = self.source
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

    def _take_in_slices(self) -> Any:
        """Take a batch of worker processes, in waits that end by themselves.

        A wait that times out takes nothing, and torch looks for dead processes each time. Left to itself it would not
        see that this iterator is closed.
        """
        source = self.source
        own, source._timeout = source._timeout, POLL_INTERVAL
        try:
            while True:
                try:
                    return self._take_of_workers()
                except (OSError, EOFError) as error:
                    # A process that died left a broken pipe, which may be seen before torch looks for dead ones.
                    if dead := _dead_workers(source):
                        raise RuntimeError(f"DataLoader worker (pid(s) {dead}) exited unexpectedly") from error
                    raise
                except RuntimeError as error:
                    if self.is_closed or not str(error).startswith("DataLoader timed out after"):
                        raise
                    # torch looks for this thread only in a wait without a limit.
                    pinning = getattr(source, "_pin_memory_thread", None)
                    if pinning is not None and not pinning.is_alive():
                        raise RuntimeError("Pin memory thread exited unexpectedly") from error
        finally:
            source._timeout = own

    def start(self, depth: int) -> None:
        """Start the thread, which keeps ``depth`` batches ready, in the modes of the calling one.

        It has no room before it is known here. Otherwise an interrupt, which comes while the start is waited for, would
        leave one behind that takes batches and that nobody ends.
        """
        self.room = queue.SimpleQueue()
        background = self.background = BackgroundGenerator(self._items(ThreadState()), max_prefetch=0)
        background.name = f"lightning_turbo-prefetch-{id(background):x}"
        for _ in range(depth + 1):
            self.room.put(None)

    def _items(self, modes: ThreadState) -> Iterator[list[Any]]:
        modes.enter()
        load_in_this_thread()
        if self.has_workers and self.stages:
            # As in torch's own thread that pins memory: a copy is not to take all cores. Dataset code in this thread
            # keeps the number of the calling thread, on which sums depend.
            torch.set_num_threads(1)
        take = self._take_in_slices if self.has_workers else self.take
        try:
            while self.taken < self.limit:
                self.room.get()
                if self.is_closed:
                    return
                item = self.load(take)
                last = item[1] is not None
                yield item
                if last:
                    return
        finally:
            # Who closed this may not have waited for this thread, see ``_is_over``; a second release does nothing.
            if self.is_closed:
                self._release()

    def get(self, timeout: float | None) -> list[Any] | None:
        """Return the next item of the thread; ``None`` once it has ended and all of them were returned."""
        background = self.background  # which another thread may take away that closes this
        if background is None:
            return None
        # BackgroundGenerator puts (True, item) for each item, and (False, ...) once the generator has ended.
        try:
            success, item = background.queue.get(timeout=timeout)
        except queue.Empty:
            raise RuntimeError(f"DataLoader timed out after {timeout} seconds") from None
        self.room.put(None)
        if not success or item[1] is not None:  # then the thread ends
            background.join()
            self.background = None
        if not success:
            return None
        # A copy, and the item itself emptied: an error in it would keep the frames that pass it on, and with them the
        # iterator, alive through its traceback until the collector runs.
        try:
            return item[:]
        finally:
            item.clear()

    def ready(self) -> bool:
        """Tell whether ``get`` would return an item at once."""
        background = self.background
        if background is None:
            return False
        with background.queue.mutex:
            waiting = background.queue.queue
            return bool(waiting) and waiting[0][0] is True

    def close(self) -> None:
        """End the thread, then release the source. May be called twice, by the collector, and in a forked child."""
        if self.process != _process:
            return
        self.is_closed = True
        self.room.put(None)
        if self._is_over():
            self._release()

    def _is_over(self) -> bool:
        """Wait for the thread to end, and tell whether it has; otherwise it releases the source itself as it ends."""
        background = self.background  # which the thread that waits in ``get`` may take away meanwhile
        if background is None:
            return True
        # The collector may close this in a prefetching thread, perhaps in the one to end, or while a batch is loaded.
        # To wait there could be for ever.
        if is_loading():
            return not background.is_alive()
        background.join(JOIN_TIMEOUT)
        if not background.is_alive():
            return True
        warnings.warn(
            f"A prefetching thread still waits for the next() of {type(self.source).__name__} after "
            f"{JOIN_TIMEOUT:g} s. It ends after that item.",
            TurboWarning,
            stacklevel=3,
        )
        return False

    def _release(self) -> None:
        on_close, self.on_close, self.snapshot = self.on_close, None, None
        # With what it had ready: a loader keeps this object until its next epoch.
        self.source, self.stages, self.background = iter(()), [], None
        if on_close is not None:
            on_close()


class PrefetchIterator(Iterator[Any]):
    """Iterate over ``source`` in a background thread that keeps some items ready.

    The calling thread takes the first two items: seeds that a sampler draws at its start come then from the same place
    as without this class, and a source that draws from the global RNGs again is found out and stays there, with a
    ``NoEffectWarning``. So does one whose items take less than half a millisecond, with nothing to gain, and one that
    is iterated by a prefetching thread. Otherwise a thread takes all others ahead. It ends with the source, on
    ``close``, when this object is collected, and when the interpreter ends.

    Errors of the source, ``KeyboardInterrupt`` and ``SystemExit`` among them, are raised here, at the item where they
    happened, with their own traceback. The thread takes over grad mode, inference mode and autocast from the thread
    that takes the second item.

    Args:
        source: Any iterator. Nobody else may use it meanwhile.
        prefetch_batches: How many items to keep ready, 1 or more; one more is in preparation.
        transfer: A ``DeviceTransfer`` that moves each item to a device; ``None`` for items as they are.
        timeout: How long to wait for an item, in seconds; 0 for as long as it takes.
        limit: How many items are taken ahead in all, at most; 0 for no thread.
        position: Where the count of items is kept; ``None`` for one of its own.
        profile: What is known of the source, if anything is.
        dataset: What the source loads from, whose random generators are looked at.
        lock: What is held while an item is taken; ``None`` for the one that all loaders share.
        snapshot: Called after each item; ``position.states`` has the results of the latest items that were returned.
        on_close: Called once, when the source is done with.

    Raises:
        TypeError: If ``source`` is not an iterator, or ``prefetch_batches`` not an integer.
        ValueError: If ``prefetch_batches`` is below 1.

    Example:
        >>> squares = PrefetchIterator((n * n for n in range(4)), prefetch_batches=2)
        >>> list(squares)
        [0, 1, 4, 9]
    """

    def __init__(
        self,
        source: Iterator[Any],
        *,
        prefetch_batches: int = 8,
        transfer: Any = None,
        timeout: float = 0,
        limit: float = float("inf"),
        position: Position | None = None,
        profile: LoadProfile | None = None,
        dataset: Any = None,
        lock: LoadingLock | None = None,
        snapshot: Callable[[], Any] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        if not hasattr(source, "__next__"):
            raise TypeError(
                f"expected an iterator, got {source!r}, which has no __next__. Pass iter(...) of it; for a DataLoader "
                "take PrefetchLoader.of(loader), which can be iterated again."
            )
        self._depth = check_count("prefetch_batches", prefetch_batches)
        self.thread = _PrefetchThread(source, lock or TURNS, limit, snapshot, on_close)
        self._profile = profile or LoadProfile()
        self._dataset = dataset
        self._timeout = timeout or None
        self.position = position or Position()
        self.transfer: Any = None
        self._sent: deque[tuple[Any, BaseException | None, Any]] = deque()  # items on their way to the device
        self._loaded, self._seconds = 0, 0.0  # by the calling thread; the seconds without those of the first
        self._closed = ""
        self._finalizer = weakref.finalize(self, self.thread.close)
        if transfer is not None:
            self.use(transfer)

    def use(self, transfer: Any) -> None:
        """Move the items to a device. Before the first of them."""
        self.transfer = transfer
        self.thread.stages = transfer.stages

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Any:
        if self._closed or self.position.ended or self.thread.process != _process:
            raise self._over()
        batch, error, state = self._next_item() if self.transfer is None else self._receive()
        if error is not None:
            # Closed by another thread: the wait for worker processes was broken off, and this is no error of a batch.
            if self._closed:
                raise self._over()
            self._note(error, state)
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        # Before this batch counts, as an interrupt keeps it from being returned.
        while self.transfer is not None and self._is_room():
            self._send()
        self.position.consumed += 1
        if state is not None:
            self.position.keep(state)
        return batch

    def _over(self) -> Exception:
        if self._closed:
            return RuntimeError(f"This iterator cannot continue: {self._closed}.")
        if self.position.ended:
            return StopIteration()
        return RuntimeError(
            "A prefetching iterator does not work in a forked child of the process that made it. "
            "Call iter() on the loader in the child."
        )

    def _note(self, error: BaseException, state: Any) -> None:
        """Count a batch that raises, after which the next ``next()`` continues; at the end of the source, close.

        Who was interrupted has no batch, which a state has to keep for later, but the source has gone on: close.
        """
        if isinstance(error, StopIteration):
            self.position.ended = True
            if state is not None:
                self.position.keep(state)
            self._finalizer()
        elif isinstance(error, Exception):
            self.position.consumed += 1
        else:
            self._close_after(error)

    def _close_after(self, error: BaseException) -> None:
        self.close(f"a {type(error).__name__} stopped it while a batch was loaded")

    def _next_item(self) -> list[Any]:
        """Return the next item of the thread or, where there is none, of the source."""
        item = None if self.thread.background is None else self.thread.get(self._timeout)
        return self._load() if item is None else item

    def _load(self) -> list[Any]:
        """Load an item in this thread, and have another one load those after it, if there is something to gain."""
        thread, started = self.thread, time.perf_counter()
        self._loaded += 1
        try:
            # Known to draw nothing: load. Not known, and not the first item: find it out. Otherwise note what the item
            # draws from.
            if self._profile.uses_rng is False:
                item = thread.load(thread.take)
            elif self._profile.uses_rng is None and self._loaded > 1:
                item = self._load_watched()
            else:
                item = self._load_noting()
            # The first item is left out: processes start, orders are drawn, files are opened.
            if self._loaded > 1:
                self._seconds += time.perf_counter() - started
            if self._is_slow() and item[1] is None and self._may_have_a_thread():
                thread.start(self._depth)
        except BaseException as error:  # not of the batch, but beside it: the source has gone on, and the batch is lost
            self._close_after(error)
            raise
        return item

    def _load_noting(self) -> list[Any]:
        """Load an item that may draw random numbers, and keep what these follow from."""
        if self.thread.has_workers:  # which draw them; indices follow from what the sampler keeps
            return self.thread.load(self.thread.take)
        before = self.position.rng_before_latest
        with self.position.note():
            item = self.thread.load(self.thread.take)
        # "Latest" stays that of the last batch: a Trainer that fetched it ahead has it loaded again, the end is not.
        if isinstance(item[1], StopIteration):
            self.position.rng_before_latest = before
        return item

    def _load_watched(self) -> list[Any]:
        """Load the second item, and decide by it whether a thread may load."""
        if isinstance(self._dataset, SeededDataset) and not self.thread.has_workers:
            self._profile.decide_for_seeds()
            return self._load_noting()
        with GeneratorWatch(None if self.thread.has_workers else self._dataset) as watch:
            item = self._load_noting()
        if item[1] is None:
            self._profile.decide(watch.drew, self.thread.has_workers)
        return item

    def _is_slow(self) -> bool:
        """Whether a thread would gain something. The first few items have to be clearly slow."""
        return self._seconds >= MIN_BATCH_SECONDS * max(self._loaded, FEW_BATCHES)

    def _may_have_a_thread(self) -> bool:
        """Whether a thread may load the items after this one, and the limit and the source leave any."""
        may_load = self._loaded > 1 and self._profile.uses_rng is False and not is_loading()
        return may_load and self.thread.taken < self.thread.limit and not self.position.ended

    def _receive(self) -> tuple[Any, BaseException | None, Any]:
        """Take an item that was sent to the device; an error on the way is raised when the item's turn comes."""
        if not self._sent:
            self._send()
        batch, error, state = self._sent.popleft()
        if error is None:
            batch, error = self._moved(self.transfer.receive, batch)
        return batch, error, state

    def _send(self) -> None:
        batch, error, state = self._next_item()
        if error is None:
            batch, error = self._moved(self.transfer.send, batch)
        self._sent.append((batch, error, state))

    def _moved(self, move: Callable[[Any], Any], batch: Any) -> tuple[Any, Exception | None]:
        """Return a batch as a step of its transfer gives it, or the error; an interrupt waits for no turn."""
        try:
            return move(batch), None
        except Exception as error:
            return batch, error
        except BaseException as interrupt:
            self._close_after(interrupt)
            raise

    def _is_room(self) -> bool:
        """Whether one more item can be sent to the device without waiting for it."""
        sent, transfer = self._sent, self.transfer
        if transfer.stream() is None or len(sent) >= transfer.prefetch_batches or (sent and sent[-1][1] is not None):
            return False
        return self.ready()

    def ready(self) -> bool:
        """Tell whether one more item can be taken without waiting for the source."""
        if self.thread.background is not None:
            return self.thread.ready()
        # No thread because loads are quick: then this one can load an item without a wait that counts.
        return not self._is_slow() and self._may_have_a_thread()

    def close(self, because: str = "it was closed") -> None:
        """End the thread and throw away what it had ready. May be called twice.

        Args:
            because: The reason that a later ``next()`` gives.

        Warns:
            TurboWarning: If the source does not come back from its ``next()`` in time; the thread then ends later.
        """
        if not self.position.ended:
            self._closed = because
        self._sent.clear()
        self._finalizer()


def _dead_workers(source: Any, patience: float = 1.0) -> str:
    """Return the pids of worker processes that died, as soon as there are any: a killed one closes its files first."""
    end = time.monotonic() + patience
    while True:
        dead = [str(worker.pid) for worker in source._workers if not worker.is_alive()]
        if dead or time.monotonic() >= end:
            return ", ".join(dead)
        time.sleep(0.01)
