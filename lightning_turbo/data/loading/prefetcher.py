"""``PrefetchIterator``: a background thread over any iterator, and copies of the next batches on a device."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

from lightning_turbo._checks import check_count
from lightning_turbo._pytree import pin_batch
from lightning_turbo._random import changed_generators, same_states, shared_state
from lightning_turbo.data.loading.ahead import PATIENCE, TURNS, Ahead, Item, expected_draws, is_loading
from lightning_turbo.data.loading.torch_side import is_timeout
from lightning_turbo.errors import NoEffectWarning, TurboWarning

__all__ = ["PrefetchIterator", "Profile", "Progress", "Running", "load_item"]

# Seconds. Batches that are loaded faster than this are loaded by the calling thread: to pass one from thread to thread
# costs 0.1 to 0.4 ms. Until FEW_BATCHES are loaded, their sum has to reach what FEW_BATCHES of this length would take:
# on a busy machine one takes milliseconds by chance, and a thread that was started stays for its epoch.
MIN_SECONDS = 5e-4
FEW_BATCHES = 16

_logger = logging.getLogger("lightning_turbo.data")
_ADVICE = "Use num_workers=1: a worker process has generators of its own."


class Profile:
    """What is known of how a loader loads. A loader makes one, and its iterators fill it in for the next ones.

    Args:
        is_quiet: Whether loading runs no code of the user's and draws nothing, as from arrays in memory.

    Attributes:
        draws: Who was seen to draw random numbers, as a clause; empty for nobody, ``None`` before it is known.
        has_warned: Whether it was warned that no thread loads here.
        is_slow: Whether a thread would gain something, by the batches of the latest epoch.
    """

    def __init__(self, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self.draws: str | None = "" if is_quiet else None
        self.has_warned = False
        self.is_slow = False


class Progress:
    """How far an iterator is. It writes here, and a loader keeps this when the iterator is gone.

    Attributes:
        consumed: Batches of the epoch that the caller got, as a batch or as an error.
        begun: How many of these came before this iterator.
        ended: Whether the caller has met the end.
        states: The last three states of the source that were kept, each with the number of batches before it. Loaders
            and streams with a state of their own have such.
        before_latest: The global RNGs, and the generators of the dataset, before the latest batch was loaded, where
            that may draw from them and somebody may have to load the batch again.
    """

    def __init__(self) -> None:
        self.consumed = 0
        self.begun = 0
        self.ended = False
        self.states: deque[tuple[int, Any]] = deque(maxlen=3)
        self.before_latest: Any = None

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was returned yet."""
        return self.consumed == self.begun and not self.ended


