"""A stream goes on at its sample with batches of another size, by its own state if it has an exact one."""

import itertools
import math
import queue
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading import streams, thread_policy
from lightning_turbo.data.loading.epoch_state import used_states
from lightning_turbo.errors import TurboWarning
from tests.data.samples import Stream, saved, seeded, take, values
from tests.leftovers import wait_until

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
@pytest.mark.parametrize("sizes", [(4, 4, 4), (3, 4, 5), (5, 2, 2), (2, 1, 6)])
@pytest.mark.parametrize("make", [Stream, Placed, HuggingFaces, buffered])
def test_each_sample_of_a_stream_comes_once(make, sizes, ahead, monkeypatch):
    """Also where a Trainer had fetched batches ahead, which were not used."""
    monkeypatch.setattr("lightning_turbo.data.loading.streams.LOADING_TO_ASKING", 0)
    plain = PrefetchLoader(make(), 4)
    expected, state, seen = [numbers(values(plain)) for _ in range(2)], None, []
    for size in sizes[:2]:
        loader = PrefetchLoader(make(), size)
        if state is not None:
            loader.load_state_dict(state)
        taken = take(iter(loader), 2 + ahead)
        seen += numbers(taken[:2])
        states = [loader.state_dict()]
        states = used_states(states, over=False, used=states[0]["consumed"] - len(taken[2:]))
        state = saved(states[0])
    loader = PrefetchLoader(make(), sizes[2])
    loader.load_state_dict(state)
    assert seen + numbers(values(loader)) == expected[0]
    assert numbers(values(loader)) == expected[1]
    # A buffer is in no state: such a stream is run through.
    goes_by_state = make in (Placed, HuggingFaces)
    assert getattr(loader.dataset, "loads", []) == [len(seen)] * goes_by_state


@pytest.mark.parametrize(("before", "now", "used", "said"), [
    # By the size of a batch and the number of worker processes.
    ((3, 1), (4, 1), 2, "6 samples .* 4 are left out now, in batches of 4 .processes: 1.: 2 are seen twice"),
    ((3, 1), (2, 0), 2, None),
    ((3, 0), (2, 1), 2, None),
    ((4, 2), (4, 2), 2, None),
    ((4, 2), (2, 2), 2, "8 samples .* 8 are left out now, in batches of 2 .processes: 2.: up to 8 may be seen twice"),
    ((4, 2), (4, 1), 3, "12 samples .* batches of 4 .processes: 2., and 12 .* up to 12 may be seen twice"),
    ((4, 2), (5, 0), 2, "8 samples .* and 5 are left out now, in batches of 5 .processes: 1.: up to 8 may be seen"),
])  # fmt: skip
def test_what_worker_processes_cannot_leave_out_is_said_in_numbers(before, now, used, said, recwarn):
    loader, other = (PrefetchLoader(Stream(), size, num_workers=workers) for size, workers in (before, now))
    whole, iterator = numbers(values(loader)), iter(loader)
    seen = take(iterator, used)
    state = saved(loader.state_dict())
    loader.close()
    if said is None:
        other.load_state_dict(state)
        assert numbers(seen + values(other)) == whole
    else:
        with pytest.warns(TurboWarning, match=said):
            other.load_state_dict(state)
        assert set(numbers(seen + values(other))) == set(range(20)) or before[1] == 2


class Iterates(DataLoader):
    """Has an ``__iter__`` of its own, which nobody can ask for single samples."""

    def __iter__(self):
        yield from super().__iter__()


def test_a_loader_with_an_iter_of_its_own_leaves_out_whole_batches_and_says_so():
    first, other, third = (PrefetchLoader.of(Iterates(Stream(), size)) for size in (3, 4, 4))
    take(iter(first), 2)
    with pytest.warns(TurboWarning, match="6 samples .* 4 are left out now, .* 2 are seen twice"):
        other.load_state_dict(saved(first.state_dict()))
    assert take(iter(other), 2) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    third.load_state_dict(saved(other.state_dict()))
    assert values(third) == [[12, 13, 14, 15], [16, 17, 18, 19]]


