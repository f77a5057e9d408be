"""A stream goes on at its sample with batches of another size, by its own state if it has an exact one."""

import itertools
import queue
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import IterableDataset

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading import streams
from lightning_turbo.errors import TurboWarning
from tests.data.samples import Stream, saved, seeded, take, values
from tests.leftovers import prefetch_threads, wait_until

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")


class Placed(IterableDataset):
    """Keeps its place, and has another order in each pass, as torchdata asks of a stream with a state."""

    def __init__(self):
        self.at, self.passes, self.is_loaded, self.loads = 0, 0, False, []

    def __iter__(self):
        self.at, self.is_loaded = self.at if self.is_loaded else 0, False
        order = torch.randperm(20, generator=seeded(self.passes)).tolist()
        while self.at < 20:
            self.at += 1
            yield order[self.at - 1]
        self.passes += 1

    def state_dict(self):
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state):
        self.at, self.passes, self.is_loaded = state["at"], state["passes"], True
        self.loads.append(self.at)


class HuggingFaces(IterableDataset):
    """Begins every pass where the state is that was loaded, and may shuffle in a buffer, which no state holds."""

    def __init__(self, **buffer):
        self._starting_state_dict, self.at, self.loads = {}, 0, []
        self._ex_iterable = SimpleNamespace(ex_iterables=[SimpleNamespace(ex_iterable=SimpleNamespace(**buffer))])
        self.size = buffer.get("buffer_size", 1)

    def __iter__(self):
        self.at, held = self._starting_state_dict.get("at", 0), []
        while self.at < 20 or held:
            while self.at < 20 and len(held) < self.size:
                held.append(self.at)
                self.at += 1
            yield held.pop(self.at % len(held))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self._starting_state_dict = state
        self.loads += state.values()


def buffered():
    return HuggingFaces(buffer_size=5)


def numbers(batches):
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("make", [Stream, Placed, HuggingFaces, buffered])
def test_each_sample_of_a_stream_comes_once(make, ahead, monkeypatch):
    """Also where a Trainer had fetched batches ahead, which were not used."""
    monkeypatch.setattr(streams, "LOADING_TO_ASKING", 0)
    plain = PrefetchLoader(make(), 3)
    expected, state, seen = [numbers(values(plain)) for _ in range(2)], None, []
    for _ in range(2):
        loader = PrefetchLoader(make(), 3)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        seen += numbers(take(iterator, 2 + ahead)[:2])
        state = saved(iterator.state_dict(unused=ahead))
        loader.close()
    loader = PrefetchLoader(make(), 3)
    loader.load_state_dict(state)
    assert seen + numbers(values(loader)) == expected[0]
    assert numbers(values(loader)) == expected[1]
    # A buffer is in no state: such a stream is run through.
    goes_by_state = make in (Placed, HuggingFaces)
    assert getattr(loader.dataset, "loads", []) == [len(seen)] * goes_by_state


@pytest.mark.parametrize(("before", "now"), [((3, 0), (4, 0)), ((4, 2), (4, 1)), ((4, 0), (4, 1))])
def test_other_batches_or_worker_processes_are_told(before, now):
    loader, other = (PrefetchLoader(Stream(), size, num_workers=workers) for size, workers in (before, now))
    take(iter(loader), 2)
    state = saved(loader.state_dict())
    loader.close()
    with pytest.warns(TurboWarning, match=r"2 batches of this epoch were used, but not which ones: samples may be"):
        other.load_state_dict(state)


def test_the_state_of_a_dataset_with_indices_in_a_stream_is_told_and_the_other_way_round():
    for data in ((range(20), Stream()), (Stream(), range(20))):
        first, second = (PrefetchLoader(each, 4) for each in data)
        take(iter(first), 1)
        with pytest.warns(TurboWarning, match="1 batches of this epoch were used, but not which ones"):
            second.load_state_dict(first.state_dict())


def test_a_state_in_worker_processes_is_not_asked_for_which_is_said():
    loader = PrefetchLoader(Placed(), 4, num_workers=1)
    iterator = iter(loader)
    take(iterator, 2)
    with pytest.warns(TurboWarning, match="Placed has a state_dict, which its worker processes are not asked for"):
        state = saved(loader.state_dict())
    again = PrefetchLoader(Placed(), 4, num_workers=1)
    again.load_state_dict(state)
    assert values(again) == values(iterator)


class Live(IterableDataset):
    """Gives what came to a queue, and goes on there in the next epoch."""

    def __init__(self, length):
        self.queue = queue.Queue()
        for number in range(length):
            self.queue.put(number)

    def __iter__(self):
        while True:
            yield self.queue.get()


