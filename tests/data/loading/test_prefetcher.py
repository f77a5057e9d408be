"""Items that an iterator returns: all of them in order, and errors at their items; and who loads them."""

import logging
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_turbo.data import DeviceTransfer, PrefetchIterator, PrefetchLoader
from lightning_turbo.data.loading import prefetcher
from lightning_turbo.errors import NoEffectWarning
from tests.data.samples import Rows, take, values
from tests.leftovers import prefetch_threads

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")


@pytest.mark.parametrize("pauses", [(0.0, 0.0), (0.0, 0.003), (0.003, 0.0)])
@pytest.mark.parametrize("length", [0, 1, 3, 30])
@pytest.mark.parametrize("depth", [1, 3])
def test_hands_over_every_item_in_order_and_ends(length, depth, pauses):
    source = (time.sleep(pauses[0]) or n for n in range(length))
    iterator = PrefetchIterator(source, prefetch_batches=depth)
    assert [(item, time.sleep(pauses[1])) for item in iterator] == [(n, None) for n in range(length)]
    assert not prefetch_threads()
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
@pytest.mark.parametrize("place", [0, 1, 2, 5])
def test_errors_come_at_their_item_with_their_traceback(error, place):
    def broken():
        yield from range(place)
        raise error

    iterator = PrefetchIterator(broken(), prefetch_batches=2)
    got = []
    with pytest.raises(type(error)) as caught:
        got.extend(item for item in iterator if got.append(item))
    assert got == list(range(place))
    assert caught.value is error
    assert "broken" in [entry.name for entry in caught.traceback]
    assert not prefetch_threads()
    if isinstance(error, Exception):
        assert list(iterator) == []  # a generator is dead after an error
    else:
        with pytest.raises(RuntimeError, match="stopped it while a batch was loaded"):
            next(iterator)


@pytest.mark.parametrize("where", ["dataset", "transform"])
@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("bad")])
def test_errors_of_batches_come_at_their_batch_and_the_rest_follows(error, where):
    def check(batch):
        if int(batch) in (4, 5, 9):
            raise error
        return batch

    transfer = DeviceTransfer("cpu", transform=check if where == "transform" else lambda batch: batch)
    loader = PrefetchLoader(Rows(12, check if where == "dataset" else int), batch_size=1, transfer=transfer)
    iterator, got = iter(loader), []
    while not iterator.is_over:
        try:
            got += next(iterator).tolist()
        except type(error):
            got.append("error")
        except StopIteration:
            break
    assert got == [0, 1, 2, 3, "error", "error", 6, 7, 8, "error", 10, 11]
    assert loader.state_dict()["consumed"] == 12
    assert not prefetch_threads()


def test_batches_in_memory_of_their_own_are_not_copied():
    made = [torch.full((3,), n) for n in range(6)]
    assert all(got is batch for got, batch in zip(PrefetchIterator(iter(made)), made, strict=True))


@pytest.mark.parametrize(("source", "settings", "error", "said"), [
    ([1, 2], {}, TypeError, "expected an iterator, got .*Pass iter"),
    (iter([]), {"prefetch_batches": 0}, ValueError, "prefetch_batches"),
    (iter([]), {"prefetch_batches": 1.5}, TypeError, "prefetch_batches"),
])  # fmt: skip
def test_wrong_arguments_are_refused(source, settings, error, said):
    with pytest.raises(error, match=said):
        PrefetchIterator(source, **settings)


# ---- Who loads.

QUICK, SLOW = 1e-4, 0.02  # seconds for a batch


class Clock:
    """Stands for the clock: only loading a batch takes time."""

    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def loaded_by(monkeypatch):
    """A function that returns for each batch, of some durations, whether a thread has loaded it."""
    monkeypatch.undo()
    clock = Clock()
    monkeypatch.setattr(prefetcher, "time", clock)

    def run(*seconds, epochs=1, limit=None):
        def load(index):
            clock.now += seconds[index]
            return int(threading.current_thread() is not threading.main_thread())

        loader = PrefetchLoader(Rows(len(seconds), load), batch_size=None)
        if limit is not None:
            loader.limit_batches(lambda: limit)
        return [[int(batch) for batch in loader] for _ in range(epochs)]

    return run


