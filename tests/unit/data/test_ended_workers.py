"""Worker processes that end while the thread waits for them: nothing hangs, and no epoch is short without a word."""

import time

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo.data import BackgroundIterator, DevicePrefetcher, PrefetchLoader
from lightning_turbo.data.prefetcher import PATIENCE
from tests.collecting import collect_in_its_thread
from tests.leftovers import nothing_is_left

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
WORKERS = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}


class Slow(Dataset):
    """The thread is always waiting for it: it wants more batches ahead than there are in the time of a test."""

    def __init__(self, length=200, seconds=0.05, stuck_at=None, slow_from=None):
        self.length, self.seconds, self.stuck_at, self.slow_from = length, seconds, stuck_at, slow_from

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        slow = self.slow_from is not None and index >= self.slow_from
        time.sleep(120 if index == self.stuck_at else 0.02 if slow else self.seconds)
        return index


class SlowStream(IterableDataset):
    def __iter__(self):
        for n in range(100):
            time.sleep(0.05)
            yield n


def as_a_trainer_does(loader):
    loader._iterator._shutdown_workers()
    loader._iterator = None


@pytest.mark.parametrize("dataset", [Slow, SlowStream])
@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: DevicePrefetcher(loader, "cpu")])
def test_workers_that_somebody_else_ends_are_an_error_and_no_hang(dataset, wrap):
    loader = PrefetchLoader(dataset(), batch_size=2, **WORKERS)
    iterator = iter(wrap(loader))
    got = [next(iterator).tolist() for _ in range(3)]
    as_a_trainer_does(loader)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="worker processes of this iterator were ended before it was"):
        got.extend(batch.tolist() for batch in iterator)
    loader.close()
    assert time.monotonic() - began < PATIENCE / 2
    nothing_is_left()
    again = iter(loader)
    assert [next(again).tolist() for _ in got] == got
    loader.close()
    nothing_is_left()


class LeavesOut:
    """Torch's iterator as its workers are ended while it looks for the next batch: it returns a later one."""

    _timeout, _shutdown, _persistent_workers, _workers, _try_get_data = 0, False, True, (), None

    def __init__(self):
        self.given = 0

    def __iter__(self):
        return self

    def __next__(self):
        self._shutdown = self.given == 3
        self.given += 1 + self._shutdown
        return self.given


def test_a_batch_behind_one_that_was_left_out_is_not_handed_out():
    iterator = BackgroundIterator(LeavesOut())
    assert [next(iterator) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(RuntimeError, match="worker processes of this iterator were ended before it was"):
        next(iterator)


@pytest.mark.parametrize("taken", [1, 3])
def test_workers_that_end_while_batches_are_loaded_where_they_are_asked_for(taken):
    """The thread begins after the second batch, and not at all for one that is loaded faster than it is handed over."""
    loader = PrefetchLoader(Slow(seconds=0, slow_from=10), batch_size=2, **WORKERS)
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(taken)]
    as_a_trainer_does(loader)
    with pytest.raises(RuntimeError, match="worker processes of this iterator were ended before it was"):
        got.extend(batch.tolist() for batch in iterator)
    assert got == [[n, n + 1] for n in range(0, 2 * len(got), 2)]
    loader.close()
    nothing_is_left()


def test_workers_of_a_stateful_loader_that_end():
    loader = PrefetchLoader.of(StatefulDataLoader(Slow(), batch_size=2, num_workers=2, persistent_workers=True))
    iterator = iter(loader)
    next(iterator), next(iterator)
    as_a_trainer_does(loader)
    with pytest.raises(RuntimeError, match="worker processes of this iterator were ended before it was"):
        list(iterator)
    loader.close()
    nothing_is_left()


def test_the_end_of_an_epoch_stays_its_end():
    loader = PrefetchLoader(Slow(8, 0.01), batch_size=2, **WORKERS)
    iterator = iter(loader)
    assert len(list(iterator)) == 4
    as_a_trainer_does(loader)
    assert list(iterator) == []
    assert len(list(loader)) == 4
    loader.close()
    nothing_is_left()


def test_workers_of_an_epoch_that_was_begun_early():
    loader = PrefetchLoader(Slow(24), batch_size=4, **WORKERS)
    list(loader)
    assert loader.start_next_epoch()
    as_a_trainer_does(loader)
    with pytest.raises(RuntimeError, match="worker processes of this iterator were ended before it was"):
        list(loader)
    assert len(list(loader)) == 6
    loader.close()
    nothing_is_left()


@pytest.mark.parametrize("persistent", [False, True])
def test_closing_does_not_wait_for_a_batch_that_nobody_wants(persistent, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)  # how long torch lets a worker end
    loader = PrefetchLoader(Slow(stuck_at=5), batch_size=1, **{**WORKERS, "persistent_workers": persistent})
    iterator = iter(loader)
    assert [next(iterator).item() for _ in range(5)] == list(range(5))
    began = time.monotonic()
    iterator.close()
    assert time.monotonic() - began < PATIENCE
    loader.close()
    nothing_is_left()


def test_the_next_epoch_waits_for_a_thread_that_collects_its_own_iterator():
    loader = PrefetchLoader(Slow(40), batch_size=2, **WORKERS)
    holder = [iter(loader)]
    next(holder[0]), next(holder[0])
    collect_in_its_thread(holder, loader._iterator)
    assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 40, 2)]
    loader.close()
    nothing_is_left()
