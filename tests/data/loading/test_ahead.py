"""The background thread: how far it loads, that it always ends and keeps nothing; and the lock of dataset code."""

import contextlib
import gc
import os
import random
import select
import signal
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from prefetch_generator import BackgroundGenerator
from torch.utils.data import DataLoader, IterableDataset, Subset, random_split

from lightning_turbo import _random
from lightning_turbo.data import PrefetchIterator, PrefetchLoader
from lightning_turbo.data.loading import ahead
from lightning_turbo.errors import NoEffectWarning, TurboWarning
from tests.children import status_of_child
from tests.data.loading.iterators import Stalling, counting
from tests.data.samples import Rows, holds_in_a_fork, take, values
from tests.leftovers import prefetch_threads, wait_until

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")
LOOKED_AT = 3  # items that the calling thread takes before a thread is started


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_keeps_so_many_ready_and_not_more(depth):
    made = []
    iterator = PrefetchIterator(counting(made), prefetch_batches=depth)
    assert [next(iterator) for _ in range(LOOKED_AT)] == [0, 1, 2]
    assert type(prefetch_threads()[0]) is BackgroundGenerator  # as it is published
    # Ready: depth. In the thread's hands: one.
    wait_until(lambda: len(made) == LOOKED_AT + depth + 1)
    time.sleep(0.05)
    assert len(made) == LOOKED_AT + depth + 1


def test_no_more_is_taken_ahead_than_the_limit():
    loaded = []
    loader = PrefetchLoader(Rows(20, lambda index: loaded.append(index) or index), batch_size=1)
    loader.limit_batches(lambda: 6)
    iterator = iter(loader)
    assert take(iterator, LOOKED_AT) == [[0], [1], [2]]
    wait_until(lambda: len(loaded) == 6)
    assert take(iterator, 3) == [[3], [4], [5]]
    assert not iterator.ready()
    assert loaded == list(range(6))
    assert take(iterator, 1) == [[6]]  # one that is asked for all the same
    assert loaded == list(range(7))
    assert values(iterator) == [[n] for n in range(7, 20)]


@pytest.mark.parametrize("how", ["dropped", "closed", "in a cycle"])
def test_an_endless_source_ends_with_its_consumer(how):
    iterator = PrefetchIterator(counting([]), prefetch_batches=2)
    for _ in range(LOOKED_AT):
        next(iterator)
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
            if n == 4:
                started.wait(10)
                holder.clear()  # the last reference goes here, in a thread that the end would wait for
            yield n

    holder = [PrefetchIterator(source(), prefetch_batches=2)]
    assert [next(holder[0]) for _ in range(LOOKED_AT)] == [0, 1, 2]
    started.set()
    wait_until(lambda: not holder and not prefetch_threads())


def test_a_thread_that_is_stuck_is_reported_and_ends_later():
    source = Stalling(4)
    iterator = PrefetchIterator(source.items())
    assert [next(iterator) for _ in range(LOOKED_AT)] == [0, 1, 2]
    iterator._running._patience = 0.05
    thread = prefetch_threads()[0]
    assert source.entered.wait(30)
    with pytest.warns(TurboWarning, match=r"still waits for its batch after 0\.05 s"):
        iterator.close()
    source.release.set()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("seconds", [0.4, 3.0])
def test_a_timeout_counts_from_when_an_item_is_asked_for(seconds):
    """A load that is hidden behind a long step is no timeout, as with a plain loader."""
    source = Stalling(4)
    iterator = PrefetchIterator(source.items(), timeout=seconds)
    assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
    if seconds < 1:
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.4 seconds"):
            next(iterator)
    source.release.set()
    assert next(iterator) == 4


def test_batches_that_are_ready_are_let_go_where_an_epoch_is_left():
    kept = []

    def load(index):
        batch = torch.full((3,), index)
        kept.append(weakref.ref(batch))
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
        for n in range(7):
            batch = torch.full((3,), n)
            kept.append(weakref.ref(batch))
            yield batch
            del batch

    for n, batch in enumerate(PrefetchIterator(source(), prefetch_batches=1)):
        assert int(batch[0]) == n
        if n == 4:
            wait_until(lambda: len(kept) == 7)
            wait_until(lambda: kept[3]() is None)  # while the thread waits, not only when it has ended
    del batch
    gc.collect()
    assert [ref() for ref in kept] == [None] * 7


def test_an_error_keeps_nothing_alive():
    class Source:
        n = -1

        def __next__(self):
            self.n += 1
            if self.n == 4:
                raise ValueError
            return self.n

    source = Source()
    seen = weakref.ref(source)
    iterator = PrefetchIterator(source)
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
    assert [next(iterator) for _ in range(LOOKED_AT - 1)] == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match="cannot continue: a KeyboardInterrupt stopped it"):
        next(iterator)
    assert made == [0, 1, 2]


