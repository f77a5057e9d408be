"""Epochs that are broken off, begun twice, or not begun yet: the next one is that of a plain DataLoader."""

import functools
import gc
import time

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from lightning_turbo.data import DevicePrefetcher, DeviceTransfer, PrefetchLoader
from tests.data.samples import Rows, saved, seeded, take, values

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")


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


CASES = [
    (settings, how)
    for settings in ({}, {"threads": 3})
    for how in ("dropped", "kept", "closed", "in the middle of a batch")
]
CASES += [({"num_workers": 1}, "closed"), ({"num_workers": 1}, "kept"), ({}, "on a device")]


@pytest.mark.parametrize(("settings", "how"), CASES)
def test_the_next_epoch_has_the_order_of_a_plain_loader(settings, how):
    """RandomSampler draws once more at its end, which a Trainer does not ask for after the last of 7 batches."""
    pause = 0.01 if how == "in the middle of a batch" else 0.0
    plain = DataLoader(Rows(), batch_size=3, **shuffled(), num_workers=settings.get("num_workers", 0))
    ours = PrefetchLoader(waiting(pause), batch_size=3, **shuffled(), **settings)
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
def test_the_next_epoch_after_batches_that_raised_has_the_order_of_a_plain_loader(where):
    workers = {"num_workers": int(where == "workers")}
    own = {"threads": 3 if "threads" in where else 1}
    if "transform" in where:
        own["transfer"] = DeviceTransfer("cpu", transform=refuse)
    plain = DataLoader(Rows(20, refuse), batch_size=3, **shuffled(), **workers)
    ours = PrefetchLoader(
        Rows() if "transform" in where else Rows(20, refuse), batch_size=3, **shuffled(), **workers, **own
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


def test_persistent_workers_have_their_seed_already():
    def build():
        return PrefetchLoader(Rows(), batch_size=3, num_workers=1, persistent_workers=True, **shuffled())

    loader = build()
    list(loader)
    other = build()
    other.load_state_dict(saved(loader.state_dict()))
    for _ in range(2):
        assert values(other) == values(loader)
