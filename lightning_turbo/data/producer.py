"""The thread behind a ``BackgroundIterator``, its helpers, and what they hand over."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from prefetch_generator import BackgroundGenerator

from lightning_turbo.data.surroundings import Surroundings, short_switches

__all__ = ["Producer", "Record"]

# Seconds. How long a waiting side sleeps before it looks whether the other one is still there.
SLICE = 0.5


class Record(NamedTuple):
    """What crosses the queue: an item with the state after it, an error, or (both None) the end."""

    item: Any = None
    state: Any = None
    error: BaseException | None = None
    end: bool = False

    @property
    def last(self) -> bool:
        """Whether nothing is taken after it."""
        return self.end or self.error is not None


class _Helper(threading.Thread):
    """A thread that finishes items, several of them beside one another, for the thread that takes them."""

    def __init__(self, orders: queue.SimpleQueue[Any]) -> None:
        super().__init__(name=f"lightning_turbo-prefetch-{id(self):x}", daemon=True)
        self.orders = orders
        self.surroundings = Surroundings()
        self.start()

    def run(self) -> None:
        self.surroundings.run(self._run)

    def _run(self) -> None:
        while (order := self.orders.get()) is not None:
            future, finish, record = order
            future.set_result(finish(record))
            del order, future, record  # else the thread would keep a batch alive until its next one


class Producer(BackgroundGenerator):
    """The thread: takes records until the end, an error, or until it is told to stop.

    Args:
        draw: Takes a record; called by this thread alone, never raises.
        finish: Does what is left to do with a record; never raises.
        depth: How many records to keep ready.
        threads: How many threads call ``finish`` at the same time.
    """

    def __init__(
        self, draw: Callable[[], Record], finish: Callable[[Record], Record], depth: int, threads: int
    ) -> None:
        self.draw = draw
        self.finish = finish
        self.threads = threads
        self.stopping = threading.Event()
        self.surroundings = Surroundings()
        self.helpers: list[_Helper] = []
        self.left: list[Record] = []
        super().__init__(iter(()), max_prefetch=depth)  # starts the thread

    def start(self) -> None:
        """Start the thread under a name that tells whose it is."""
        self.name = f"lightning_turbo-prefetch-{id(self):x}"
        super().start()

    def run(self) -> None:
        """Work until the end, in the modes of the thread that made this object."""
        self.surroundings.run(self._run)

    def _run(self) -> None:
        orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        begun: deque[Future[Record]] = deque()
        last = False
        try:
            self.helpers.extend(_Helper(orders) for _ in range(self.threads if self.threads > 1 else 0))
            with short_switches():
                while not self.stopping.is_set():
                    while len(begun) < self.threads and not last:
                        record = self.draw()
                        last = record.last
                        begun.append(Future())
                        if self.helpers and not last:
                            orders.put((begun[-1], self.finish, record))
                        else:
                            begun[-1].set_result(self.finish(record))
                    record = begun.popleft().result()
                    over = record.last
                    if not self._put(record):
                        self.left.append(record)
                    del record  # else the thread would keep a batch alive while it makes the next, or an error for ever
                    if over:
                        break
            self.left.extend(each.result() for each in begun)
        finally:
            for _ in self.helpers:
                orders.put(None)
            for helper in self.helpers:
                helper.join()

    def _put(self, record: Record) -> bool:
        """Wait for room; tell whether there was any before the thread was told to stop."""
        while True:
            try:
                self.queue.put(record, timeout=SLICE)
                return True
            except queue.Full:
                if self.stopping.is_set():
                    return False

    def next(self) -> Record:
        """Wait for a record, as long as the thread lives."""
        while True:
            try:
                return self.queue.get(timeout=SLICE)
            except queue.Empty:
                if not self.is_alive() and self.queue.empty():
                    return Record(error=RuntimeError("The prefetching thread ended without a word."))

    __next__ = next

    def halt(self, patience: float) -> list[Record]:
        """End the thread and return, in order, what it had ready.

        Returns:
            The records that were not handed out. When the thread is still alive after ``patience`` seconds it ends by
            itself after the items that it is making, and ``rest`` has them then.
        """
        self.stopping.set()
        ready = self._drain()
        if not self.inside():
            self.join(patience)
        return ready if self.is_alive() else ready + self.rest()

    def inside(self) -> bool:
        """Whether it is one of these threads that asks, as the garbage collector may run anywhere."""
        return threading.current_thread() in (self, *self.helpers)

    def rest(self) -> list[Record]:
        """Return, in order, what the thread had ready when it ended."""
        left, self.left = self.left, []
        return self._drain() + left

    def _drain(self) -> list[Record]:
        ready = []
        while True:
            try:
                ready.append(self.queue.get_nowait())
            except queue.Empty:
                return ready
