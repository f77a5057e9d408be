"""Epochs that are broken off, begun twice, or not begun yet: the next one is that of a plain DataLoader."""

import copy
import gc
import random
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from lightning_turbo.data import DeviceTransfer, PrefetchLoader, prefetcher
from lightning_turbo.data.prefetcher import BackgroundIterator
from tests.unit.data.test_resume import saved

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(prefetcher, "WORTH", 0.0)  # the thread begins, fast as the loader is


class Twenty(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index


class Lazy(Sampler):
    """Draws one index at a time."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 20

    def __iter__(self):
        return (self.draw() for _ in range(20))


def torch_lazily():
    return {"sampler": RandomSampler(Twenty(), True, 200, torch.Generator().manual_seed(3))}


def python_lazily():
    own = random.Random(3)
    return {"sampler": Lazy(lambda: own.randrange(20))}


def numpy_lazily():
    own = np.random.default_rng(3)
    return {"sampler": Lazy(lambda: int(own.integers(20)))}


def shuffled():
    return {"shuffle": True, "generator": torch.Generator().manual_seed(3)}


SAMPLERS = [shuffled, torch_lazily]


def some(loader, batches, pause, kept=None):
    """The first batches of an epoch, with all of it loaded ahead that can be."""
    iterator = iter(loader)
    if kept is not None:
        kept.append(iterator)
    seen = [next(iterator).tolist() for _ in range(2)]
    time.sleep(pause)
    return seen + [next(iterator).tolist() for _ in range(batches - 2)]


@pytest.mark.parametrize("how", ["dropped", "kept", "closed"])
@pytest.mark.parametrize("settings", [{}, {"threads": 3}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("make", SAMPLERS)
def test_the_next_epoch_has_the_order_of_a_plain_loader(make, settings, how):
    workers = {"num_workers": settings.get("num_workers", 0)}
    plain = DataLoader(Twenty(), batch_size=3, **make(), **workers)
    ours = PrefetchLoader(Twenty(), batch_size=3, **make(), **settings)
    kept, epochs = [] if how == "kept" else None, []
    for batches in (4, 5, 2):
        epochs.append(some(ours, batches, 0.1, kept))
        if how == "closed":
            ours.close()
        assert epochs[-1] == some(plain, batches, 0)
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in plain]
    ours.close()


class Faulty(Twenty):
    def __getitem__(self, index):
        if index % 7 == 3:
            raise LookupError(index)
        return index


def refuse(batch):
    if any(index % 7 == 3 for index in batch.tolist()):
        raise LookupError
    return batch


def past_errors(loader, batches, pause):
    """What as many calls of ``next`` give, with all of it loaded ahead that can be."""
    iterator, seen = iter(loader), []
    for _ in range(batches):
        try:
            seen.append(next(iterator).tolist())
        except (LookupError, StopIteration) as error:
            seen.append(type(error).__name__)
        time.sleep(pause)
    return seen


@pytest.mark.parametrize("where", ["dataset", "threads", "workers", "transform", "threads and transform"])
@pytest.mark.parametrize("make", SAMPLERS)
def test_the_next_epoch_after_batches_that_raised_has_the_order_of_a_plain_loader(make, where):
    workers, own = {"num_workers": int(where == "workers")}, {}
    dataset = Twenty() if "transform" in where else Faulty()
    if "threads" in where:
        own["threads"] = 3
    if "transform" in where:
        own["transfer"] = DeviceTransfer("cpu", transform=refuse)
    plain = DataLoader(Faulty(), batch_size=3, **make(), **workers)
    ours = PrefetchLoader(dataset, batch_size=3, **make(), **workers, **own)
    for batches in (7, 1, 4, 5, 2, 7, 3):
        assert past_errors(ours, batches, 0.01) == past_errors(plain, batches, 0)
        gc.collect()  # an error keeps torch's iterator and its worker until then
    ours.close()


class Slow(Twenty):
    def __getitem__(self, index):
        time.sleep(0.02)
        return index


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("make", SAMPLERS)
def test_a_batch_that_is_under_way_when_the_epoch_is_broken_off(make, threads):
    plain = DataLoader(Twenty(), batch_size=3, **make())
    ours = PrefetchLoader(Slow(), batch_size=3, threads=threads, **make())
    for batches in (6, 3, 2):
        assert some(ours, batches, 0.01) == some(plain, batches, 0)
    ours.close()


def test_a_generator_that_is_seeded_in_between_is_left_alone():
    def orders(cls, pause):
        own = torch.Generator()
        loader, seen = cls(Twenty(), batch_size=3, sampler=RandomSampler(Twenty(), True, 200, own)), []
        for epoch in range(3):
            kept = []
            own.manual_seed(epoch)
            some(loader, 3, pause, kept)
            time.sleep(pause)  # until the thread has nothing to do
            own.manual_seed(10 + epoch)
            seen.append(some(loader, 4, pause))
        return seen

    assert orders(PrefetchLoader, 0.05) == orders(DataLoader, 0)


def test_an_iterator_that_is_let_go_late_moves_nothing():
    plain, ours = (cls(Twenty(), batch_size=3, **shuffled()) for cls in (DataLoader, PrefetchLoader))
    kept = []
    assert some(ours, 3, 0.05, kept) == some(plain, 3, 0)
    assert some(ours, 3, 0.05) == some(plain, 3, 0)
    kept.clear()
    gc.collect()
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in plain]


@pytest.mark.parametrize("how", ["dropped", "closed"])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_index_that_is_drawn_while_the_epoch_is_broken_off_goes_back(threads, how):
    own, drawing, go_on = random.Random(3), threading.Event(), threading.Event()

    def draw():
        index = own.randrange(20)
        if "prefetch" in threading.current_thread().name:
            drawing.set()
            go_on.wait(10)
        return index

    plain = DataLoader(Twenty(), batch_size=1, **python_lazily())
    ours = PrefetchLoader(Twenty(), batch_size=1, threads=threads, sampler=Lazy(draw))
    kept = []
    assert some(ours, 2, 0, kept) == some(plain, 2, 0)
    assert drawing.wait(10)
    threading.Timer(0.2, go_on.set).start()
    if how == "closed":
        ours.close()
    kept.clear()
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in plain]


@pytest.mark.parametrize("settings", [{}, {"threads": 3}, {"num_workers": 1}], ids=str)
def test_the_next_epoch_waits_for_a_thread_that_collects_its_own_iterator_and_puts_back(settings):
    own, given, collected, holder = random.Random(3), threading.Event(), threading.Event(), []

    def draw():
        index = own.randrange(20)
        if "prefetch" in threading.current_thread().name and not collected.is_set():
            given.wait(10)
            holder.clear()
            collected.set()
            time.sleep(0.3)
        return index

    workers = {"num_workers": settings.get("num_workers", 0)}
    plain = DataLoader(Twenty(), batch_size=1, **python_lazily(), **workers)
    ours = PrefetchLoader(Twenty(), batch_size=1, sampler=Lazy(draw), **settings)
    assert some(ours, 2, 0, holder) == some(plain, 2, 0)
    given.set()
    assert collected.wait(10)
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in plain]


@pytest.mark.parametrize("settings", [{}, {"threads": 3}, {"num_workers": 1}], ids=str)
def test_a_state_that_is_asked_for_while_an_index_is_drawn_is_that_of_the_last_batch(settings):
    own, drawing, go_on = random.Random(3), threading.Event(), threading.Event()

    def draw():
        index = own.randrange(20)
        if "prefetch" in threading.current_thread().name:
            drawing.set()
            go_on.wait(10)
        return index

    ours = PrefetchLoader(Twenty(), batch_size=1, sampler=Lazy(draw), **settings)
    iterator = iter(ours)
    next(iterator), next(iterator)
    before = ours._prefetch_position.state
    assert drawing.wait(10)
    state = ours.state_dict()
    go_on.set()
    assert state["own"] == before
    ours.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_that_is_let_go_while_the_next_epoch_begins_moves_nothing(workers):
    own, kept, holder = random.Random(3), [], []

    def draw():
        index = own.randrange(20)
        holder.clear()
        return index

    plain = DataLoader(Twenty(), batch_size=1, num_workers=workers, **python_lazily())
    ours = PrefetchLoader(Twenty(), batch_size=1, num_workers=workers, sampler=Lazy(draw))
    assert some(ours, 3, 0.05, kept) == some(plain, 3, 0)
    kept[0].park()  # so that no thread draws
    holder.append(kept.pop())
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in plain]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_is_taken_ahead_than_is_wanted(threads):
    taken = []
    source = (taken.append(number) or number for number in range(20))
    iterator = BackgroundIterator(source, prefetch_batches=8, threads=threads, stage=float, wanted=6)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    time.sleep(0.1)
    assert taken == [0, 1, 2, 3, 4, 5]
    assert [next(iterator) for _ in range(3)] == [3, 4, 5]
    time.sleep(0.05)
    assert taken == [0, 1, 2, 3, 4, 5]
    assert not iterator.ready()
    assert next(iterator) == 6  # one that is asked for all the same
    assert taken == [0, 1, 2, 3, 4, 5, 6]
    assert list(iterator) == list(range(7, 20))


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_parking_keeps_the_count_of_what_is_wanted(wanted):
    taken = []
    source = (taken.append(number) or number for number in range(20))
    iterator = BackgroundIterator(source, wanted=wanted)
    for number in range(wanted):
        assert next(iterator) == number
        assert iterator.park()
    time.sleep(0.05)
    assert taken == list(range(wanted))
    assert list(iterator) == list(range(wanted, 20))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("used", [2, 7])
@pytest.mark.parametrize("make", SAMPLERS)
def test_a_second_iterator_begins_where_the_first_one_would_have(make, used, workers):
    def build():
        return PrefetchLoader(Twenty(), batch_size=3, drop_last=True, num_workers=workers, **make())

    loader = build()
    iterator = iter(loader)
    seen = [next(iterator).tolist() for _ in range(min(used, len(loader)))]
    state = saved(loader.state_dict())
    assert state["whole"] == (len(seen) == len(loader))
    rest = [batch.tolist() for batch in (loader if state["whole"] else iterator)]

    other = build()
    other.load_state_dict(state)
    iter(other)  # as Lightning does when it goes on from a checkpoint
    again = saved(other.state_dict())
    assert [batch.tolist() for batch in other] == rest
    following = [batch.tolist() for batch in other]
    assert following != rest

    third = build()
    third.load_state_dict(again)
    assert [batch.tolist() for batch in third] == rest
    assert [batch.tolist() for batch in third] == following


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", SAMPLERS)
def test_a_state_before_the_first_batch_has_the_order_to_come(make, workers):
    loader = PrefetchLoader(Twenty(), batch_size=3, num_workers=workers, **make())
    list(loader)
    iterator = iter(loader)
    state = saved(loader.state_dict())
    other = PrefetchLoader(Twenty(), batch_size=3, num_workers=workers, **make())
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in iterator]


@pytest.mark.parametrize("epochs", [1, 2])
def test_persistent_workers_have_their_seed_already(epochs):
    def build():
        return PrefetchLoader(Twenty(), batch_size=3, num_workers=1, persistent_workers=True, **shuffled())

    loader = build()
    for _ in range(epochs):
        list(loader)
    other = build()
    other.load_state_dict(saved(loader.state_dict()))
    for _ in range(2):
        assert [batch.tolist() for batch in other] == [batch.tolist() for batch in loader]
    loader.close()
    other.close()


def test_a_copy_of_a_loader_does_not_go_on():
    loader = PrefetchLoader(Twenty(), batch_size=3, **shuffled())
    iterator = iter(loader)
    first = next(iterator)
    other = PrefetchLoader(Twenty(), batch_size=3, **shuffled())
    other.load_state_dict(saved(loader.state_dict()))
    fresh = copy.copy(other)
    assert len(list(fresh)) == 6  # it was to go on, and so does its copy
    next(iter(other))
    assert len(list(copy.copy(other))) == 7
    assert first.shape == (3,)