class Unending(Live):
    """Begins each pass where the last one ended, and counts on."""

    def __init__(self, length):
        self.numbers = itertools.count()

    def __iter__(self):
        for number in self.numbers:
            time.sleep(0.001)
            yield torch.tensor(number)


def leave(loader, batches):
    """Take some batches of an epoch as a loop with a break does, after the thread has loaded ahead."""
    iterator = iter(loader)
    take(iterator, batches)
    ahead = None if iterator._running is None else iterator._running.ahead
    wait_until(lambda: ahead is None or not ahead._room.qsize() or iterator.progress.has_found_end)


@pytest.mark.parametrize("size", [1, 4, None])
@pytest.mark.parametrize("depth", [1, 3])
def test_samples_of_a_live_stream_that_were_loaded_ahead_are_told_once(size, depth, recwarn):
    loader = PrefetchLoader(Unending(0), size, prefetch_batches=depth)
    leave(loader, 4)
    said = f"was left when up to {(depth + 1) * (size or 1)} samples had been loaded ahead"
    with pytest.warns(TurboWarning, match=said):
        leave(loader, 2)
    recwarn.clear()
    leave(loader, 2)
    assert not [each for each in recwarn if "loaded ahead" in str(each.message)]
    loader.close()


@pytest.mark.parametrize("make", [
    lambda: PrefetchLoader(Stream(), 1), lambda: PrefetchLoader(range(40), 1),
    lambda: PrefetchLoader(Unending(0), 1, num_workers=1),
], ids=["its end was seen", "indices", "worker processes"])  # fmt: skip
def test_no_warning_where_nothing_is_lost_or_a_dataloader_loses_it_too(make):
    loader = make()
    leave(loader, 12)
    leave(loader, 2)
    loader.close()


def test_nothing_is_lost_within_a_limit():
    loader = PrefetchLoader(Live(30), 2)
    loader.limit_batches(lambda: 5)
    seen = [numbers(take(iter(loader), 5)) for _ in range(3)]
    assert seen == [list(range(first, first + 10)) for first in (0, 10, 20)]


def test_the_end_of_an_epoch_does_not_wait_for_a_stream_that_has_nothing(monkeypatch):
    monkeypatch.setattr("lightning_turbo.data.loading.epoch.STREAM_PATIENCE", 0.05)
    stream = Live(12)
    loader = PrefetchLoader(stream, 2)
    iterator = iter(loader)
    assert numbers(take(iterator, 3)) == list(range(6))
    (thread,) = prefetch_threads()
    wait_until(stream.queue.empty)
    with pytest.warns(TurboWarning, match="still waits for its batch"):
        loader.close()
    for number in range(2):
        stream.queue.put(number)
    thread.join(30)
    assert not thread.is_alive()


class Damaged(Stream):
    """Raises an error at its fourth sample, and goes on."""

    def __iter__(self):
        return Damage()


class Damage:
    def __init__(self):
        self.at = -1

    def __next__(self):
        self.at += 1
        if self.at == 3:
            raise ValueError("sample 3 is broken")
        if self.at == 8:
            raise StopIteration
        return self.at


def test_a_state_after_a_broken_batch_of_a_stream_goes_on():
    loader = PrefetchLoader(Damaged(), batch_size=1)
    iterator = iter(loader)
    assert take(iterator, 3) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="sample 3 is broken"):
        next(iterator)
    assert take(iterator, 2) == [[4], [5]]
    other = PrefetchLoader(Damaged(), batch_size=1)
    other.load_state_dict(saved(loader.state_dict()))
    assert values(other) == [[6], [7]]
    loader.close()


class Clock:
    """Stands for the clock: only asking a stream for its state takes time, and loading a batch."""

    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize(("asking", "most"), [(0.0, 21), (0.002, 5), (0.01, 2), (1.0, 1)])
def test_a_stream_is_asked_so_seldom_that_it_takes_a_small_part_of_the_time(asking, most, monkeypatch):
    """Each of its 20 batches takes 10 ms; its state may hold a buffer of any size."""
    clock = Clock()
    monkeypatch.setattr(streams, "time", clock)

    class Slow(Placed):
        asked = 0

        def __iter__(self):
            for each in super().__iter__():
                clock.now += 0.01
                yield each

        def state_dict(self):
            Slow.asked += 1
            clock.now += asking
            return super().state_dict()

    loader = PrefetchLoader(Slow(), 1)
    iterator = iter(loader)
    take(iterator, 13)
    state = saved(loader.state_dict())
    rest = values(iterator)
    assert 0 < Slow.asked <= most
    again = PrefetchLoader(Slow(), 1)
    again.load_state_dict(state)
    assert values(again) == rest
