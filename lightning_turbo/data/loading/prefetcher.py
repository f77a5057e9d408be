"""``PrefetchIterator``: one background thread over any iterator."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lightning_turbo._checks import check_count
from lightning_turbo.data.loading import locks
from lightning_turbo.data.loading.background import Background, Item
from lightning_turbo.data.loading.position import Position
from lightning_turbo.data.loading.thread_policy import LoadProfile, ThreadPolicy

__all__ = ["PrefetchIterator"]


class PrefetchIterator(Iterator[Any]):
    """Iterate over ``source`` in a background thread that keeps some items ready.

    The calling thread takes the first item: seeds that a sampler draws at its start come then from the same place as
    without this class. It goes on to take them as long as one takes less than half a millisecond, because a thread has
    nothing to gain there. The first item after that is watched, and a source that draws from the global RNGs stays in
    the calling thread too, with a ``NoEffectWarning``; so does one that is iterated by a prefetching thread. Otherwise
    a thread takes all others ahead. It ends with the source, on ``close``, when this object is collected, and when the
    interpreter ends. The logger ``lightning_turbo.data`` reports at level DEBUG whether a thread loads, and why not.

    Always: each item of the source is returned once, in order, and counted when it is returned or raises; whoever
    interrupts a load closes this object, because the source has gone on without the item.

    Errors of the source, ``KeyboardInterrupt`` and ``SystemExit`` among them, are raised here, at the item where they
    happened, with their own traceback. The thread takes over grad mode, inference mode and autocast from the thread
    that takes the item before its first.

    Args:
        source: Any iterator. Nobody else may use it meanwhile.
        prefetch_batches: How many items to keep ready, 1 or more; one more is in preparation.
        transfer: A ``DeviceTransfer`` that moves each item to a device; ``None`` for items as they are.
        timeout: How long to wait for an item, in seconds; 0 for as long as it takes.

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
    ) -> None:
        if not hasattr(source, "__next__"):
            raise TypeError(
                f"expected an iterator, got {source!r}, which has no __next__. Pass iter(...) of it; for a DataLoader "
                "take PrefetchLoader.of(loader), which can be iterated again."
            )
        background = Background(source)
        policy = ThreadPolicy(LoadProfile(), has_workers=background.has_workers)
        self._begin(background, policy, Position(), check_count("prefetch_batches", prefetch_batches), timeout)
        if transfer is not None:
            self.use(transfer)

    @classmethod
    def _of_loader(
        cls,
        background: Background,
        policy: ThreadPolicy,
        position: Position,
        *,
        prefetch_batches: int,
        transfer: Any,
        timeout: float,
    ) -> PrefetchIterator:
        """Return the iterator of a loader, which makes the parts itself and keeps some of them."""
        made = cls.__new__(cls)
        made._begin(background, policy, position, prefetch_batches, timeout)
        if transfer is not None:
            made.use(transfer)
        return made

    def _begin(
        self, background: Background, policy: ThreadPolicy, position: Position, depth: int, timeout: float
    ) -> None:
        self.background = background
        self._policy = policy
        self.position = position
        self._depth = depth
        self._timeout = timeout or None
        self.transfer: Any = None
        self._sent: deque[Item] = deque()  # items on their way to the device
        self._closed = ""
        self._finalizer = weakref.finalize(self, background.close)

    def use(self, transfer: Any) -> None:
        """Move the items to a device. Before the first of them."""
        self.transfer = transfer
        self.background.stages = transfer.stages

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Any:
        if self._closed or self.position.ended or self.background.process != locks.process:
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

    def _next_item(self) -> Item:
        """Return the next item of the thread or, where there is none, of the source."""
        item = None if self.background.thread is None else self.background.get(self._timeout)
        return self._load() if item is None else item

    def _load(self) -> Item:
        """Load an item in this thread, and have another one load those after it, if there is something to gain."""
        background, policy = self.background, self._policy
        began = time.perf_counter()
        try:
            item = background.load(background.take) if policy.is_settled else self._load_watched()
            is_left = item.error is None and background.taken < background.limit
            if policy.count(time.perf_counter() - began, is_left):
                background.start(self._depth, policy.keep_seconds)
        except BaseException as error:  # not of the batch, but beside it: the source has gone on, and the batch is lost
            self._close_after(error)
            raise
        try:
            return item
        finally:
            del item  # the traceback of its error leads to this frame, a cycle that only the collector would end

    def _load_watched(self) -> Item:
        """Load an item that is to be watched, or may draw random numbers."""
        watch = self._policy.watch(self.position.dataset_generators)
        if watch is None:
            return self._load_with_states()
        with watch:
            item = self._load_with_states()
        if item.error is None:
            self._policy.judge(watch)
        return item

    def _load_with_states(self) -> Item:
        """Load an item that may draw random numbers, and record the random states before it."""
        background, position = self.background, self.position
        if background.has_workers:  # which draw them; indices follow from what the sampler keeps
            return background.load(background.take)
        before = position.rng_before_latest
        with position.record():
            item = background.load(background.take)
        # "Latest" stays that of the last batch: a Trainer that fetched it ahead has it loaded again, the end is not.
        if isinstance(item.error, StopIteration):
            position.rng_before_latest = before
        return item

    def _receive(self) -> Item:
        """Return the next item that was sent to the device, in order. An error on the way is raised at its item."""
        if not self._sent:
            self._send()
        item = self._sent.popleft()
        return item if item.error is not None else self._moved(self.transfer.receive, item)

    def _send(self) -> None:
        item = self._next_item()
        self._sent.append(item if item.error is not None else self._moved(self.transfer.send, item))

    def _moved(self, move: Callable[[Any], Any], item: Item) -> Item:
        """Return the item after a step of its transfer, or with its error. An interrupt is raised at once."""
        try:
            return item._replace(batch=move(item.batch))
        except Exception as error:
            return item._replace(error=error)
        except BaseException as interrupt:
            self._close_after(interrupt)
            raise

    def _is_room(self) -> bool:
        """Whether one more item can be sent to the device without waiting for it."""
        sent, transfer = self._sent, self.transfer
        if transfer.stream() is None or len(sent) >= transfer.prefetch_batches or (sent and sent[-1].error is not None):
            return False
        return self.ready()

    @property
    def is_over(self) -> bool:
        """Whether it has come to its end, or was closed."""
        return bool(self._closed) or self.position.ended

    def ready(self) -> bool:
        """Tell whether one more item can be taken without waiting for the source."""
        background = self.background
        if background.thread is not None:
            return background.ready()
        is_left = background.taken < background.limit and not self.position.ended
        return is_left and self._policy.is_quick()

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
