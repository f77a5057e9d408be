"""The lock of dataset code: forks wait for it, interrupts leave it free, and nobody waits for it for ever."""

import contextlib
import itertools
import os
import select
import signal
import sys
import threading
import time

import pytest
from torch.utils.data import DataLoader

from lightning_turbo import _random
from lightning_turbo.data import PrefetchIterator, PrefetchLoader
from lightning_turbo.data.loading import locks
from lightning_turbo.errors import TurboWarning
from tests.data.loading.iterators import counting
from tests.data.samples import Rows, holds_in_a_fork, take, values

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody traces")
def test_an_interrupt_at_any_line_of_the_second_batch_leaves_no_lock_held(monkeypatch):
    """Where the lines of the batch are traced, an interrupt comes between two of them."""
    holds, left = _random._Snapshot.holds, 0

    def interrupted(self):
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return holds(self)

    def is_free():
        with locks.TURNS:  # a warning, if that has to wait, is an error
            free.append(True)

    monkeypatch.setattr(_random._Snapshot, "holds", interrupted)
    monkeypatch.setattr(locks, "LOCK_TIMEOUT", 0.5)
    for places in itertools.count(1):
        iterator, free, left = PrefetchIterator(counting([], 4)), [], places
        try:
            assert list(iterator) == [0, 1, 2, 3]
            break
        except KeyboardInterrupt:
            asking = threading.Thread(target=is_free)
            asking.start()
            asking.join()
            assert free, places
            assert not locks.is_loading()
    assert places > 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_fork_waits_for_a_load_that_reads_a_state(monkeypatch):
    """As of a sampler with a generator. The load waits for nothing that the fork holds."""
    monkeypatch.setattr(locks, "LOCK_TIMEOUT", 2.0)
    inside, done = threading.Event(), threading.Event()

    def load():
        with locks.TURNS:
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
    take(running, 2)
    for _ in range(3):
        assert values(DataLoader(Rows(4, load), 2, num_workers=1, timeout=20, **FORK)) == [[0, 1], [2, 3]]
    running.close()


def test_what_blocks_for_ever_is_waited_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(locks, "LOCK_TIMEOUT", 0.05)
    release = threading.Event()
    stuck = iter(PrefetchLoader(Rows(8, lambda index: release.wait(10) if index == 4 else index), 2))
    take(stuck, 2)
    time.sleep(0.02)
    with pytest.warns(TurboWarning, match="waited 0.05 s for the batch that another thread loads"):
        assert take(PrefetchLoader(range(4), 2), 1) == [[0, 1]]
    release.set()
    stuck.close()


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
    monkeypatch.setattr(locks, "LOCK_TIMEOUT", 1.0)
    batches = list(PrefetchLoader(Forking(8), batch_size=2, threads=threads))
    assert len(batches) == 4


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_iterates_the_loader_that_its_parent_iterates(threads):
    loader = PrefetchLoader(Rows(12, lambda index: time.sleep(0.001) or index), 2, threads=threads)
    iterator = iter(loader)
    first = [next(iterator).tolist() for _ in range(4)]
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
        assert answer.read() == repr(values(DataLoader(range(12), 2)))
    assert first + [batch.tolist() for batch in iterator] == values(DataLoader(range(12), 2))