class Running:
    """What an iterator has running: a thread, worker processes, threads of a pool. Its end closes this object.

    Args:
        end_source: Called once when nobody takes from the source any more.
        patience: Seconds to wait for the batch that a thread is loading.
    """

    def __init__(self, end_source: Callable[[], None] | None = None, patience: float = PATIENCE) -> None:
        self.ahead: Ahead | None = None
        self._end_source = end_source
        self._patience = patience

    def close(self) -> None:
        """End all of it. May be called twice, and by the garbage collector."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.close(self._patience)
        end, self._end_source = self._end_source, None
        if end is not None:
            end()


class PrefetchIterator(Iterator[Any]):
    """Iterate over ``source`` in a background thread that keeps some items ready.

    The calling thread takes the first items: seeds that a sampler draws at its start come then from the same place as
    without this class. It goes on to take them as long as one takes less than half a millisecond, because a thread has
    nothing to gain there. Of the next two it looks whether they, or what the caller does between them, draw from the
    global RNGs. Then, and where a loading thread iterates, the calling thread takes all items, with a
    ``NoEffectWarning``. Otherwise a thread takes the others ahead. It compares the states of the RNGs after each item,
    and a change, whoever made it, ends the thread with a ``TurboWarning`` that names the item. It also ends with the
    source, on ``close``, when this object is collected, and when the interpreter ends. The logger
    ``lightning_turbo.data`` reports at level DEBUG whether a thread loads, and why not.

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
        self._set_up(Progress(), Profile(), check_count("prefetch_batches", prefetch_batches), transfer, timeout)
        pin = None if transfer is None or transfer.device.type != "cuda" else pin_batch
        self._start_with(functools.partial(load_item, source, TURNS, None, pin), Running())

    def _set_up(self, progress: Any, profile: Profile, depth: int, transfer: Any, timeout: float) -> None:
        """Set what is known before there is a source."""
        self.progress = progress
        self.transfer = transfer
        self._profile = profile
        self._depth = depth
        self._timeout = timeout or None
        self._closed = ""
        self._sent: deque[Item] = deque()  # items on their way to the device
        self._running: Running | None = None  # before the first next()

    def _start_with(
        self,
        load: Callable[[], Item],
        running: Running,
        limit: float = inf,
        held: Sequence[Any] = (),
        *,
        may_thread: bool = True,
    ) -> None:
        """Set what loads the items.

        Args:
            load: Loads one item in the thread that calls it.
            running: What has to be closed with this object.
            limit: How many items are loaded ahead at most, of all that are still to come.
            held: The generators that the dataset holds.
            may_thread: Whether a thread may load at all.
        """
        self._load = load
        self._running = running
        self._limit = limit
        self._held = held
        self._loaded = 0
        self._seconds = 0.0
        self._states_after: Any = None  # of the latest load that was looked at
        # Whether there is nothing more to find out, so that items are loaded without more ado.
        self._is_settled = not may_thread
        self._finalizer = weakref.finalize(self, running.close)

    def use(self, transfer: Any) -> None:
        """Move the items to a device. Before the first of them."""
        self.transfer = transfer

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Any:
        if self._running is None or self._closed or self.progress.ended:
            self._open()
        try:
            item = self._next_item() if self.transfer is None else self._receive()
        except BaseException as error:
            # Not of the batch, but beside it: the source has gone on, and the batch is lost. One that a thread did not
            # load in time may be asked for again.
            if not is_timeout(error):
                self._close_after(error)
            raise
        if item.error is not None:
            self._count_error(item)
            try:
                raise item.error
            finally:
                del item  # its traceback holds this frame
        self.progress.consumed += 1
        if item.state is not None:
            self.progress.states.append((self.progress.consumed, item.state))
        return item.batch

    def _open(self) -> None:
        """Begin, where that was left to the first item; raise an error if there is none any more."""
        if self._closed:
            raise RuntimeError(f"This iterator cannot continue: {self._closed}.")
        if self.progress.ended:
            raise StopIteration

    def _count_error(self, item: Item) -> None:
        """Count an item that raises, after which the next ``next()`` goes on; at the end of the source, close.

        Who was interrupted has no item, which a state has to keep for later, but the source has gone on: close.
        """
        error = item.error
        try:
            if isinstance(error, StopIteration):
                self.progress.ended = True
                if item.state is not None:
                    self.progress.states.append((self.progress.consumed, item.state))
                self._finalizer()
            elif isinstance(error, Exception):
                self.progress.consumed += not is_timeout(error)
            else:
                self._close_after(error)
        finally:
            del error

    def _close_after(self, error: BaseException | None) -> None:
        self.close(f"a {type(error).__name__} stopped it while a batch was loaded")

    # Loading

    def _next_item(self) -> Item:
        """Return the next item of the thread or, where there is none, of the source."""
        running = self._running
        assert running is not None
        if running.ahead is not None:
            item = running.ahead.get(self._timeout)
            if item is not None and not (item.error or item.changed):
                return item
            running.ahead = None  # it has ended
            if item is not None:
                # Another thread goes on after an error.
                self._is_settled = bool(item.changed)
                if item.changed:
                    self._warn_of_change(item.changed)
                return item
        if self._is_settled and not self._profile.draws:
            return self._load()
        return self._load_and_look()

    def _load_and_look(self) -> Item:
        """Load an item in this thread, and have another one load those after it, if it may and would gain by it."""
        self._loaded += 1
        profile = self._profile
        # The first item draws the order, and what the caller does with it may begin what is done once.
        looks = profile.draws is None and self._loaded > 1
        before = self._states() if profile.draws != "" else None
        then = self._states_after
        if looks and before is not None and then is not None and not self._is_same(then, before):
            profile.draws = "what is done with a batch draws"
        began = time.perf_counter()
        with expected_draws() if self._loaded == 1 else contextlib.nullcontext():
            item = self._load()
        seconds = time.perf_counter() - began
        if not isinstance(item.error, StopIteration):
            self.progress.before_latest = before
        if item.error is None:
            self._seconds += seconds if self._loaded > 1 else 0.0
            if looks:
                self._find_draws(before)
            self._decide()
        return item

    def _find_draws(self, before: Any) -> None:
        """Find out whether loading an item has drawn random numbers, and after two of them that nobody does."""
        is_second, self._states_after = self._states_after is not None, self._states()
        if self._profile.draws is None and not self._is_same(before, self._states_after):
            self._profile.draws = "loading draws"
        elif self._profile.draws is None and is_second:
            self._profile.draws = ""

    def _states(self) -> dict[str, Any]:
        return shared_state(self._held)

    @staticmethod
    def _is_same(before: dict[str, Any], after: dict[str, Any]) -> bool:
        return not changed_generators(before, after) and same_states(before.get("held", ()), after.get("held", ()))

    def _decide(self) -> None:
        """Start a thread, or settle that there is none."""
        profile, measured = self._profile, self._loaded - 1
        if self._is_settled:
            return
        # In each epoch again: one that a busy machine has made slow shall not stay so.
        profile.is_slow = self._seconds >= MIN_SECONDS * max(measured, FEW_BATCHES)
        if profile.draws is None or not profile.is_slow:
            # It is found out for the next epoch too.
            self._is_settled = profile.draws is not None and measured >= FEW_BATCHES
            return
        self._is_settled = True
        left = self._limit - self._taken() - 1  # without the item that is being returned
        if left > 0 and self._may_thread():
            assert self._running is not None
            self._running.ahead = Ahead(self._load, self._depth, left, watches=not profile.is_quiet)

    def _taken(self) -> int:
        """How many items were taken of the source and have been returned, or wait on the device."""
        return self.progress.consumed - self.progress.begun + len(self._sent)

    def _may_thread(self) -> bool:
        draws = self._profile.draws
        if is_loading():
            _logger.debug("no thread: a loading thread iterates this loader")
            return False
        if not draws:
            return True
        _logger.debug("no thread: %s", draws)
        if not self._profile.has_warned:
            self._profile.has_warned = True
            warnings.warn(
                f"Batches are loaded in the calling thread, as by a plain DataLoader, with nothing gained: {draws} "
                f"random numbers, which would depend on timing beside a thread, whatever the seed. {_ADVICE}",
                NoEffectWarning,
                stacklevel=5,
            )
        return False

    def _warn_of_change(self, changed: Sequence[str]) -> None:
        """Tell of random numbers that were drawn beside a thread; none loads for this loader any more."""
        self._profile.draws = "loading, or what is done with a batch, draws"
        self._profile.has_warned = True
        warnings.warn(
            f"The global RNG of {' and '.join(changed)} changed while a thread loaded ahead, at the latest with batch "
            f"{self.progress.consumed}: the dataset or the step drew from it after they had not, and their numbers "
            f"depend on timing there. From here on batches are loaded in the calling thread. {_ADVICE}",
            TurboWarning,
            stacklevel=4,
        )

    def ready(self) -> bool:
        """Tell whether one more item can be taken without waiting for the source."""
        running = self._running
        if running is None or self._closed or self.progress.ended:
            return False
        if running.ahead is not None:
            return running.ahead.ready()
        is_quick = self._is_settled and not self._profile.is_slow and self._profile.draws == ""
        return is_quick and self._taken() < self._limit

    # The way to the device

    def _receive(self) -> Item:
        """Return the next item that was sent to the device, in order. An error on the way is raised at its item."""
        if not self._sent:
            self._send()
        item = self._sent[0]
        if item.error is None:
            item = self._moved(self.transfer.receive, item)
        while item.error is None and self._is_room():
            self._send()
        self._sent.popleft()
        return item

    def _send(self) -> None:
        item = self._next_item()
        self._sent.append(item if item.error is not None else self._moved(self.transfer.send, item))

    def _moved(self, move: Callable[[Any], Any], item: Item) -> Item:
        """Return the item after a step of its transfer, or with its error. An interrupt is raised at once."""
        try:
            return item._replace(batch=move(item.batch))
        except Exception as error:
            return item._replace(error=error)

    def _is_room(self) -> bool:
        """Whether one more item can be sent to the device without waiting for it."""
        sent, transfer = self._sent, self.transfer
        # The first of them is the one that is being returned.
        if transfer.stream() is None or len(sent) > transfer.prefetch_batches or sent[-1].error is not None:
            return False
        return self.ready()

    # The end

    @property
    def is_over(self) -> bool:
        """Whether it has come to its end, or was closed."""
        return bool(self._closed) or self.progress.ended

    def close(self, because: str = "it was closed") -> None:
        """End the thread and throw away what it had ready. May be called twice.

        Args:
            because: The reason that a later ``next()`` gives.

        Warns:
            TurboWarning: If the source does not come back from its ``next()`` in time; the thread then ends later.
        """
        if not self.progress.ended:
            self._closed = because
        self._sent.clear()
        if self._running is not None:
            self._finalizer()


def load_item(
    source: Iterator[Any], lock: Any, snapshot: Callable[[], Any] | None, finish: Callable[[Any], Any] | None
) -> Item:
    """Load one batch of a source. Errors are returned as part of the item.

    Args:
        source: The iterator of the batches.
        lock: Held meanwhile.
        snapshot: Called after the batch, and after the end; what it returns is the ``state`` of the item.
        finish: Called on the batch; its result takes the batch's place.
    """
    with lock:
        try:
            batch = next(source)
            if finish is not None:
                batch = finish(batch)
            return Item(batch, None, None if snapshot is None else snapshot())
        except StopIteration as end:
            return Item(None, end, None if snapshot is None else snapshot())
        except BaseException as error:
            return Item(None, error)
