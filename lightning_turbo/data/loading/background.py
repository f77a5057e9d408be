"""``Background``: an iterator and the thread that takes batches from it, by ``prefetch_generator``."""

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
from lightning_turbo.data.loading.thread_state import ThreadState, add_thread_note
from lightning_turbo.data.loading.torch_workers import has_workers, take_batch, take_in_slices, timeout_message
from lightning_turbo.errors import TurboWarning

__all__ = ["Background", "Item"]

# Seconds. How long close() waits for the batch that the thread is making.
JOIN_TIMEOUT = 20.0
_logger = logging.getLogger("lightning_turbo.data")


class Item(NamedTuple):
    """The result of one load.

    Attributes:
        batch: The batch; ``None`` if there is an error.
        error: The error that was raised instead; ``StopIteration`` at the end of the source.
        state: The state of the source after the batch, if it was asked for it.
    """

    batch: Any
    error: BaseException | None = None
    state: Any = None


class Background:
    """The source of a ``PrefetchIterator``, and the thread that takes batches from it.

    Whoever makes the iterator makes this, a loader or the iterator itself. The iterator starts the thread when loading
    is slow. The thread ends with the source, after an error (its traceback may keep the iterator, which
    would end it otherwise), after ``limit`` batches, and on ``close``. The end of the iterator closes this object,
    which does not refer to it. Always: one thread at a time takes from the source, in order, and at most ``depth + 1``
    batches are loaded and not returned yet.

    Args:
        source: Any iterator.
        lock: Held while a batch is taken, unless worker processes load: no dataset code runs in this process then.
        limit: How many batches are taken in all while there is a thread; 0 for no thread.
        snapshot: Called after each batch; what it returns is the ``state`` of the item.
        on_close: Called once, when nobody takes from the source any more.
        patience: Seconds that ``close`` waits for the batch that the thread is loading; ``None`` for ``JOIN_TIMEOUT``.

    Attributes:
        taken: How often a batch was asked of the source, its end included.
        has_found_end: Whether the source has ended.
        thread: The ``BackgroundGenerator``; ``None`` before it starts, and after its last item was returned.
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
        self.thread: Any = None
        # The collector may call ``close`` in any thread at any line, also in the thread that waits for room. With a
        # lock of Python's that thread would wait for itself; a SimpleQueue and a bool have none.
        self.is_closed = False
        # An entry for each batch that the thread may still load.
        self.room = queue.SimpleQueue[None]()

    def load(self, take: Callable[[], Any]) -> Item:
        """Load one batch in the thread that calls this. Errors are returned as part of the item."""
        self.taken += 1
        try:
            with self.lock:
                batch = take()
                state = None if self.snapshot is None else self.snapshot()
            for stage in self.stages:
                batch = stage(batch)
            if isinstance(batch, PackedBatch):
                return Item(batch.open(), None, batch.stream_state if state is None else state)
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
        """Start the thread, in the modes of the calling one.

        Args:
            depth: How many batches it keeps ready.
            measured: Called when it ends, with the seconds that a batch took on average.
        """
        self.room = queue.SimpleQueue()
        thread = BackgroundGenerator(self._boxes(ThreadState(), measured), max_prefetch=0)
        self.thread = thread
        # There is no room before this object knows the thread. Otherwise an interrupt in the call above would leave a
        # thread behind that takes batches and that nobody ends.
        thread.name = f"lightning_turbo-prefetch-{id(thread):x}"
        for _ in range(depth + 1):
            self.room.put(None)

    def _boxes(self, modes: ThreadState, measured: Callable[[float], None]) -> Iterator[list[Item]]:
        """Yield the items of the thread, each in a list that ``get`` empties.

        ``BackgroundGenerator`` keeps a reference to what it yielded last. Without the list that would keep a batch
        longer than its taker does and, if it is an error, through its traceback the iterator.
        """
        modes.enter()
        locks.load_in_this_thread()
        if self.has_workers and self.stages:
            # As in torch's own thread that pins memory, a copy is not to take all cores. Where this thread runs dataset
            # code the number stays that of the calling thread, on which the last bits of sums depend.
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
                    add_thread_note(box[0].error)
                yield box
                if is_last:
                    return
        finally:
            _logger.debug("thread ended: %d batches were taken of %s", self.taken, type(self.source))
            if self.taken > first:
                measured(seconds / (self.taken - first))
            # ``close`` may not have waited for this thread, see ``_is_over``. A second release does nothing.
            if self.is_closed:
                self._release()

    def get(self, timeout: float | None) -> Item | None:
        """Return the next item of the thread; ``None`` once it has ended and all items were returned.

        Args:
            timeout: Seconds to wait for it; ``None`` for as long as it takes.

        Raises:
            RuntimeError: If the item does not come in time.
        """
        # Read once: a thread that closes this object sets it to None.
        thread = self.thread
        if thread is None:
            return None
        # BackgroundGenerator puts (True, box) for each box, and (False, ...) once the generator has ended.
        try:
            success, box = thread.queue.get(timeout=timeout)
        except queue.Empty:
            raise RuntimeError(timeout_message(timeout or 0)) from None
        self.room.put(None)
        item = box.pop() if success else None
        # The thread ends after such an item.
        if item is None or item.error is not None:
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
        """End the thread, then release the source.

        May be called twice, and by the garbage collector. In a forked child, where there is no thread, it does nothing.
        """
        if self.process != locks.process:
            return
        self.is_closed = True
        self.room.put(None)
        if self._is_over():
            self._release()

    def _is_over(self) -> bool:
        """Wait for the thread to end, and return whether it has. If not, it releases the source itself when it ends."""
        # Read once: the thread that waits in ``get`` may set it to None meanwhile.
        thread = self.thread
        if thread is None:
            return True
        # The collector may close this in a prefetching thread, perhaps in the very one, or while a batch is loaded. To
        # wait there could take for ever.
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
        # Let go of all batches: a loader keeps this object until its next epoch.
        self.source = iter(())
        self.stages = []
        self.thread = None
        if on_close is not None:
            on_close()