class Fails(Placed):
    """Draws when it is opened, and cannot be opened for some of the passes after the first."""

    def __init__(self, failures):
        super().__init__()
        self.failures, self.opened = failures, 0

    def __iter__(self):
        torch.rand(1)
        self.opened += 1
        if 1 < self.opened <= 1 + self.failures:
            raise OSError("not there")
        return super().__iter__()


class FailsToSample(Sampler):
    """Raises an error when it is asked for some of the orders after the first."""

    def __init__(self, failures):
        self.failures, self.asked = failures, 0

    def __len__(self):
        return 20

    def __iter__(self):
        self.asked += 1
        if 1 < self.asked <= 1 + self.failures:
            raise OSError("not there")
        return iter(torch.randperm(20).tolist())


def failing_stream(failures=1):
    return PrefetchLoader(Fails(failures), 4)


def failing_sampler(failures=1):
    return PrefetchLoader(range(20), 4, sampler=FailsToSample(failures), num_workers=1)


@pytest.mark.parametrize("make", [failing_stream, failing_sampler])
def test_a_state_after_an_iter_that_failed_is_that_of_a_loader_that_begins(make, monkeypatch):
    """The epoch before is over, and a state of it would go on in it with the random states of the next one."""
    # On a slow machine a thread would read the first pass to its end, after which the stream has another order.
    monkeypatch.setattr(thread_policy, "MIN_BATCH_SECONDS", math.inf)
    loader = make()
    first = take(iter(loader), 2)
    with pytest.raises(OSError, match="not there"):
        iter(loader)
    state = saved(loader.state_dict())
    assert (state["consumed"], state["order"]) == (0, None)
    rng = torch.get_rng_state()
    other = make(failures=0)
    other.load_state_dict(state)
    every = []
    for each in (loader, other):
        torch.set_rng_state(rng)
        every.append(values(each))
    assert every[0] == every[1] != first
    assert sorted(numbers(every[0])) == list(range(20))
    loader.close()
    other.close()


def test_the_state_of_a_dataset_with_indices_is_refused_by_a_stream_and_the_other_way_round():
    rows, stream = PrefetchLoader(range(20), 4), PrefetchLoader(Stream(), 4)
    for first, second, said in (
        (rows, stream, "sampler: expected SequentialSampler as when it was taken, got the stream Stream"),
        (stream, rows, "sampler: expected Stream as when it was taken, got SequentialSampler"),
    ):
        take(iter(first), 1)
        with pytest.raises(ValueError, match=said):
            second.load_state_dict(first.state_dict())


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
    background = iterator.background
    wait_until(lambda: background.thread is None or not background.room.qsize() or background.has_found_end)


@pytest.mark.parametrize("size", [1, 4, None])
@pytest.mark.parametrize("depth", [1, 3])
def test_samples_of_a_live_stream_that_were_loaded_ahead_are_told_once(size, depth, recwarn):
    loader = PrefetchLoader(Unending(0), size, prefetch_batches=depth)
    leave(loader, 3)
    said = f"was left when up to {(depth + 1) * (size or 1)} samples had been loaded ahead"
    with pytest.warns(TurboWarning, match=said):
        leave(loader, 2)
    recwarn.clear()
    leave(loader, 2)
    assert not recwarn
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
    monkeypatch.setattr("lightning_turbo.data.loading.loader.STREAM_PATIENCE", 0.05)
    monkeypatch.setattr("lightning_turbo.data.loading.background.JOIN_TIMEOUT", 600.0)
    stream = Live(12)
    loader = PrefetchLoader(stream, 2)
    iterator = iter(loader)
    assert numbers(take(iterator, 3)) == list(range(6))
    thread = iterator.background.thread
    wait_until(stream.queue.empty)
    with pytest.warns(TurboWarning, match="still waits for the next"):
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
