"""Items that an iterator returns: all of them in order, and errors at their items."""

import sys
import threading
import time

import pytest
import torch

from lightning_turbo.data import PrefetchIterator, PrefetchLoader
from lightning_turbo.data.loading import thread_policy
from tests.data.loading.iterators import for_a_thread
from tests.data.samples import Rows
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


@pytest.mark.parametrize("error", [ValueError("bad"), StopIteration()])
def test_errors_of_a_stage_come_at_their_item_and_the_rest_follows(error):
    def stage(item):
        if item in (4, 5, 9):
            raise error
        return item

    iterator = for_a_thread(iter(range(12)))
    iterator.background.stages = [stage]
    got = []
    while not iterator.position.ended:
        try:
            got.append(next(iterator))
        except type(error):
            got.append("error")
        except StopIteration:
            break
    ends = isinstance(error, StopIteration)  # ends an epoch of a plain loader as well
    assert got == [0, 1, 2, 3, "error", *([] if ends else ["error", 6, 7, 8, "error", 10, 11])]
    assert not prefetch_threads()


def test_batches_in_memory_of_their_own_are_not_copied():
    made = [torch.full((3,), n) for n in range(6)]
    assert all(got is batch for got, batch in zip(PrefetchIterator(iter(made)), made, strict=True))


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


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["thread", "quick"])
@pytest.mark.parametrize(
    ("settings", "most", "begin"), [({}, 10, 50), ({"sample_seeds": 1}, 53, 54)], ids=["plain", "seeded"]
)
@pytest.mark.filterwarnings("ignore:sample_seeds seeds the random generators")
def test_how_many_calls_of_this_package_a_batch_and_an_epoch_take(settings, most, begin, seconds, monkeypatch):
    """A batch of four samples, in which seeds are set for each of them; and an epoch's beginning."""
    monkeypatch.setattr(thread_policy, "MIN_BATCH_SECONDS", seconds)
    short, long = (PrefetchLoader(Rows(length), 4, shuffle=True, **settings) for length in (80, 480))
    for loader in (short, long):
        list(loader)  # which finds out what the loader draws
    assert (calls(lambda: list(long)) - calls(lambda: list(short))) / 100 <= most
    assert calls(lambda: iter(short)) <= begin