# ---- Random numbers that are drawn beside a thread.

DRAW = {"torch": lambda: torch.rand(1), "random": random.random, "numpy.random": np.random.rand}


@pytest.mark.parametrize("who", ["dataset", "step"])
@pytest.mark.parametrize("name", DRAW)
def test_a_draw_beside_a_thread_ends_it_with_a_warning_that_names_the_generator_and_the_batch(name, who):
    loaders = []

    def load(index):
        loaders.append(threading.current_thread() is threading.main_thread())
        if who == "dataset" and index == 8:
            DRAW[name]()
        return index

    loader = PrefetchLoader(Rows(32, load), batch_size=1, prefetch_batches=2)

    def run():
        for batch in loader:
            seen.append(batch.tolist())
            if who == "step" and batch == 8:
                DRAW[name]()

    seen = []
    with pytest.warns(TurboWarning, match=f"global RNG of {name} changed .*at the latest with batch ") as told:
        run()
    assert seen == [[n] for n in range(32)]
    number = int(str(told[0].message).partition("with batch ")[2].partition(":")[0])
    assert 8 <= number <= 13 + ahead.WATCHED
    assert loaders[:LOOKED_AT] == [True] * LOOKED_AT
    assert not all(loaders[LOOKED_AT:10])
    assert all(loaders[14 + ahead.WATCHED :])
    seen.clear()
    loaders.clear()
    run()  # the next epoch has no thread; a second warning would be an error
    assert all(loaders)
    assert not prefetch_threads()


def test_a_loader_that_begins_an_epoch_beside_a_thread_is_no_draw_of_the_step():
    """Its iter() draws a seed for worker processes, and its sampler the order."""
    loader, other = PrefetchLoader(Rows(24), 1), PrefetchLoader(Rows(6), 2, shuffle=True)
    iterator = iter(loader)
    take(iterator, 6)
    assert prefetch_threads()
    begun = iter(other)
    take(iterator, 6)
    assert prefetch_threads()
    begun.close()
    iterator.close()


# ---- Forks.


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_iterates_the_loader_that_its_parent_iterates(threads):
    plain = values(DataLoader(range(12), 2))
    loader = PrefetchLoader(Rows(12, lambda index: time.sleep(0.001) or index), 2, threads=threads)
    iterator = iter(loader)
    first = take(iterator, 4)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, repr(values(loader)).encode())
        finally:
            os._exit(0)
    os.close(write)
    answers, _, _ = select.select([read], [], [], 10)
    if not answers:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(read) as answer:
        assert answer.read() == repr(plain)
    assert first + values(iterator) == plain


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_an_iterator_says_that_it_does_not_work_in_a_forked_child():
    iterator = PrefetchIterator(counting([]))
    for _ in range(LOOKED_AT):
        next(iterator)

    def refuses():
        try:
            next(iterator)
        except RuntimeError as error:
            return "does not work in a forked child" in str(error)

    assert holds_in_a_fork(refuses)
    iterator.close()


def test_a_fork_waits_for_a_load_that_reads_a_state(monkeypatch):
    """As of a sampler with a generator. The load waits for nothing that the fork holds."""
    monkeypatch.setattr(ahead, "LOCK_TIMEOUT", 2.0)
    inside, done = threading.Event(), threading.Event()

    def load():
        with ahead.TURNS:
            inside.set()
            time.sleep(0.2)
            _random.torch_state()
            done.set()

    thread = threading.Thread(target=load)
    thread.start()
    inside.wait()
    assert holds_in_a_fork(done.is_set)
    thread.join()


FORK = {"multiprocessing_context": "fork"}


def test_no_process_begins_with_a_lock_of_a_dataset_held():
    lock = threading.Lock()

    def load(index):
        with lock:
            time.sleep(0.002)
        return index

    running = iter(PrefetchLoader(Rows(200, load), 2))
    take(running, LOOKED_AT)
    with ahead.expected_draws():  # the seed for worker processes
        plain = iter(DataLoader(Rows(4, load), 2, num_workers=1, timeout=20, **FORK))
    assert values(plain) == [[0, 1], [2, 3]]
    running.close()


class Forking(Rows):
    """Starts a process for each sample, as a reader of a foreign format may."""

    # filelock, which torch imports, refuses a fork beside another one since Python 3.12.
    one_by_one = threading.Lock() if sys.version_info >= (3, 12) else contextlib.nullcontext()

    def __getitem__(self, index):
        with self.one_by_one:
            child = os.fork()
            if child == 0:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_samples_that_fork_wait_for_no_lock(threads, monkeypatch):
    """A wait in vain would end in a warning, which is an error in tests."""
    monkeypatch.setattr(ahead, "LOCK_TIMEOUT", 1.0)
    assert len(list(PrefetchLoader(Forking(8), batch_size=2, threads=threads))) == 4


