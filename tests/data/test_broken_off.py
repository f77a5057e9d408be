"""Epochs that are broken off, begun twice, or not begun yet: the next one is that of a plain DataLoader."""

import functools
import gc
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from lightning_turbo.data import DevicePrefetcher, DeviceTransfer, PrefetchLoader
from tests.data.samples import Lazy, Rows, saved, seeded, take, values

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")


def lazily():
    return {"sampler": RandomSampler(range(20), True, 200, seeded(3))}


def shuffled():
    return {"shuffle": True, "generator": seeded(3)}


def after(seconds, index):
    time.sleep(seconds)
    return index


def waiting(seconds):
    return Rows(20, functools.partial(after, seconds))


def some(loader, batches, pause=0.0, kept=None):
    """The first batches of an epoch, with all of it loaded ahead that can be."""
    iterator = iter(loader)
    if kept is not None:
        kept.append(iterator)
    seen = take(iterator, 2)
    time.sleep(pause)
    return seen + take(iterator, batches - 2)


SAMPLERS = [shuffled, lazily]
CASES = [
    (make, settings, how)
    for make in SAMPLERS
    for settings in ({}, {"threads": 3})
    for how in ("dropped", "kept", "closed", "in the middle of a batch")
]
CASES += [(lazily, {"num_workers": 1}, "closed"), (shuffled, {"num_workers": 1}, "kept"), (shuffled, {}, "on a device")]


@pytest.mark.parametrize(("make", "settings", "how"), CASES)
def test_the_next_epoch_has_the_order_of_a_plain_loader(make, settings, how):
    """RandomSampler draws once more at its end, which a Trainer does not ask for after the last of 7 batches."""
    pause = 0.01 if how == "in the middle of a batch" else 0.0
    plain = DataLoader(Rows(), batch_size=3, **make(), num_workers=settings.get("num_workers", 0))
    ours = PrefetchLoader(waiting(pause), batch_size=3, **make(), **settings)
    if how == "on a device":
        ours = DevicePrefetcher(ours, "cpu", transform=abs)
    kept = [] if how == "kept" else None
    for batches in (4, 2) if pause else (4, 7, 2):
        got = some(ours, batches, 0.05, kept)
        if how == "closed":
            ours.close()
        assert got == some(plain, batches)
    assert values(ours) == values(plain)
    assert some(ours, 7) == some(plain, 7)


def refuse(batch):
    if any(index % 7 == 3 for index in torch.as_tensor(batch).flatten()):
        raise LookupError
    return batch


def past_errors(loader, batches, pause=0.0):
    """What as many calls of ``next`` give, with all of it loaded ahead that can be."""
    iterator, seen = iter(loader), []
    for _ in range(batches):
        try:
            seen.append(next(iterator).tolist())
        except (LookupError, StopIteration) as error:
            seen.append(type(error).__name__)
        time.sleep(pause)
    return seen


@pytest.mark.parametrize(
    "where",
    ["dataset", "threads", pytest.param("workers", marks=pytest.mark.slow), "transform", "threads and transform"],
)
@pytest.mark.parametrize("make", SAMPLERS)
def test_the_next_epoch_after_batches_that_raised_has_the_order_of_a_plain_loader(make, where):
    workers = {"num_workers": int(where == "workers")}
    own = {"threads": 3 if "threads" in where else 1}
    if "transform" in where:
        own["transfer"] = DeviceTransfer("cpu", transform=refuse)
    plain = DataLoader(Rows(20, refuse), batch_size=3, **make(), **workers)
    ours = PrefetchLoader(
        Rows() if "transform" in where else Rows(20, refuse), batch_size=3, **make(), **workers, **own
    )
    for batches in (4, 2) if where == "workers" else (5, 1, 7):
        assert past_errors(ours, batches, 0.01) == past_errors(plain, batches)
        if where == "workers":
            gc.collect()  # an error keeps torch's iterator and its worker until then


def test_a_generator_that_is_seeded_in_between_is_left_alone():
    def orders(cls, pause):
        own = torch.Generator()
        loader, seen = cls(Rows(), batch_size=3, sampler=RandomSampler(Rows(), True, 200, own)), []
        for epoch in range(3):
            kept = []
            own.manual_seed(epoch)
            some(loader, 3, pause, kept)
            time.sleep(pause)  # until the thread has nothing to do
            own.manual_seed(10 + epoch)
            seen.append(some(loader, 4, pause))
        return seen

    assert orders(PrefetchLoader, 0.05) == orders(DataLoader, 0)


@pytest.mark.parametrize("how", ["dropped", "closed", "state"])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_index_that_is_drawn_while_the_epoch_is_broken_off_goes_back(threads, how):
    drawing, go_on = threading.Event(), threading.Event()

    def hook():
        if threading.get_ident() != threading.main_thread().ident:
            drawing.set()
            go_on.wait(10)

    plain = DataLoader(Rows(), batch_size=1, sampler=Lazy())
    ours = PrefetchLoader(Rows(), batch_size=1, threads=threads, sampler=Lazy(hook=hook))
    kept = []
    assert some(ours, 2, 0, kept) == some(plain, 2)
    before = ours.state_dict()["generators"]
    assert drawing.wait(10)
    if how == "state":
        assert torch.equal(ours.state_dict()["generators"][0], before[0])
    threading.Timer(0.2, go_on.set).start()
    if how == "closed":
        ours.close()
    kept.clear()
    assert values(ours) == values(plain)


def test_persistent_workers_have_their_seed_already():
    def build():
        return PrefetchLoader(Rows(), batch_size=3, num_workers=1, persistent_workers=True, **shuffled())

    loader = build()
    list(loader)
    other = build()
    other.load_state_dict(saved(loader.state_dict()))
    for _ in range(2):
        assert values(other) == values(loader)