def test_a_slow_source_is_looked_at_in_two_batches_and_then_left_to_a_thread(loaded_by):
    """In the next epoch after one batch that is measured: nobody has to look for draws again."""
    assert loaded_by(*[SLOW] * 8, epochs=2) == [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("seconds", [
    [9.0, *[QUICK] * 20],  # the first batch, which opens files, is not measured
    [QUICK] * 40,
], ids=["after a slow beginning", "all of it"])  # fmt: skip
def test_a_quick_source_has_no_thread(loaded_by, seconds):
    assert loaded_by(*seconds, epochs=2) == [[0] * len(seconds)] * 2


def test_a_source_that_was_slow_once_in_a_few_batches_has_a_thread(loaded_by):
    (loaded,) = loaded_by(QUICK, QUICK, QUICK, 1.0, *[QUICK] * 6)
    assert loaded == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("limit", [1, 3])
def test_nothing_is_started_for_what_is_not_left(loaded_by, limit):
    assert loaded_by(*[SLOW] * 5, limit=limit) == [[0] * 5]


class Data(Rows):
    """Draws in training alone, as a dataset with augmentation does."""

    def __init__(self, train):
        super().__init__(12)
        self.train = train

    def __getitem__(self, index):
        return index + self.train * (torch.rand(()).item() if self.train else 0)


@pytest.mark.parametrize("first", [False, True])
def test_what_one_dataset_draws_says_nothing_of_another_of_its_class(first):
    for train in (first, not first):
        loader = PrefetchLoader(Data(train), 2)
        torch.manual_seed(0)
        if train:
            with pytest.warns(NoEffectWarning, match=r"loading draws random numbers.*num_workers=1") as told:
                got = values(loader)
            assert len(told) == 1
        else:
            got = values(loader)
        torch.manual_seed(0)
        assert got == values(DataLoader(Data(train), 2))


def test_a_step_that_draws_keeps_its_numbers():
    def run(cls):
        torch.manual_seed(0)
        return [(batch.tolist(), torch.rand(1).item()) for batch in cls(Rows(12), 2)]

    with pytest.warns(NoEffectWarning, match="what is done with a batch draws random numbers"):
        ours = run(PrefetchLoader)
    assert ours == run(DataLoader)


def test_the_decision_is_logged_at_debug(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "lightning_turbo.data")

    def verdicts():
        found = [record.getMessage() for record in caplog.records if record.name == "lightning_turbo.data"]
        caplog.clear()
        return found

    list(PrefetchLoader(Rows(80), 2))
    assert verdicts() == ["thread started", "thread ended: 37 batches were loaded"]
    with pytest.warns(NoEffectWarning):
        list(PrefetchLoader(Data(True), 2))
    assert verdicts() == ["no thread: loading draws"]


def test_ready_tells_whether_an_item_can_be_had_at_once(monkeypatch):
    monkeypatch.setattr(prefetcher, "MIN_SECONDS", 60.0)
    iterator = PrefetchIterator(iter(range(40)))
    assert not iterator.ready()  # nobody knows yet
    taken = [next(iterator) for _ in range(20)]
    assert iterator.ready()
    assert taken + list(iterator) == list(range(40))
    assert not iterator.ready()


def calls(function):
    """How many calls of this package a function makes, in all threads."""
    count = [0]

    def profile(frame, event, argument):
        count[0] += event == "call" and "/lightning_turbo/" in frame.f_code.co_filename

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count[0]


def test_a_thread_that_has_ended_costs_later_epochs_nothing():
    loader, kept = PrefetchLoader(Rows(80), 4, shuffle=True), iter(PrefetchLoader(Rows(200), 2))
    list(loader)
    before = calls(lambda: take(iter(loader), 0))
    take(kept, 8)
    assert calls(lambda: take(iter(loader), 0)) > before  # it compares what is drawn here
    take(kept, 90)
    for thread in threading.enumerate():
        if thread.name.startswith("lightning_turbo-prefetch"):
            thread.join()  # it has loaded the last batches, which nobody has taken yet
    assert calls(lambda: take(iter(loader), 0)) == before


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["thread", "quick"])
@pytest.mark.parametrize(("settings", "most", "begin"), [({}, 20, 60), ({"sample_seeds": 1}, 60, 60)], ids=str)
def test_how_many_calls_of_this_package_a_batch_and_an_epoch_take(settings, most, begin, seconds, monkeypatch):
    """A batch of four samples, in which seeds are set for each of them; and an epoch's beginning."""
    monkeypatch.setattr(prefetcher, "MIN_SECONDS", seconds)
    short, long = (PrefetchLoader(Rows(length), 4, shuffle=True, **settings) for length in (80, 480))
    for loader in (short, long):
        list(loader)  # which finds out what the loader draws
    assert (calls(lambda: list(long)) - calls(lambda: list(short))) / 100 <= most
    assert calls(lambda: take(iter(short), 0)) <= begin
