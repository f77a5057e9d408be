"""Several threads that load the samples of a batch: as one thread would, in its errors too."""

import gc
import os
import random
import threading
import time
import traceback
import warnings
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading.threads import Draws, ThreadedDataset
from tests.data.samples import Rows, values
from tests.leftovers import prefetch_threads

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")


def fails(error, *places):
    """A dataset with samples of different durations, so that later ones are often loaded first; some raise errors."""

    def load(index):
        time.sleep(0.002 * (index % 3 == 0))
        if index in places:
            raise error(f"sample {index}") if error is not StopIteration else error
        return index

    return Rows(40, load)


def run(loader, error):
    """The batches and errors of an epoch; an error is one batch, after which it goes on."""
    seen, batches = [], iter(loader)
    while len(seen) < 30:
        try:
            seen.append(next(batches).tolist())
        except StopIteration:
            return seen
        except error as raised:
            seen.append(str(raised))
    return seen


@pytest.mark.parametrize("places", [(3,), (17, 18, 19), (16, 31), (36, 39)], ids=str)
@pytest.mark.parametrize("error", [ValueError, KeyError, StopIteration, IndexError], ids=lambda kind: kind.__name__)
def test_errors_are_those_of_one_thread(error, places):
    """``StopIteration`` ends an epoch of a plain loader too."""
    assert run(PrefetchLoader(fails(error, *places), 4, threads=2), error) == run(
        DataLoader(fails(error, *places), 4), error
    )
    assert not prefetch_threads()


@pytest.mark.parametrize("length", [0, 1, 3, 33])
@pytest.mark.parametrize("threads", [2, 5])
def test_batches_of_any_size_are_in_their_order(length, threads):
    data = Rows(length, lambda index: time.sleep(0.001 * (index % 2)) or index)
    for size in (1, 4, 40):
        assert values(PrefetchLoader(data, size, threads=threads)) == values(DataLoader(data, size))


class Drawing(Dataset):
    """A dataset whose samples draw from a global RNG or its own generator, and take different times."""

    def __init__(self, kind):
        self.generator = random if kind == "global" else random.Random(3)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.002 * (index % 3 == 0))
        return index, self.generator.random()


@pytest.mark.filterwarnings("ignore:threads=3 has no effect in this worker process:Warning")
@pytest.mark.filterwarnings("ignore:Batches are loaded in the calling thread:Warning")
@pytest.mark.parametrize("kind", ["global", "its own"])
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_draw_random_numbers_have_those_of_a_plain_loader(kind, workers):
    epochs = []
    for cls, more in ((DataLoader, {}), (PrefetchLoader, {"threads": 3})):
        random.seed(1)
        torch.manual_seed(1)
        loader = cls(Drawing(kind), 4, shuffle=True, num_workers=workers, **more)
        epochs.append([[part.tolist() for part in batch] for _ in range(2) for batch in loader])
    assert epochs[1] == epochs[0]


def test_a_worker_process_says_that_threads_have_no_effect_on_samples_that_draw(capfd):
    list(PrefetchLoader(Drawing("its own"), 4, num_workers=1, threads=3, worker_init_fn=_shows_warnings))
    said = "threads=3 has no effect in this worker process: loading draws from a random generator"
    assert said in capfd.readouterr().err


def _shows_warnings(worker):
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *more: os.write(2, str(message).encode())


class NoLength(Dataset):
    """A map-style dataset without a length, which the sampler knows."""

    def __getitem__(self, index):
        time.sleep(0.001)
        return index


class SaysNone(NoLength):
    """Whose length is that of what it keeps, as of a cache that is empty still."""

    def __len__(self):
        return 0


@pytest.mark.parametrize("data", [NoLength, SaysNone])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_is_not_asked_for_its_length(data, workers):
    loaders = [
        cls(data(), 4, sampler=range(21), num_workers=workers, **own)
        for cls, own in ((DataLoader, {}), (PrefetchLoader, {"threads": 2}))
    ]
    assert values(loaders[1]) == values(loaders[0])


def test_an_error_of_a_sample_keeps_the_dataset_alive_no_longer_than_itself():
    data = fails(ValueError, 17)
    gone = weakref.ref(data)
    with pytest.raises(ValueError, match="sample 17") as caught:
        list(PrefetchLoader(data, 4, threads=2))
    assert "load" in [entry.name for entry in traceback.extract_tb(caught.tb)]
    del caught, data
    gc.collect()
    assert gone() is None
    assert not prefetch_threads()


def test_whoever_asks_the_dataset_of_a_worker_for_a_sample_or_its_length_gets_the_datasets_own():
    """As a worker_init_fn does, which finds this object."""
    data = ThreadedDataset(Rows(7, lambda index: index * 2), 2, Draws())
    assert (len(data), data[3]) == (7, 6)


def test_a_pool_that_is_closed_in_one_of_its_threads_does_not_wait_for_itself():
    """As the collector does, which may find the pass at any line of any thread."""
    pool = ThreadedDataset(Rows(12, lambda index: pool.close() if index == 5 else index), 2, Draws())
    assert pool.__getitems__([0, 1, 2]) == [0, 1, 2]
    assert pool.__getitems__([4, 5]) == [4, None]
    assert pool.__getitems__([6, 7]) == [6, 7]
    pool.close()
    assert not prefetch_threads()


@pytest.mark.parametrize("threads", [1, 2], ids=["ahead", "pool"])
def test_the_collector_waits_for_no_thread(threads, monkeypatch):
    """It may run where ``threading`` holds a lock that a thread needs to end, as while another thread starts."""
    iterator = iter(PrefetchLoader(Rows(400), 2, threads=threads))
    for _ in range(6):
        next(iterator)
    assert prefetch_threads()
    kept = [iterator]
    kept.append(kept)
    del iterator, kept
    joined = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", lambda self, timeout=None: joined.append(self.name))
        gc.collect()
    assert joined == []
    end = time.monotonic() + 20
    while prefetch_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not prefetch_threads()
