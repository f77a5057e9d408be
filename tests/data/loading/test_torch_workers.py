"""Worker processes that end while the thread waits for them: nothing hangs, and no epoch is short without a word."""

import ast
import functools
import gc
import math
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo.data import DevicePrefetcher, PrefetchIterator, PrefetchLoader, loading
from lightning_turbo.data.loading import thread_policy, torch_workers
from lightning_turbo.data.loading.background import JOIN_TIMEOUT
from tests.children import status_of_child
from tests.collecting import collect_in_its_thread
from tests.data.samples import Rows, take, values

pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
WORKERS = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
ENDED = "worker processes of this iterator were ended before it was"


def always(index):
    return 0.05


def after(seconds, index):
    time.sleep(seconds(index))
    return index


def slow(length=200, seconds=always):
    """The thread is always waiting for it: it wants more batches ahead than there are in the time of a test."""
    return Rows(length, functools.partial(after, seconds))


class SlowStream(IterableDataset):
    def __iter__(self):
        for n in range(100):
            time.sleep(0.05)
            yield n


def as_a_trainer_does(loader):
    loader._iterator._shutdown_workers()
    loader._iterator = None


def on_device(loader):
    return DevicePrefetcher(loader, "cpu")


def stateful(dataset, batch_size, **settings):
    return PrefetchLoader.of(StatefulDataLoader(dataset, batch_size=batch_size, **settings))


def from_six_on(index):
    return 2.0 if index >= 6 else 0.0


def test_a_loader_that_another_thread_closes_says_so_to_the_one_that_waits_for_a_batch():
    loader = PrefetchLoader(slow(seconds=from_six_on), batch_size=2, num_workers=1)
    closing = threading.Timer(0.5, loader.close)
    iterator = iter(loader)
    assert take(iterator, 3) == [[0, 1], [2, 3], [4, 5]]
    closing.start()
    with pytest.raises(RuntimeError, match="cannot continue: its loader was closed"):
        next(iterator)
    assert loader.state_dict()["consumed"] == 3
    closing.join()


def test_a_loader_is_closed_while_the_one_that_waits_takes_the_end_of_the_thread(monkeypatch):
    loader = PrefetchLoader(slow(), batch_size=2)
    iterator = iter(loader)
    take(iterator, 3)
    background = iterator.background
    join = background.thread.join

    def join_beside_get(timeout=None):
        join(timeout)
        background.thread = None  # as ``get`` does

    monkeypatch.setattr(background.thread, "join", join_beside_get)
    loader.close()
    assert background.thread is None


@pytest.mark.parametrize(
    ("make", "dataset", "wrap", "taken"),
    [
        (PrefetchLoader, slow, iter, 3),
        (PrefetchLoader, slow, lambda loader: iter(on_device(loader)), 3),
        (PrefetchLoader, SlowStream, iter, 3),
        (PrefetchLoader, SlowStream, lambda loader: iter(on_device(loader)), 3),
        (stateful, slow, iter, 2),
        # The thread begins after the second batch, and not at all for one that is loaded faster than it is handed over.
        *((PrefetchLoader, lambda: slow(seconds=lambda n: 0.02 * (n >= 10)), iter, taken) for taken in (1, 3)),
    ],
)
def test_workers_that_somebody_else_ends_are_an_error_and_no_hang(make, dataset, wrap, taken):
    loader = make(dataset(), batch_size=2, **WORKERS)
    loader.limit_batches(lambda: math.inf)  # as a Trainer does, so that a thread takes the batches
    iterator = wrap(loader)
    got = take(iterator, taken)
    as_a_trainer_does(loader)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=ENDED):
        got.extend(batch.tolist() for batch in iterator)
    loader.close()
    assert time.monotonic() - began < JOIN_TIMEOUT / 2
    if make is PrefetchLoader:
        again = iter(loader)
        assert take(again, len(got)) == got
        loader.close()
        assert dataset is SlowStream or got == [[n, n + 1] for n in range(0, 2 * len(got), 2)]


class LeavesOut:
    """Torch's iterator as its workers are ended while it looks for the next batch: it returns a later one."""

    _timeout, _shutdown, _persistent_workers, _workers, _try_get_data = 0, False, True, (), None
    given = 0

    def __next__(self):
        self._shutdown = self.given == 3
        self.given += 1 + self._shutdown
        return self.given


