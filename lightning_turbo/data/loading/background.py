"""``Background``: the thread that takes batches from an iterator, on ``prefetch_generator.BackgroundGenerator``."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from prefetch_generator import BackgroundGenerator

from lightning_turbo.data.loading import locks
from lightning_turbo.data.loading.hand_over import PackedBatch
from lightning_turbo.data.loading.thread_state import ThreadState, tell_of_thread
from lightning_turbo.data.loading.torch_workers import has_workers, take_batch, take_in_slices, timeout_message
from lightning_turbo.errors import TurboWarning

__all__ = ["Background", "Item"]

# Seconds. How long close() waits for the batch that the thread is making.
JOIN_TIMEOUT = 20.0
_logger = logging.getLogger("lightning_turbo.data")


class Item(NamedTuple):
    """What a load gave.

    Attributes:
        batch: The batch; ``None`` where there is an error.
        error: What was raised instead, ``StopIteration`` at the end of the source.
        state: What the source said of itself after the batch, if it was asked.
    """

    batch: Any
    error: BaseException | None = None
    state: Any = None


class Background:
    """The source of a ``PrefetchIterator``, and the thread that takes batches from it.

    The iterator starts the thread when loading turns out to be slow. The thread ends with the source, after an error
    (whoever keeps the error keeps the iterator), after ``limit`` batches, and on ``close``. It knows nothing of the
    iterator, whose end closes it. Always: one thread at a time takes from the source, in order, and at most ``depth +
    1`` batches are loaded and not taken yet.

    Args:
        source: Any iterator.
        lock: What is held while a batch is taken; not asked for where worker processes load, as no dataset code runs
            in this process then.
        limit: How many batches are taken ahead in all, at most; 0 for no thread.
        snapshot: Called after each batch; what it returns is the ``state`` of the item.
        on_close: Called once, when the source is done with.
        patience: Seconds that ``close`` waits for the batch that the thread is making; ``None`` for ``JOIN_TIMEOUT``.
    """

    def __init__(
        self,
        source: Iterator[Any],
        lock: locks.LoadingLock = locks.TURNS,
        limit: float = float("inf"),
        snapshot: Callable[[], Any] | None = None,
        on_close: Callable[[], None] | None = None,
        patience: float | None = None,
    ) -> None:
        self.source: Any = source
        self.has_workers = has_workers(source)
        self.lock: Any = contextlib.nullcontext() if self.has_workers else lock
        self.limit = limit
        self.snapshot = snapshot
        self.on_close = on_close
        self.patience = JOIN_TIMEOUT if patience is None else patience
        self.stages: list[Callable[[Any], Any]] = []
        self.taken = 0
        self.has_found_end = False
        self.process = locks.process
        self.thread: Any = None  # the BackgroundGenerator; None again after its last item
        # The collector may call ``close`` in any thread at any line, in the one that waits for room too. A lock of
        # Python's would then be asked for by who holds it; a SimpleQueue and a bool have none.
        self.is_closed = False
        self.room = queue.SimpleQueue[None]()  # an entry for each batch that the thread may still load

    def load(self, take: Callable[[], Any]) -> Item:
        """Load one batch, in whichever thread calls this; its errors are part of the item."""
        self.taken += 1
        try:
            with self.lock:
                batch = take()
                state = None if self.snapshot is None else self.snapshot()
            for stage in self.stages:
                batch = stage(batch)
            if isinstance(batch, PackedBatch):
                return Item(batch.open(), None, batch.told if state is None else state)
            return Item(batch, None, state)
        except StopIteration as error:
            self.has_found_end = True
            return Item(None, error, None if self.snapshot is None else self.snapshot())
        except BaseException as error:
            return Item(None, error)

    def take(self) -> Any:
        """Take a batch from the source, in the calling thread."""
        return take_batch(self.source) if self.has_workers else next(self.source)

    def _take_in_slices(self) -> Any:
        return take_in_slices(self.source, lambda: self.is_closed)

    def start(self, depth: int, measured: Callable[[float], None]) -> None:
        """Start the thread, which keeps ``depth`` batches ready, in the modes of the calling one.

        When it ends, it calls ``measured`` with the seconds that a batch took.

        It has no room before it is known here. Otherwise an interrupt, which comes while the start is waited for, would
        leave one behind that takes batches and that nobody ends.
        """
        self.room = queue.SimpleQueue()
        thread = self.thread = BackgroundGenerator(self._boxes(ThreadState(), measured), max_prefetch=0)
        thread.name = f"lightning_turbo-prefetch-{id(thread):x}"
        for _ in range(depth + 1):
            self.room.put(None)

    def _boxes(self, modes: ThreadState, measured: Callable[[float], None]) -> Iterator[list[Item]]:
        """Yield the items of the thread, each in a list that its taker empties.

        ``BackgroundGenerator`` holds on to what it passed on last. That would keep a batch longer than its taker does
        and, with an error, through its traceback the iterator.
        """
        modes.enter()
        locks.load_in_this_thread()
        if self.has_workers and self.stages:
            # As in torch's own thread that pins memory: a copy is not to take all cores. Dataset code in this thread
            # keeps the number of the calling thread, on which sums depend.
            torch.set_num_threads(1)
        take = self._take_in_slices if self.has_workers else self.take
        _logger.debug("thread started: it takes the batches of %s from number %d on", type(self.source), self.taken)
        first = self.taken
        seconds = 0.0
        try:
            while self.taken < self.limit:
                self.room.get()
                if self.is_closed:
                    return
                began = time.perf_counter()
                box = [self.load(take)]
                seconds += time.perf_counter() - began
                is_last = box[0].error is not None
                if is_last and not self.has_workers:
                    tell_of_thread(box[0].error)
                yield box
                if is_last:
                    return
        finally:
            _logger.debug("thread ended: %d batches were taken of %s", self.taken, type(self.source))
            if self.taken > first:
                measured(seconds / (self.taken - first))
            # Who closed this may not have waited for this thread, see ``_is_over``; a second release does nothing.
            if self.is_closed:
                self._release()

    def get(self, timeout: float | None) -> Item | None:
        """Return the next item of the thread; ``None`` once it has ended and all of them were returned."""
        thread = self.thread  # which another thread may take away that closes this
        if thread is None:
            return None
        # BackgroundGenerator puts (True, box) for each box, and (False, ...) once the generator has ended.
        try:
            success, box = thread.queue.get(timeout=timeout)
        except queue.Empty:
            raise RuntimeError(timeout_message(timeout or 0)) from None
        self.room.put(None)
        item = box.pop() if success else None
        if item is None or item.error is not None:  # then the thread ends
            thread.join()
            self.thread = None
        return item

    def ready(self) -> bool:
        """Tell whether ``get`` would return an item at once."""
        thread = self.thread
        if thread is None:
            return False
        with thread.queue.mutex:
            waiting = thread.queue.queue
            return bool(waiting) and waiting[0][0] is True

    def close(self) -> None:
        """End the thread, then release the source. May be called twice, by the collector, and in a forked child."""
        if self.process != locks.process:
            return
        self.is_closed = True
        self.room.put(None)
        if self._is_over():
            self._release()

    def _is_over(self) -> bool:
        """Wait for the thread to end, and tell whether it has; otherwise it releases the source itself as it ends."""
        thread = self.thread  # which the thread that waits in ``get`` may take away meanwhile
        if thread is None:
            return True
        # The collector may close this in a prefetching thread, perhaps in the one to end, or while a batch is loaded.
        # To wait there could be for ever.
        if locks.is_loading():
            return not thread.is_alive()
        thread.join(self.patience)
        if not thread.is_alive():
            return True
        warnings.warn(
            f"A prefetching thread still waits for the next() of {type(self.source).__name__} after "
            f"{self.patience:g} s. It ends after that item.",
            TurboWarning,
            stacklevel=3,
        )
        return False

    def _release(self) -> None:
        on_close = self.on_close
        self.on_close = None
        self.snapshot = None
        # With what it had ready: a loader keeps this object until its next epoch.
        self.source = iter(())
        self.stages = []
        self.thread = None
        if on_close is not None:
            on_close()
