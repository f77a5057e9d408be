"""``BackgroundIterator``: one background thread over any iterator, on ``prefetch_generator.BackgroundGenerator``."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prefetch_generator import BackgroundGenerator

from lightning_turbo._checks import check_count
from lightning_turbo._pytree import addresses_in, copy_batch
from lightning_turbo._random import changed_generators, shared_state
from lightning_turbo.data.pending import Pending
from lightning_turbo.data.thread_state import ThreadState
from lightning_turbo.errors import NoEffectWarning, TurboWarning

__all__ = ["BackgroundIterator", "LoadProfile", "Record"]

# Seconds. How long closing waits for the item that the thread is making.
PATIENCE = 20.0
# Seconds. A batch that is loaded faster than this is loaded where it is asked for: to hand it over from a thread costs
# 0.1 to 0.4 ms.
WORTH = 5e-4
# Seconds. How long the thread waits for a worker process before it looks whether anybody still wants the batch.
SLICE = 0.1
ENDED = (
    "The worker processes of this iterator were ended before it was, by its loader or by the Trainer that used it. "
    "Call iter() on the loader again."
)
# By whether worker processes load: what draws from the global RNGs, and what to do.
ADVICE = {
    False: (
        "Loading a batch",
        "Use num_workers=1 (a process has generators of its own), or draw from a generator of the dataset.",
    ),
    True: ("Drawing the indices of a batch", "Give the sampler a generator of its own."),
}
OPEN_FILES = (
    " Each tensor of a batch from a worker process holds an open file, and prefetch_batches batches are kept ready: "
    "lower prefetch_batches, or call torch.multiprocessing.set_sharing_strategy('file_system')."
)
OF_A_THREAD = (
    " If the dataset holds something that belongs to the thread that made it (a database connection, an event loop, a "
    "signal handler, threading.local), make that in the thread that asks for a sample, or take num_workers=1 or a "
    "plain DataLoader."
)
# Whether worker processes load, a pattern in the text of an error, and what to say before and after that.
HINTS = (
    (True, "Too many open files|ancdata", "", OPEN_FILES),
    (False, "thread", "In the background thread, which loads batches for prefetching: ", OF_A_THREAD),
)


class Record(NamedTuple):
    """What crosses the queue: an item with the state of the source after it, an error, or the end."""

    item: Any = None
    state: Any = None
    error: BaseException | None = None
    end: bool = False

    @property
    def last(self) -> bool:
        """Whether it holds no item: nothing is taken from the source after it."""
        return self.end or self.error is not None

    def then(self, change: Callable[[Any], Any], caught: type[BaseException] = BaseException) -> Record:
        """Return the record of what ``change`` makes of the item, or of its error; one without an item stays."""
        if self.last:
            return self
        try:
            return self._replace(item=change(self.item))
        except StopIteration:
            return Record(end=True)
        except caught as error:
            return self._replace(item=None, error=error)


class LoadProfile:
    """What the first batches of a loader showed. One object for each loader, so that it is found out once.

    Attributes:
        workers: Whether worker processes load, so that only a sampler can draw here.
        draws: Whether loading draws from the global RNGs; ``None`` before the second batch. Such a loader stays in the
            asking thread: in another one, the numbers would depend on timing.
        repeats: Whether batches come in the same memory again and again, so that each has to be copied.
        slow: Whether batches take ``WORTH`` seconds or more, so that a thread pays.
        alone: Whether the samples of a batch have to be loaded by one thread; ``None`` before the first batch.
    """

    def __init__(self) -> None:
        self.draws: bool | None = None
        self.alone: bool | None = None
        self.workers = self.repeats = self.slow = False
        self._batches, self._seconds = 0, 0.0

    @property
    def pays(self) -> bool:
        """Whether a thread may load, and something is gained by it."""
        return self.draws is False and self.slow

    @property
    def is_fast(self) -> bool:
        """Whether a thread may load and nothing is gained by it, because nobody waits for a batch."""
        return self.draws is False and not self.slow

    def measure(self, seconds: float) -> None:
        """Count a batch that took so many seconds in the asking thread."""
        self._batches += 1
        self._seconds += seconds
        # The first few have to be clearly slow: caches are cold then, and one number says little.
        self.slow = self.slow or self._seconds >= WORTH * max(self._batches, 4)

    def decide(self, drew: list[str]) -> None:
        """Decide, for good, whether a thread may load."""
        self.draws = bool(drew)
        if not drew:
            return
        what, remedy = ADVICE[self.workers]
        warnings.warn(
            f"{what} draws from the global RNG of {' and '.join(drew)}, which the model may use too: in a background "
            "thread the numbers would depend on timing, whatever the seed. Batches are loaded in the training thread "
            f"instead, as by a plain DataLoader, with nothing gained. {remedy}",
            NoEffectWarning,
            stacklevel=2,
        )


def _nothing() -> None:
    """Do nothing: what a loader has no need of."""


class _Loading:
    """The source and its thread: what the thread and the finalizer may hold without keeping the iterator alive.

    ``stopping`` ends the thread after the item that it is making; with ``dropped``, nobody wants what it has ready,
    and it disposes of the source itself. ``ahead`` items are begun before the first of them is finished, for a source
    that gives ``Pending`` ones, and ``rest`` ends the threads behind those. ``snapshot`` is called after each item, and
    ``dispose`` once, when the source is done with; ``turn`` is held while an item is taken.
    """

    def __init__(
        self,
        source: Iterator[Any],
        profile: LoadProfile,
        depth: int,
        *,
        ahead: int = 0,
        rest: Callable[[], None] = _nothing,
        snapshot: Callable[[], Any] = _nothing,
        dispose: Callable[[], None] = _nothing,
        turn: Any = None,
        skip: int = 0,
    ) -> None:
        self.source: Any = source
        self.has_workers = hasattr(source, "_try_get_data")  # torch's own iterator, of those over worker processes
        self.profile, self.depth, self.ahead, self.skip = profile, depth, ahead, skip
        self.rest, self.snapshot, self.dispose = rest, snapshot, dispose
        self.turn = turn or contextlib.nullcontext()
        self.stages: list[Callable[[Any], Any]] = []
        self.process = os.getpid()
        self.taken = 0
        self.thread: Any = None
        self.stopping = threading.Event()
        self.dropped = False

    def load_here(self) -> Record:
        """Load one item in the calling thread; never raises."""
        record = self._fetch(self._next).then(self._finish)
        elsewhere = self.profile.workers or self.ahead  # in a worker process, or a thread of a pool
        return _explain(record, self.profile.workers) if elsewhere else record

    def _fetch(self, next_item: Callable[[], Any]) -> Record:
        self.taken += 1
        try:
            with self.turn:
                while self.skip:
                    self.skip -= 1
                    next_item()
                item = next_item()
                if self.profile.repeats:
                    item = copy_batch(item)
            return Record(item, self.snapshot())
        except StopIteration:
            return Record(end=True)
        except BaseException as error:
            return Record(error=error)

    def _finish(self, item: Any) -> Any:
        item = item.result() if isinstance(item, Pending) else item
        for stage in self.stages:
            item = stage(item)
        return item

    def start(self, limit: float) -> None:
        """Start the thread, which takes items until so many were taken in all."""
        self.stopping.clear()
        self.thread = BackgroundGenerator(self._produce(ThreadState(), limit), max_prefetch=self.depth)
        self.thread.name = f"lightning_turbo-prefetch-{id(self.thread):x}"

    def _produce(self, state: ThreadState, limit: float) -> Iterator[list[Record]]:
        """Yield records, each in a list that its taker empties: the thread holds on to what it was given last."""
        state.enter()
        coming = self._fetch_all(limit)
        begun = deque(itertools.islice(coming, self.ahead + 1))
        while begun and not self.dropped:  # then nobody makes room for it
            yield [_explain(begun.popleft().then(self._finish), self.profile.workers)]
            begun.extend(itertools.islice(coming, 1))
        self.rest()
        if self.dropped:
            _empty(self.thread)  # so that there is room for the mark at the end, for which nobody waits
            self.let_go()

    def _fetch_all(self, limit: float) -> Iterator[Record]:
        """Fetch records up to the last of the source, until so many were taken in all or the thread is stopped."""
        next_item, last = self._wait_for_workers if self.has_workers else self._next, False
        while not last and self.taken < limit and not self.stopping.is_set():
            box = [self._fetch(next_item)]
            last = box[0].last
            yield box.pop()  # which is kept by nobody here

    def _next(self) -> Any:
        """Take an item, unless somebody, such as a Trainer, has ended the worker processes of torch's iterator.

        It would leave out the batches that they had not sent yet, and return a later one or end before its time.
        """
        try:
            item = next(self.source)
        except Exception as error:
            ends = isinstance(error, StopIteration)
            if self._are_workers_ended() and (self.source._persistent_workers or not ends):
                raise RuntimeError(ENDED) from error
            raise
        if self._are_workers_ended():
            raise RuntimeError(ENDED)
        return item

    def _are_workers_ended(self) -> bool:
        return self.has_workers and self.source._shutdown

    def _wait_for_workers(self) -> Any:
        """Take an item in the thread, while another one may end the worker processes.

        Left to itself the wait would never end. A wait that times out takes nothing, and torch looks for dead processes
        each time.
        """
        source = self.source
        own, source._timeout = source._timeout, SLICE
        try:
            while True:
                try:
                    return self._next()
                except Exception as error:
                    if not self._waits_on_after(error):
                        raise
        finally:
            source._timeout = own

    def _waits_on_after(self, error: Exception) -> bool:
        """Whether a wait for a worker process only timed out; raises an error that names what happened to it."""
        late = str(error).startswith("DataLoader timed out after")
        if late and self.dropped:
            raise StopIteration
        dead = _dead_workers(self.source) if isinstance(error, (OSError, EOFError)) else ""
        if dead:
            raise RuntimeError(f"DataLoader worker (pid(s) {dead}) exited unexpectedly") from error
        return late

    def get(self, timeout: float | None) -> Record | None:
        """Wait for a record of the thread; ``None`` if there is no thread, or it has ended."""
        if self.thread is None:
            return None
        try:
            going, box = self.thread.queue.get(timeout=timeout)
        except queue.Empty:
            raise RuntimeError(f"DataLoader timed out after {timeout} seconds") from None
        if going:
            return box.pop()
        self.thread.join()
        self.thread = None
        return None

    def ready(self) -> bool:
        """Tell whether the thread has a record ready."""
        with self.thread.queue.mutex:
            return bool(self.thread.queue.queue) and self.thread.queue.queue[0][0] is True

    def park(self) -> tuple[list[Record], bool]:
        """End the thread; return what it had ready, in order, and whether it has ended.

        If it has not, it is still at work on an item, and ``get`` gives the rest.
        """
        self.stopping.set()
        kept: list[Record] = []
        with contextlib.suppress(RuntimeError):  # of get, when its time is over
            while (record := self.get(PATIENCE)) is not None:
                kept.append(record)
        return kept, self.thread is None

    def end(self) -> None:
        """End the thread and dispose of the source. May be called twice, by the collector, and in a forked child."""
        if self.process != os.getpid():
            return
        self.dropped = True
        self.stopping.set()
        if not self._is_running():
            self.let_go()
        elif self.thread is not threading.current_thread():  # which may hold the lock of its own queue
            _empty(self.thread)
            # The collector may run in another prefetching thread, which the one that ends may wait for.
            if not isinstance(threading.current_thread(), BackgroundGenerator) and not self.join():
                warnings.warn(
                    f"A prefetching thread still waits for the next() of {type(self.source).__name__} after "
                    f"{PATIENCE:g} s. It ends after that item.",
                    TurboWarning,
                    stacklevel=2,
                )

    def let_go(self) -> None:
        """Release the source. Once nobody is in it any more."""
        dispose, self.dispose, self.snapshot = self.dispose, _nothing, _nothing
        self.source, self.stages = iter(()), []
        self.rest()
        dispose()

    def join(self) -> bool:
        """Wait for a thread that was told to end, perhaps by the garbage collector; return whether it has."""
        if self.thread is not None:
            self.thread.join(PATIENCE)
        ended = not self._is_running()
        if ended and self.dropped:
            self.let_go()
        return ended

    def _is_running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class BackgroundIterator(Iterator[Any]):
    """Iterate over ``source`` in a background thread that keeps some items ready.

    The first two items are taken in the thread that asks for them: seeds that a sampler draws at its start come then
    from the same place as without this class, and a source that draws from the global RNGs again is found out and stays
    there, with a ``NoEffectWarning``. So does one whose items take less than half a millisecond, with nothing to gain.
    Otherwise a thread takes all others ahead. It ends with the source, on ``close``, when this object is collected, and
    when the interpreter ends.

    Errors of the source, ``KeyboardInterrupt`` and ``SystemExit`` among them, are raised here, at the item where they
    happened, with their own traceback. The thread takes over grad mode, inference mode and autocast from the thread
    that takes the first item.

    Args:
        source: Any iterator. Nobody else may use it meanwhile.
        prefetch_batches: How many items to keep ready, 1 or more; one more is in preparation.
        profile: What is known of the source, if anything is.
        wanted: How many items will be asked for at most. No more than these are taken ahead.
        timeout: How long to wait for an item that is asked for, in seconds; 0 for as long as it takes.
        **settings: Of ``_Loading``, for the loaders of this package.

    Raises:
        TypeError: If ``source`` is not an iterator, or ``prefetch_batches`` not an integer.
        ValueError: If ``prefetch_batches`` is below 1.

    Example:
        >>> squares = BackgroundIterator((n * n for n in range(4)), prefetch_batches=2)
        >>> list(squares)
        [0, 1, 4, 9]
    """

    def __init__(
        self,
        source: Iterator[Any],
        *,
        prefetch_batches: int = 8,
        profile: LoadProfile | None = None,
        wanted: float = float("inf"),
        timeout: float = 0,
        **settings: Any,
    ) -> None:
        if not hasattr(source, "__next__"):
            raise TypeError(
                f"expected an iterator, got {source!r}, which has no __next__. Pass iter(...) of it; for a DataLoader "
                "take PrefetchLoader.of(loader), which can be iterated again."
            )
        check_count("prefetch_batches", prefetch_batches)
        self._profile = profile or LoadProfile()
        self._loading = _Loading(source, self._profile, prefetch_batches, **settings)
        self._wanted = wanted
        self._timeout = timeout or None
        self._kept: deque[Record] = deque()
        self._none_loaded_here = True
        self._previous: Any = None
        self._closed = ""
        self.ended = False
        self._finalizer = weakref.finalize(self, self._loading.end)

    def __iter__(self) -> BackgroundIterator:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise RuntimeError(f"This iterator cannot continue: {self._closed}.")
        if self.ended:
            raise StopIteration
        if self._loading.process != os.getpid():
            raise RuntimeError(
                "A prefetching iterator does not work in a forked child of the process that made it. "
                "Call iter() on the loader in the child."
            )
        record = self._next_record()
        try:
            return self.hand_out(record)
        finally:
            del record  # the traceback of an error holds this frame

    def hand_out(self, record: Record) -> Any:
        """Return the item of a record, or raise its error or the end."""
        if record.error is not None:
            self.park()  # whoever keeps the error keeps this object
            try:
                raise record.error
            finally:
                del record  # else the traceback would hold what holds it
        if record.end:
            self.ended = True
            self._finalizer()
            raise StopIteration
        return record.item

    def _next_record(self) -> Record:
        return self._take()

    def _take(self) -> Record:
        """Take a record from what was kept, from the thread, or from the source itself."""
        while True:
            record = self._kept.popleft() if self._kept else self._loading.get(self._timeout)
            if record is not None:
                return record
            if self._none_loaded_here or not self._start():
                return self._load()

    def _load(self) -> Record:
        """Load one item in this thread, and let a thread take those after it, if there is something to gain."""
        profile = self._profile
        if self._none_loaded_here:
            record = self._loading.load_here()  # which may start worker processes
        elif profile.draws is None:
            record = self._load_watched()
        else:
            record = self._load_timed()
        self._none_loaded_here = False
        # Kept until the second item is there, as memory that was given back may be given out again.
        self._previous = record.item if profile.draws is None else None
        if not record.last:
            self._start()  # so that the next item is made while this one is used
        return record

    def _load_timed(self) -> Record:
        started = time.perf_counter()
        record = self._loading.load_here()
        self._profile.measure(time.perf_counter() - started)
        return record

    def _load_watched(self) -> Record:
        """Load the second item, and decide by it what a thread may do."""
        profile, before = self._profile, shared_state()
        record = self._load_timed()
        profile.decide(changed_generators(before, shared_state()))
        profile.repeats = bool(addresses_in(self._previous) & addresses_in(record.item))
        return record._replace(item=copy_batch(record.item)) if profile.repeats else record

    def _start(self) -> bool:
        """Start the thread if there is something to gain; tell whether there is one."""
        if not (self._profile.pays and self._has_more()):
            return False
        self._loading.start(self._wanted)
        return True

    def _has_more(self) -> bool:
        """Whether more items are wanted."""
        return self._loading.taken < self._wanted and not self._loading.dropped

    def start(self) -> None:
        """Take the first items in the background too, from now on, if the source is known to be one for a thread."""
        if self._loading.thread is None:
            self._start()

    def add_stage(self, stage: Callable[[Any], Any]) -> None:
        """Call ``stage`` on each item in the background. Before the first item only."""
        self._loading.stages.append(stage)

    def ready(self) -> bool:
        """Tell whether the next item can be had without waiting for the source."""
        if self._kept:
            return True
        if self._loading.thread is not None:
            return self._loading.ready()
        return not self._none_loaded_here and self._profile.is_fast and self._has_more()

    def park(self) -> bool:
        """End the thread and keep what it had ready; the next ``next()`` continues, with a new thread if need be.

        Returns:
            Whether the thread has ended.
        """
        loading = self._loading
        if loading.process != os.getpid():
            return True
        kept, ended = loading.park()
        self._kept.extend(kept)
        if ended:
            loading.rest()
        return ended

    def close(self, because: str = "it was closed") -> None:
        """End the thread and throw away what it had ready. May be called twice.

        Args:
            because: The reason that a later ``next()`` gives.

        Warns:
            TurboWarning: If the source does not come back from its ``next()`` in time; the thread then ends later.
        """
        if not self.ended:
            self._closed = because
        self._kept.clear()
        self._finalizer()


def _dead_workers(source: Any, patience: float = 1.0) -> str:
    """Return the pids of worker processes that died, as soon as there are any: a killed one closes its files first."""
    end = time.monotonic() + patience
    while True:
        dead = [str(worker.pid) for worker in source._workers if not worker.is_alive()]
        if dead or time.monotonic() >= end:
            return ", ".join(dead)
        time.sleep(0.01)


def _empty(thread: Any) -> None:
    """Throw away what a thread has ready."""
    with contextlib.suppress(queue.Empty):
        while True:
            _, box = thread.queue.get_nowait()
            if isinstance(box, list):
                box.clear()


def _explain(record: Record, workers: bool) -> Record:
    """Add to an error what prefetching has to do with it, where it has."""
    error = record.error
    for with_workers, words, before, after in HINTS:
        if isinstance(error, Exception) and workers == with_workers and re.search(words, str(error)):
            _add(error, before, after)
    return record


def _add(error: Exception, before: str, after: str) -> None:
    """Add to the text of an error, where its class lets us."""
    if len(error.args) == 1:
        error.args = (f"{before}{str(error).rstrip('.')}.{after}",)
    elif isinstance(error, OSError):
        error.strerror = f"{error.strerror}.{after}"