def test_a_batch_behind_one_that_was_left_out_is_not_handed_out():
    iterator = PrefetchIterator(LeavesOut())
    assert [next(iterator) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(RuntimeError, match=ENDED):
        next(iterator)


class WithoutPinning(LeavesOut):
    """Torch's iterator after the thread that pins its batches has died: no batch ever comes."""

    given, _pin_memory_thread = 0, threading.Thread()

    def __next__(self):
        self.given += 1
        if self.given > 2:
            raise RuntimeError("DataLoader timed out after 0.1 seconds")
        return self.given


def test_a_dead_thread_of_torch_is_reported(monkeypatch):
    monkeypatch.setattr(thread_policy, "MIN_BATCH_SECONDS", 0.0)
    iterator = PrefetchIterator(WithoutPinning())
    assert [next(iterator) for _ in range(2)] == [1, 2]
    with pytest.raises(RuntimeError, match="Pin memory thread exited unexpectedly"):
        next(iterator)
    iterator.close()


class BrokenPipe:
    """Torch's iterator whose worker process has closed the pipe."""

    _timeout, _shutdown, _persistent_workers = 7, False, False

    def __init__(self, *alive):
        self._workers = [SimpleNamespace(pid=40 + n, is_alive=iter(each).__next__) for n, each in enumerate(alive)]

    def __next__(self):
        raise EOFError("of the pipe")


@pytest.mark.parametrize(("alive", "error", "said"), [
    ([[True] * 3, [True, True, False]], RuntimeError, r"DataLoader worker \(pid\(s\) 41\) exited unexpectedly"),
    ([[True] * 999], EOFError, "of the pipe"),  # an error of another kind
])  # fmt: skip
def test_a_broken_pipe_is_told_as_the_process_that_died(alive, error, said, monkeypatch):
    monkeypatch.setattr(torch_workers, "DEATH_SECONDS", 0.1)
    source = BrokenPipe(*alive)
    with pytest.raises(error, match=said):
        torch_workers.take_in_slices(source, lambda: False)
    assert source._timeout == 7


def test_workers_that_end_between_epochs():
    """The end of an epoch stays its end."""
    loader = PrefetchLoader(slow(24, lambda index: 0.02), batch_size=4, **WORKERS)
    iterator = iter(loader)
    assert len(list(iterator)) == 6
    as_a_trainer_does(loader)
    assert list(iterator) == []
    assert len(list(loader)) == 6
    loader.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_closing_does_not_wait_for_a_batch_that_nobody_wants(persistent, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)  # how long torch lets a worker end
    data = slow(seconds=lambda index: 120 if index == 5 else 0.05)
    loader = PrefetchLoader(data, batch_size=1, **{**WORKERS, "persistent_workers": persistent})
    iterator = iter(loader)
    assert take(iterator, 5) == [[n] for n in range(5)]
    began = time.monotonic()
    iterator.close()
    assert time.monotonic() - began < JOIN_TIMEOUT


def test_the_next_epoch_waits_for_a_thread_that_collects_its_own_iterator():
    loader = PrefetchLoader(slow(40), batch_size=2, **WORKERS)
    loader.limit_batches(lambda: math.inf)
    holder = [iter(loader)]
    take(holder[0], 2)
    collect_in_its_thread(holder, loader._iterator)
    assert values(loader) == [[n, n + 1] for n in range(0, 40, 2)]
    loader.close()


PRIVATE = {
    "_BaseDataLoaderIter", "_data_queue", "_dataset_fetcher", "_next_index", "_pin_memory_thread", "_sampler_iter",
    "_shutdown", "_shutdown_workers", "_try_get_data", "_worker_result_queue",
}  # fmt: skip


def test_what_torch_keeps_private_in_its_iterators_is_read_in_one_file():
    for path in Path(loading.__file__).parent.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = {getattr(node, "attr", getattr(node, "id", getattr(node, "name", None))) for node in nodes}
        assert path.name == "torch_workers.py" or not names & PRIVATE, path


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


@pytest.mark.parametrize("make", [PrefetchLoader, stateful])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_forked_worker_process_destroys_no_garbage_of_its_parent(make, persistent, tmp_path):
    settings = {**WORKERS, "persistent_workers": persistent}
    gc.collect()
    gc.disable()
    try:
        Destroyed(tmp_path / "destroyed")
        for _ in range(2):
            assert values(make(Rows(8, collect_and_return), batch_size=2, **settings)) == [
                [0, 1],
                [2, 3],
                [4, 5],
                [6, 7],
            ]
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
        values(PrefetchLoader(Rows(4), batch_size=2, **WORKERS))
        assert status_of_child(lambda: os._exit(gc.collect() * 0)) == 0
        assert (tmp_path / "destroyed").read_text() != str(os.getpid())
    finally:
        gc.enable()
        gc.collect()