class Destroyed:
    """Part of a reference cycle, as the pipelines of DALI are; says in which process its destructor runs."""

    def __init__(self, path):
        self.itself = self
        self.path = path

    def __del__(self):
        self.path.write_text(f"{os.getpid()}")


def collect_and_return(index):
    gc.collect()
    return index


@pytest.mark.parametrize("persistent", [False, True])
def test_a_forked_worker_process_destroys_no_garbage_of_its_parent(persistent, tmp_path):
    settings = {"num_workers": 1, "persistent_workers": persistent, **FORK}
    gc.collect()
    gc.disable()
    try:
        Destroyed(tmp_path / "destroyed")
        loader = PrefetchLoader(Rows(4, collect_and_return), batch_size=2, **settings)
        assert values(loader) == [[0, 1], [2, 3]]
        loader.close()
        assert not (tmp_path / "destroyed").exists()
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "destroyed").read_text() == str(os.getpid())


def test_other_forks_collect_as_before(tmp_path):
    gc.collect()
    gc.disable()
    try:
        Destroyed(tmp_path / "destroyed")
        values(PrefetchLoader(Rows(4), batch_size=2, num_workers=1, **FORK))
        assert status_of_child(lambda: os._exit(gc.collect() * 0)) == 0
        assert (tmp_path / "destroyed").read_text() != str(os.getpid())
    finally:
        gc.enable()
        gc.collect()


# ---- One loading thread is inside of dataset code at a time.

SHARED = {
    "itself": lambda data: (data, data),
    "halves": lambda data: random_split(data, [10, 10], generator=torch.Generator()),
    "a half of a half": lambda data: (data, Subset(Subset(data, range(10)), range(5))),
}


def in_turns(one, other):
    first = iter(one)
    take(first, LOOKED_AT)
    assert len(list(other)) == len(other)  # while the thread of the first is at work
    assert len(list(first)) == len(one) - LOOKED_AT


@pytest.mark.parametrize("split", SHARED.values(), ids=SHARED)
def test_loaders_that_share_a_dataset_load_in_turns(split):
    """As those of a file that is opened once: two threads must not be inside at the same time."""
    inside = threading.Lock()

    def load(index):
        assert inside.acquire(blocking=False), "two threads read at once"
        time.sleep(0.002)
        inside.release()
        return index

    in_turns(*(PrefetchLoader(part, 1, prefetch_batches=4) for part in split(Rows(20, load))))


def test_streams_that_share_a_file_are_opened_in_turns_too():
    inside = threading.Lock()

    class Opened(IterableDataset):
        def __iter__(self):
            return map(self.read, [self.read(index) for index in range(10)])

        def read(self, index):
            assert inside.acquire(blocking=False), "two threads read at once"
            time.sleep(0.002)
            inside.release()
            return index

        def __len__(self):
            return 10

    in_turns(PrefetchLoader(Opened(), 1), PrefetchLoader(Opened(), 1))


def test_a_loader_that_a_loading_thread_iterates_has_no_thread():
    inner = PrefetchLoader(Rows(6), 1)
    with contextlib.suppress(NoEffectWarning):
        values(inner)
    who = set()

    def load(index):
        with _random.same_random_numbers():  # its iter() draws
            for batch in inner:
                who.add(threading.current_thread())
                index += int(batch)
        return index

    assert values(PrefetchLoader(Rows(8, load), 1)) == [[n + 15] for n in range(8)]
    assert len(who) == 2  # the calling thread, and the one that loads ahead


def test_what_blocks_for_ever_is_waited_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(ahead, "LOCK_TIMEOUT", 0.05)
    release, blocks = threading.Event(), threading.Event()

    def load(index):
        if index == 8:
            blocks.set()
            release.wait(10)
        return index

    stuck = iter(PrefetchLoader(Rows(16, load), 2))
    take(stuck, LOOKED_AT)
    blocks.wait(10)
    with pytest.warns(TurboWarning, match=r"waited 0\.05 s for the batch that another thread loads"):
        assert take(iter(PrefetchLoader(range(4), 2)), 1) == [[0, 1]]
    release.set()
    stuck.close()


@pytest.mark.parametrize("place", [1, 2, 3, 5])
def test_an_interrupt_while_a_batch_is_loaded_leaves_no_lock_held(place, monkeypatch):
    monkeypatch.setattr(ahead, "LOCK_TIMEOUT", 0.5)

    def load(index):
        if index == place:
            raise KeyboardInterrupt
        return index

    with pytest.raises(KeyboardInterrupt):
        list(PrefetchLoader(Rows(8, load), 1))
    free = []

    def ask():
        with ahead.TURNS:  # a warning, if that has to wait, is an error
            free.append(True)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    assert free
    assert not ahead.is_loading()
