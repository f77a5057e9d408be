"""The thread behind a ``BackgroundIterator``, its helpers, and what they hand over."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from prefetch_generator import BackgroundGenerator

from lightning_turbo.data.randomness import LoadWatch, SharedDraws, torch_state
from lightning_turbo.data.surroundings import Surroundings, short_switches

__all__ = ["PARTED", "Producer", "Record", "give_up"]

# Seconds. How long a waiting side sleeps before it looks whether the other one is still there.
SLICE = 0.5
# Seconds. How long a draw waits for its turn: long enough for a validation run, and an end to any other reason.
PATIENCE = 60.0

_here = threading.local()  # .turn: the turn of this thread, if it works ahead


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


# What a thread hands over last that took all that it was to take, and did not see the end.
PARTED = Record()


class _Dropped(BaseException):
    """Ends an item that nobody will ask for."""


def give_up() -> None:
    """End the item at hand, if this is a thread that works ahead and nobody will ask for it."""
    turn = getattr(_here, "turn", None)
    if turn is not None and turn.producer.dropped:
        raise _Dropped


class _Turn:
    """Makes items in one thread, in which draws from a process-wide generator of torch wait for the item's turn.

    It comes when the item is asked for: the asking thread stands still then, and every draw happens when a loader
    without threads would draw.
    """

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.process = os.getpid()
        self.number = 0
        self.draws = SharedDraws(self.wait)

    def make(self, number: int, function: Callable[..., Record], *args: Any) -> Record:
        """Call ``function`` for the item of that number."""
        _here.turn, self.number = self, number
        with self.draws if self.producer.watch.looking else contextlib.nullcontext():
            return function(*args)

    def wait(self) -> None:
        """Wait until the item is asked for; in vain if the thread is to stop, or nobody asks for a long time."""
        if os.getpid() != self.process:  # a worker that was forked in this thread, with generators of its own
            return
        producer = self.producer
        while threading.current_thread() is producer and producer.begun:
            producer.deliver()  # they come first, and nobody else would
        end = time.monotonic() + PATIENCE
        while producer.asked <= self.number and not producer.stopping.is_set() and time.monotonic() < end:
            time.sleep(1e-3)
        give_up()
        producer.drew = True
        if producer.asked <= self.number:
            producer.rushed = True
        elif producer.asker is not None:
            producer.asker.wait()  # who asks works ahead too


class _Helper(threading.Thread):
    """A thread that finishes items, several of them beside one another, for the thread that takes them."""

    def __init__(self, orders: queue.SimpleQueue[Any], turn: _Turn) -> None:
        super().__init__(name=f"lightning_turbo-prefetch-{id(self):x}", daemon=True)
        self.orders = orders
        self.turn = turn
        self.surroundings = Surroundings()
        self.start()

    def run(self) -> None:
        self.surroundings.run(self._run)

    def _run(self) -> None:
        while (order := self.orders.get()) is not None:
            future, *work = order
            future.set_result(self.turn.make(*work))
            del order, future, work  # else the thread would keep a batch alive until its next one


class Producer(BackgroundGenerator):
    """The thread: takes records until the end, an error, or until it is told to stop.

    Args:
        draw: Takes a record; called by this thread alone, never raises.
        finish: Does what is left to do with a record; never raises.
        depth: How many records to keep ready.
        threads: How many threads call ``finish`` at the same time.
        watch: What is known of the loader; tells whether draws are looked for.
        wanted: How many records to take, infinity for all. ``PARTED`` follows them.

    Attributes:
        asked: How many records were asked for.
        taken: How many records were taken.
        asker: The turn of the thread that asks, if that works ahead itself.
        drew: Whether a draw was met.
        rushed: Whether a draw did not get its turn.
        then: What to do when the thread ends.
    """

    def __init__(
        self,
        draw: Callable[[], Record],
        finish: Callable[[Record], Record],
        depth: int,
        threads: int,
        watch: LoadWatch,
        wanted: float,
    ) -> None:
        self.draw = draw
        self.finish = finish
        self.threads = threads
        self.watch = watch
        self.wanted = wanted
        self.asked = self.taken = 0
        self.asker: _Turn | None = None
        self.drew = self.rushed = self.dropped = False
        self.then: Callable[[], None] | None = None
        self.stopping = threading.Event()
        self.surroundings = Surroundings()
        self.helpers: list[_Helper] = []
        self.begun: deque[Future[Record]] = deque()
        self.left: list[Record] = []
        self.state = torch_state()
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
        turn = _Turn(self)
        last = False
        try:
            self.helpers.extend(_Helper(orders, _Turn(self)) for _ in range(self.threads if self.threads > 1 else 0))
            with short_switches():
                while not self.stopping.is_set():
                    while len(self.begun) < self.threads and not last and self.taken < self.wanted:
                        record = turn.make(self.taken, self.draw)
                        last, future = record.last, Future()
                        if self.helpers and not last:
                            orders.put((future, self.taken, self.finish, record))
                        else:
                            future.set_result(turn.make(self.taken, self.finish, record))
                        self.begun.append(future)
                        self.taken += 1
                        del record, future  # else a batch would stay alive while the next is made, or an error for ever
                    if not self.begun:
                        self._put(PARTED)
                        break
                    if self.deliver():
                        break
            self.left.extend(each.result() for each in self.begun)
        finally:
            self.begun.clear()
            for _ in self.helpers:
                orders.put(None)
            for helper in self.helpers:
                helper.join()
            if self.then is not None:
                self.then()

    def deliver(self) -> bool:
        """Hand over the item that was begun first; tell whether nothing follows it. For the thread itself."""
        record = self.begun.popleft().result()
        if self.left or not self._put(record):  # nothing overtakes what found no room
            self.left.append(record)
        return record.last

    def _put(self, record: Record) -> bool:
        """Wait for room; tell whether there was any before the thread was told to stop."""
        while True:
            try:
                self.queue.put(record, timeout=SLICE)
                return True
            except queue.Full:
                if self.stopping.is_set():
                    return False

    def ready(self) -> bool:
        """Tell whether there is a record to be had without waiting."""
        with self.queue.mutex:
            return bool(self.queue.queue) and self.queue.queue[0] is not PARTED

    def take_no_more(self) -> None:
        """Let the thread hand over what it has begun, each at its turn, and end."""
        self.wanted = 0

    def next(self) -> Record:
        """Wait for a record, as long as the thread lives."""
        self.asker = getattr(_here, "turn", None)
        self.asked += 1
        try:
            record = self._get()
        except BaseException:
            self.asked -= 1  # Ctrl-C
            raise
        # Not in the thread: who waits for torch's generator there holds the interpreter's lock.
        before, self.state = self.state, torch_state()
        self.watch.note_state(not torch.equal(before, self.state))
        return record

    def _get(self) -> Record:
        while True:
            try:
                return self.queue.get(timeout=SLICE)
            except queue.Empty:
                if not self.is_alive() and self.queue.empty():
                    return Record(error=RuntimeError("The prefetching thread ended without a word."))

    __next__ = next

    def halt(self, patience: float, drop: bool = False) -> list[Record]:
        """End the thread and return, in order, what it had ready.

        Args:
            patience: How long to wait for the thread, in seconds.
            drop: Whether nobody wants what it is making; an item that waits for its turn to draw is given up then.

        Returns:
            The records that were not handed out. When the thread is still alive after ``patience`` seconds it ends by
            itself after the items that it is making, and ``rest`` has them then.
        """
        self.dropped = drop
        self.stopping.set()
        if self.inside():  # which may hold the lock of the queue
            return []
        ready = self._drain()
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
                return [record for record in ready if record is not PARTED]
