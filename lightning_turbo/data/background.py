"""A bounded background thread over any iterator, built on ``prefetch_generator.BackgroundGenerator``."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_turbo.data.producer import PARTED, Producer, Record
from lightning_turbo.data.randomness import LoadWatch, moved, shared_state
from lightning_turbo.data.resume import Place
from lightning_turbo.errors import TurboWarning

__all__ = ["BackgroundIterator", "check_count", "check_threads"]

# Seconds. How long closing waits for the item that the thread is just making.
PATIENCE = 20.0
# Of the time spent waiting, how much may go into looking whether random generators move; a look takes 0.1 ms.
LOOKING = 0.02


class _Work:
    """The part of an iterator that its threads and its finalizer may hold without keeping the iterator alive."""

    def __init__(
        self,
        source: Iterator[Any],
        stages: list[Callable[[Any], Any]],
        snapshot: Callable[[], Any] | None,
        dispose: Callable[[], None] | None,
    ) -> None:
        self.source = source
        self.stages = stages
        self.snapshot = snapshot
        self.dispose = dispose
        self.process = os.getpid()
        self.producer: Producer | None = None

    def take(self) -> Record:
        """Make one item; never raises."""
        return self.finish(self.draw())

    def draw(self) -> Record:
        """Take one item from the source; never raises. One thread at a time."""
        try:
            item = next(self.source)
            return Record(item, self.snapshot() if self.snapshot is not None else None)
        except StopIteration:
            return Record(end=True)
        except BaseException as error:
            return Record(error=error)

    def finish(self, record: Record) -> Record:
        """Do with one item what there is to do; never raises. Any thread."""
        if record.last or not self.stages:
            return record
        try:
            item = record.item
            for stage in self.stages:
                item = stage(item)
            return record._replace(item=item)
        except StopIteration:
            return Record(end=True)
        except BaseException as error:
            return record._replace(item=None, error=error)

    def end(self, patience: float = PATIENCE) -> None:
        """End the thread and let go of the source. Harmless when called twice or in a forked child."""
        if self.process != os.getpid():
            return
        producer, source = self.producer, self.source
        self.source, self.stages = iter(()), []
        if producer is not None:
            producer.halt(patience, drop=True)
            if producer.is_alive():
                producer.then = self.let_go  # it does the rest when it ends
                if not producer.inside():
                    warnings.warn(
                        f"A prefetching thread is still inside the next() of {type(source).__name__}, or at work on "
                        f"what that gave, after {patience:g} s; it ends after that item.",
                        TurboWarning,
                        stacklevel=2,
                    )
                return
        self.let_go()

    def let_go(self) -> None:
        """Do what is to be done once nobody is in the source any more."""
        dispose, self.dispose, self.snapshot, self.producer = self.dispose, None, None, None
        if dispose is not None:
            dispose()

    def wait(self) -> bool:
        """Wait for a thread that was told to end, perhaps by the garbage collector; tell whether it has ended."""
        producer = self.producer
        if producer is not None and not producer.inside():
            producer.join(PATIENCE)
        return producer is None or not producer.is_alive()


class BackgroundIterator(Iterator[Any]):
    """Iterate over ``source`` in a background thread that keeps some items ready.

    The first items are taken in the thread that asks for them: seeds that a sampler draws at its start come then from
    the same place as without this class, and a source that goes on drawing from the process-wide generators is found
    out and stays there (see ``LoadWatch``). So does one whose items take less than half a millisecond, with nothing to
    gain. Otherwise a thread takes the items ahead from then on, with others beside it that run ``stage`` if ``threads``
    asks for them. It ends with the source, on ``close``, when this object is collected, and when the interpreter ends.

    Errors of the source, ``KeyboardInterrupt`` and ``SystemExit`` among them, are raised here, at the item where they
    happened, with their own traceback. The thread takes over grad mode, inference mode and autocast from the thread
    that takes the first item.

    Args:
        source: Any iterator. Nobody else may use it meanwhile.
        prefetch_batches: How many items to keep ready, 1 or more. As many more as there are threads are in preparation.
        threads: How many threads call ``stage`` at the same time, 1 or more; items keep their order.
        stage: Called on each item in the background, for example to load what an index stands for.
        snapshot: Called after each item is taken from ``source``; ``place.state`` is what it gave for the last item
            handed out.
        wanted: How many items will be asked for, if that is known. No more than these are taken ahead.
        dispose: Called once when ``source`` is done with, for example to end its worker processes.
        watch: What is known of the source's randomness; one object per loader, so that it is found out once.
        place: Where the items that are handed out are counted.

    Raises:
        TypeError: If ``source`` is no iterator, or ``prefetch_batches`` or ``threads`` no integer.
        ValueError: If ``prefetch_batches`` or ``threads`` is below 1.

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
        threads: int = 1,
        stage: Callable[[Any], Any] | None = None,
        snapshot: Callable[[], Any] | None = None,
        wanted: int | None = None,
        dispose: Callable[[], None] | None = None,
        watch: LoadWatch | None = None,
        place: Place | None = None,
    ) -> None:
        if not hasattr(source, "__next__"):
            raise TypeError(
                f"{source!r} is no iterator: it has no __next__. Pass iter(...) of it; for a DataLoader take "
                "PrefetchLoader.of(loader), which can be iterated again."
            )
        self.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        self.threads = check_threads("threads", threads)
        self._watch = watch or LoadWatch()
        self._wanted = float("inf") if wanted is None else wanted
        self._taken = 0
        self._kept: deque[Record] = deque()
        self._first = True
        self._waiting = self._looking = 0.0
        self._closed = ""
        self.work = _Work(source, [] if stage is None else [stage], snapshot, dispose)
        self.place = place or Place()
        self._finalizer = weakref.finalize(self, self.work.end)

    def __iter__(self) -> BackgroundIterator:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise RuntimeError(f"This iterator cannot go on: {self._closed}.")
        if self.place.ended:
            raise StopIteration
        if self.work.process != os.getpid():
            raise RuntimeError(
                "A prefetching iterator does not work in a forked child of the process that made it. "
                "Call iter() on the loader in the child."
            )
        record = self._next()
        if record.error is not None:
            self.park()
            self.place.reached = record.state
            try:
                raise record.error
            finally:
                del record  # the error's traceback holds this frame
        if record.end:
            self.place.ended = True
            self._finalizer()
            raise StopIteration
        self.place.hand_out(record.state)
        return record.item

    def _next(self) -> Record:
        if self._kept:
            return self._kept.popleft()
        producer = self.work.producer
        if producer is not None and producer.stopping.is_set():  # parked in the middle of an item
            producer.join()
            self._part(producer, producer.rest())
            return self._next()
        if producer is not None:
            return self._wait(producer)
        first, self._first = self._first, False
        if not first and self._start():
            return self._wait(self.work.producer)
        watched = not first and self._watch.known is None
        before = shared_state() if watched else None
        private = self._watch.private() if watched else []
        started = time.perf_counter()
        record = self.work.take()
        self._taken += 1
        if not first:  # which may start worker processes
            self._watch.note(time.perf_counter() - started)
        if before is not None:
            self._watch.judge(moved(before, shared_state()))
            self._watch.judge_private(private)
        if not record.last:
            self._start()  # so that the next item is made while this one is used
        return record

    def _start(self) -> bool:
        """Begin to work ahead if there is something to gain; tell whether a thread does."""
        if self._watch.known is not False or not self._watch.slow or self._taken >= self._wanted:
            return False
        work, threads = self.work, 1 if self._watch.alone else self.threads
        left = self._wanted - self._taken
        work.producer = Producer(work.draw, work.finish, self.prefetch_batches, threads, self._watch, left)
        return True

    def start(self) -> bool:
        """Take the first items in the background too, from now on, if the source is known to be one for a thread.

        Returns:
            Whether a thread works ahead.
        """
        return self.work.producer is not None or (not self._closed and self._start())

    def finish(self) -> None:
        """Take the end of the source for handed out."""
        self.place.ended = True
        self.close()

    def _wait(self, producer: Any) -> Record:
        # This thread draws nothing while it waits: what moves now, the background thread moved.
        look = not producer.ready() and self._looking <= LOOKING * self._waiting
        times = [time.perf_counter()]
        before = shared_state() if look else None
        times.append(time.perf_counter())
        record = producer.next()
        times.append(time.perf_counter())
        names = moved(before, shared_state()) if before is not None else []
        self._waiting += times[2] - times[1]
        self._looking += time.perf_counter() - times[2] + times[1] - times[0]
        if record is PARTED:
            self._part(producer, [])
            return self._next()
        if producer.drew:
            names = [name for name in names if name != "torch"]  # at its turn
        if (names or producer.drew) and self._judge(producer, names):
            self.park() if names else producer.take_no_more()
        return record

    def _judge(self, producer: Producer, names: Sequence[str] = ()) -> bool:
        """Tell whether the source draws, by what moved in a wait and by the draws that a thread met."""
        late = bool(names) or producer.rushed or self._watch.unsure
        return self._watch.judge([*(["torch"] if producer.drew else []), *names], late=late)

    @property
    def ended(self) -> bool:
        """Whether the end of the source was handed out."""
        return self.place.ended

    def add_stage(self, stage: Callable[[Any], Any]) -> None:
        """Call ``stage`` on each item in the background, after those that are there. Before the first item only."""
        if stage not in self.work.stages:
            self.work.stages.append(stage)

    def ready(self) -> bool:
        """Tell whether the next item can be had without waiting for the source."""
        if self._kept:
            return True
        if self.work.producer is not None:
            return self.work.producer.ready()
        # One that loads fast where it is asked for never lets anybody wait.
        going = not (self._first or self._closed or self.place.ended or self._taken >= self._wanted)
        return going and self._watch.known is False and not self._watch.slow

    def park(self) -> bool:
        """End the thread and keep what it had ready; the next ``next()`` goes on, with a new thread if need be.

        Returns:
            Whether the thread has ended.
        """
        producer = self.work.producer
        if producer is None or self.work.process != os.getpid():
            return True
        ready = producer.halt(PATIENCE)
        if producer.is_alive():
            self._kept.extend(ready)
            return False
        self._part(producer, ready)
        return True

    def _part(self, producer: Producer, ready: list[Record]) -> None:
        """Take over what a thread that has ended had ready."""
        self._kept.extend(ready)
        self._taken += producer.taken
        self.work.producer = None
        self._judge(producer)

    def close(self, because: str = "it was closed") -> None:
        """End the thread and throw away what it had ready. May be called twice.

        Args:
            because: The reason that a later ``next()`` gives.

        Warns:
            TurboWarning: If the source does not come back from its ``next()`` in time; the thread then ends later.
        """
        if not self.place.ended:
            self._closed = because
        self._kept.clear()
        self._finalizer()


def check_count(name: str, value: Any, what: str = "batches to keep ready") -> int:
    """Return ``value`` if it is a whole number above zero.

    Args:
        name: Of the argument.
        value: What was given for it.
        what: What it is the number of.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is no integer; pass the number of {what}, 1 or more.")
    if value < 1:
        raise ValueError(f"{name}={value!r} is out of range; pass the number of {what}, 1 or more.")
    return value


def check_threads(name: str, value: Any) -> int:
    """Return ``value`` if it is a number of threads, see ``check_count``."""
    return check_count(name, value, "threads that load at the same time")
