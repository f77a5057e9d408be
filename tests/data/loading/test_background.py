"""The background thread: how far ahead it loads, and that it always ends and keeps nothing."""

import contextlib
import gc
import threading
import time
import weakref

import pytest
import torch
from prefetch_generator import BackgroundGenerator

from lightning_turbo.data import PrefetchIterator, PrefetchLoader
from lightning_turbo.data.loading import background
from lightning_turbo.errors import TurboWarning
from tests.data.loading.iterators import Stalling, counting, for_a_thread
from tests.data.samples import Rows
from tests.leftovers import prefetch_threads, wait_until

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_keeps_so_many_ready_and_not_more(depth):
    made = []
    iterator = PrefetchIterator(counting(made), prefetch_batches=depth)
    assert [next(iterator), next(iterator), next(iterator)] == [0, 1, 2]
    assert type(prefetch_threads()[0]) is BackgroundGenerator  # as it is published
    # Handed out: 3. Ready: depth. In the thread's hands, waiting for room: one.
    wait_until(lambda: len(made) == 3 + depth + 1)
    time.sleep(0.05)
    assert len(made) == 3 + depth + 1


def test_no_more_is_taken_ahead_than_the_limit():
    taken = []
    iterator = for_a_thread(counting(taken, 20), limit=6)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    wait_until(lambda: len(taken) == 6)
    assert [next(iterator) for _ in range(3)] == [3, 4, 5]
    assert not iterator.ready()
    assert taken == list(range(6))
    assert next(iterator) == 6  # one that is asked for all the same
    assert taken == list(range(7))
    assert list(iterator) == list(range(7, 20))


@pytest.mark.parametrize("how", ["dropped", "closed", "in a cycle"])
def test_an_endless_source_ends_with_its_consumer(how):
    iterator = PrefetchIterator(counting([]), prefetch_batches=2)
    next(iterator), next(iterator)
    thread = prefetch_threads()[0]
    if how == "closed":
        iterator.close()
        iterator.close()
        assert not prefetch_threads()
        with pytest.raises(RuntimeError, match="cannot continue: it was closed"):
            next(iterator)
    if how == "in a cycle":
        iterator.itself = iterator
    del iterator
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_an_iterator_that_its_own_thread_collects_ends():
    started = threading.Event()

    def source():
        for n in range(10**9):
            if n == 3:
                started.wait(10)
                holder.clear()  # the last reference goes here, in a thread that the end would wait for
            yield n

    holder = [for_a_thread(source(), prefetch_batches=2)]
    assert [next(holder[0]), next(holder[0])] == [0, 1]
    started.set()
    wait_until(lambda: not holder and not prefetch_threads())


def test_a_thread_that_is_stuck_is_reported_and_ends_later(monkeypatch):
    monkeypatch.setattr(background, "JOIN_TIMEOUT", 0.05)
    source, disposed = Stalling(2), []
    iterator = for_a_thread(source.items(), on_close=lambda: disposed.append(1))
    assert [next(iterator), next(iterator)] == [0, 1]
    thread = prefetch_threads()[0]
    assert source.entered.wait(30)
    with pytest.warns(TurboWarning, match="still waits for the next"):
        iterator.close()
    assert not disposed
    source.release.set()
    thread.join(5)
    assert not thread.is_alive()
    assert disposed == [1]


@pytest.mark.parametrize("seconds", [0.4, 3.0])
def test_a_timeout_counts_from_when_an_item_is_asked_for(seconds):
    """A load that is hidden behind a long step is no timeout, as with a plain loader."""
    source = Stalling(2)
    iterator = for_a_thread(source.items(), timeout=seconds)
    assert [next(iterator), next(iterator)] == [0, 1]
    if seconds < 1:
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.4 seconds"):
            next(iterator)
    source.release.set()
    assert next(iterator) == 2


def test_batches_that_are_ready_are_let_go_where_an_epoch_is_left():
    """A loader keeps what is behind its latest iterator until the next one."""
    kept = []

    def load(index):
        batch = torch.full((3,), index)
        kept.append(weakref.ref(batch))
        time.sleep(0.002)
        return batch

    loader = PrefetchLoader(Rows(40, load), batch_size=None)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    wait_until(lambda: len(kept) >= 10)
    del iterator
    wait_until(lambda: not prefetch_threads())
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_no_batch_is_kept_by_the_thread():
    kept = []

    def source():
        for n in range(6):
            batch = torch.full((3,), n)
            kept.append(weakref.ref(batch))
            yield batch
            del batch

    iterator = PrefetchIterator(source(), prefetch_batches=1)
    for n, batch in enumerate(iterator):
        assert int(batch[0]) == n
        if n == 3:
            wait_until(lambda: len(kept) == 6)
            wait_until(lambda: kept[2]() is None)  # while the thread waits, not only when it has ended
    del batch
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6


@pytest.mark.parametrize("place", ["source", "stage"])
def test_an_error_keeps_nothing_alive(place):
    class Source:
        n = -1

        def __next__(self):
            self.n += 1
            return self.fail("source", self.n)

        def stage(self, item):
            return self.fail("stage", item)

        def fail(self, here, n):
            if (here, n) == (place, 4):
                raise ValueError
            return n

    source = Source()
    seen = weakref.ref(source)
    iterator = for_a_thread(source)
    iterator.background.stages = [source.stage]
    del source
    gc.disable()
    try:
        assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
        with contextlib.suppress(ValueError):
            next(iterator)
        del iterator
        wait_until(lambda: seen() is None)  # by counting references alone
    finally:
        gc.enable()


def test_an_interrupt_while_the_thread_is_started_leaves_none_that_takes_items(monkeypatch):
    def start(self):
        threading.Thread.start(self)
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(BackgroundGenerator, "start", start)
    iterator = PrefetchIterator(counting(made := []))
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match="cannot continue: a KeyboardInterrupt stopped it"):
        next(iterator)
    assert made == [0, 1]


def test_a_source_without_a_thread_has_nothing_ready():
    source = background.Background(iter(range(3)))
    assert (source.get(timeout=0.01), source.ready()) == (None, False)
    assert source.take() == 0  # nothing was lost


class OfProcesses:
    """An iterator of torch's over worker processes, as far as the thread asks it."""

    _timeout, _shutdown, _persistent_workers, _try_get_data = 0, False, False, None

    def __next__(self):
        return 1


def test_a_thread_that_only_copies_what_worker_processes_load_takes_one_core():
    """Its calling thread keeps its own."""
    torch.set_num_threads(2)
    try:
        source = background.Background(OfProcesses(), limit=3)
        source.stages.append(lambda batch: (batch, torch.get_num_threads()))
        source.start(1, lambda seconds: None)
        assert [source.get(10).batch for _ in range(3)] == [(1, 1)] * 3
        assert torch.get_num_threads() == 2
        source.close()
    finally:
        torch.set_num_threads(1)
