"""Runs that are stopped several times within an epoch resume exactly, from the states of worker processes."""

import threading
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading import streams, worker_streams
from lightning_turbo.data.loading.epoch_state import used_states
from lightning_turbo.data.loading.worker_streams import RoundsPosition, WorkerPlaces
from lightning_turbo.errors import TurboWarning
from tests.data.samples import Rows, Stream, saved, seeded, take, values

pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.filterwarnings("ignore::lightning_turbo.errors.NoEffectWarning"),
]

LENGTHS = {"even": (18, 18), "uneven": (22, 10), "the second is short": (19, 4), "one has none": (20, 0)}


@pytest.fixture(autouse=True)
def _asks_after_each_batch(monkeypatch):
    monkeypatch.setattr(streams, "LOADING_TO_ASKING", 0)


class Counted(IterableDataset):
    """A part of so many samples for each process, each with a random number and how many were read before it."""

    def __init__(self, lengths=(12, 12)):
        self.lengths, self.at, self.is_loaded, self.passes = lengths, 0, False, 0

    def __iter__(self):
        info = get_worker_info()
        assert info is None or info.dataset is self
        self.worker = 0 if info is None else info.id
        self.at, self.is_loaded = self.at if self.is_loaded else 0, False
        self.read = 0
        return self.samples()

    def samples(self):
        while self.at < self.lengths[self.worker]:
            self.at += 1
            self.read += 1
            yield self.sample()
        # As torchdata asks of a stream: it begins its next pass at the start.
        self.at, self.passes = 0, self.passes + 1

    def sample(self):
        drawn = int(torch.randint(10_000, ()))
        return torch.tensor([self.worker, self.passes, self.at, drawn, self.read])


class Placed(Counted):
    def state_dict(self):
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state):
        self.at, self.passes, self.is_loaded = state["at"], state["passes"], True


class Holding(Placed):
    """Draws from its own generator, whose state is not part of the stream's state."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.rng = seeded(4)

    def sample(self):
        drawn = int(torch.randint(10_000, (), generator=self.rng))
        return torch.tensor([self.worker, self.passes, self.at, drawn, self.read])


def without_reads(batches):
    """What is in the batches, but for how many samples were read before."""
    return [torch.as_tensor(batch)[..., :-1].tolist() for batch in batches]


def in_stops(make, stops, ahead=0, before=0):
    """The batches of a run that is stopped after so many of them each time, and goes on with another loader.

    Args:
        ahead: How many batches beyond them were fetched by then.
        before: How many epochs are over when it begins.
    """
    torch.manual_seed(0)
    loader, seen, used = make(), [], 0
    for _ in range(before):
        list(loader)
    for count in stops:
        iterator = iter(loader)
        taken = take(iterator, count + ahead)
        seen += taken[:count]
        used += count
        (state,) = used_states([saved(loader.state_dict())], over=False, used=used)
        rng = torch.get_rng_state()
        loader.close()
        torch.manual_seed(sum(stops))  # as in another process
        loader = make()
        loader.load_state_dict(saved(state))
        torch.set_rng_state(rng)
    rest = values(loader)
    later = values(loader)
    loader.close()
    return seen, rest, later


def straight(make, epochs):
    torch.manual_seed(0)
    loader = make()
    every = [values(loader) for _ in range(epochs)]
    loader.close()
    return every


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("size", [2, None])
def test_a_dataset_with_indices_stops_three_times_in_an_epoch(workers, size):
    def make():
        return PrefetchLoader(Rows(24, torch.tensor), size, shuffle=True, generator=seeded(3), num_workers=workers)

    first, second = straight(make, 2)
    seen, rest, later = in_stops(make, (2, 1, 3))
    assert (seen + rest, later) == (first, second)


WORKERS = [(0, False), (1, False), (2, False), (1, True), (2, True)]
CASES = [
    # Each number of processes, kind of share, batch and stream; the rest of them together is for the slow form.
    pytest.param(
        workers, stays, size, lengths, kind,
        id=f"{kind.__name__}-{workers}-{stays}-{size}-{share}",
        marks=[pytest.mark.slow] * bool((n + m + k) % 5),
    )
    for n, (workers, stays) in enumerate(WORKERS)
    for m, (share, lengths) in enumerate(LENGTHS.items())
    for k, (size, kind) in enumerate(((3, Placed), (None, Placed), (3, Holding)))
    # Where a process has nothing no round is whole, so that the stream is run through, by processes that are new.
    if share != "one has none" or (kind is Placed and not stays)
]  # fmt: skip


@pytest.mark.parametrize(("workers", "stays", "size", "lengths", "kind"), CASES)
def test_a_stream_with_a_state_stops_three_times_in_an_epoch(workers, stays, size, lengths, kind):
    """Also in an epoch after the first one, in which processes that stay have another state than new ones."""

    def make():
        settings = {"persistent_workers": stays} if workers else {}
        return PrefetchLoader(kind(lengths), size, num_workers=workers, **settings)

    before = int(stays)
    every = [without_reads(epoch) for epoch in straight(make, before + 2)]
    for stops, ahead in (((2, 1, 2), 0), ((3, 0, 2), 1)):
        seen, rest, later = in_stops(make, stops, ahead, before)
        assert without_reads(seen + rest) == every[before]
        assert without_reads(later) == every[before + 1]


@pytest.mark.parametrize(("workers", "stays"), WORKERS)
def test_a_stop_after_a_last_batch_that_is_not_full_does_not_begin_the_stream_again(workers, stays):
    """The stream was at its end by then, and returned the state at the beginning of its next pass."""

    def make():
        return PrefetchLoader(Placed((7, 7)), 3, num_workers=workers, persistent_workers=stays)

    first, second = map(without_reads, straight(make, 2))
    seen, rest, later = in_stops(make, (len(first) - 1, 1, 0))
    assert (without_reads(seen), rest, without_reads(later)) == (first, [], second)


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_it_does_not_read_what_was_used_again(workers, stays):
    def make(kind):
        return PrefetchLoader(kind((30, 30)), 2, num_workers=workers, persistent_workers=stays and workers > 0)

    # A round of batches at most, the last one that was not whole, is read again in each process.
    _, rest, _ = in_stops(lambda: make(Placed), (4, 3, 4))
    most = max(int(torch.tensor(batch)[:, -1].max()) for batch in rest)
    left = 30 - 11 * 2 // max(1, workers)
    assert most <= left + 2
    _, rest, _ = in_stops(lambda: make(Counted), (4, 3, 4))
    assert max(int(torch.tensor(batch)[:, -1].max()) for batch in rest) == 30


class Drawing(Stream):
    """Draws from a generator that it holds, and has no state."""

    def __init__(self, length):
        super().__init__(length)
        self.rng = seeded(4)

    def __iter__(self):
        for number in super().__iter__():
            yield 100 * number + int(torch.randint(100, (), generator=self.rng))


@pytest.mark.parametrize(("workers", "stays", "kind"), [
    *((*each, Stream) for each in WORKERS), (1, False, Drawing), (2, False, Drawing),
])  # fmt: skip
def test_a_stream_without_a_state_is_run_through_each_time(workers, stays, kind):
    def make():
        return PrefetchLoader(kind(23), 2, num_workers=workers, persistent_workers=stays)

    first, second = straight(make, 2)
    seen, rest, later = in_stops(make, (2, 3, 1))
    assert (seen + rest, later) == (first, second)


def test_a_second_iter_of_processes_that_stay_begins_at_the_place_too():
    def make():
        return PrefetchLoader(Placed(), 2, num_workers=2, persistent_workers=True)

    (every,) = straight(make, 1)
    torch.manual_seed(0)
    loader, other = make(), make()
    take(iter(loader), 5)
    other.load_state_dict(saved(loader.state_dict()))
    iter(other)
    assert without_reads(values(other)) == without_reads(every[5:])
    loader.close()
    other.close()


@pytest.mark.parametrize(("before", "now"), [(0, 1), (1, 0), (2, 0), (1, 2), (2, 1)])
def test_other_processes_run_through_the_stream(before, now):
    """With today's warning where more than one reads it; one process reads it as that of the loader does."""
    first, other = (PrefetchLoader(Placed((12, 0)), 2, num_workers=workers) for workers in (before, now))
    take(iter(first), 2)
    state = saved(first.state_dict())
    first.close()
    if {before, now} == {0, 1}:
        other.load_state_dict(state)
    else:
        with pytest.warns(TurboWarning, match="4 samples of the stream were used"):
            other.load_state_dict(state)
    rest = values(other)
    assert [row[2] for batch in rest for row in batch] == list(range(5, 13))
    assert rest[-1][-1][-1] == 12
    other.close()


class Asks(Placed):
    """Requires an argument for its state, as streams whose own loaders keep it do."""

    def state_dict(self, used):
        raise AssertionError(f"nobody knows of {used} here")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_whose_state_needs_arguments_is_run_through(workers):
    def make():
        return PrefetchLoader(Asks(), 2, num_workers=workers)

    (every,) = straight(make, 1)
    seen, rest, _ = in_stops(make, (2, 1))
    assert without_reads(seen + rest) == without_reads(every)


class Native(Placed):
    """Its method is one of C, of which Python does not know the arguments."""

    state_dict = {"at": 0, "passes": 0}.copy


class Abstract(Placed):
    """Has the methods of a base class that leaves them to others."""

    def state_dict(self):
        raise NotImplementedError

    load_state_dict = state_dict


class Locked(Placed):
    """Gives a state that nobody can copy."""

    def state_dict(self):
        return {"lock": threading.Lock()}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Native, Abstract, Locked])
def test_a_stream_that_gives_no_state_is_run_through(kind, workers):
    """Its batches are those of a DataLoader; a warning says why, in the process that asked."""

    def make():
        return PrefetchLoader(kind(), 2, num_workers=workers)

    says = kind is not Native and not workers
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (every,) = straight(make, 1)
        seen, rest, _ = in_stops(make, (2, 1))
    messages = [str(each.message) for each in caught if each.category is TurboWarning]
    assert bool(messages) is says
    assert all(f"state_dict() of the stream {kind.__name__}: expected a state" in each for each in messages)
    torch.manual_seed(0)
    assert without_reads(every) == without_reads(values(DataLoader(kind(), 2, num_workers=workers)))
    assert without_reads(seen + rest) == without_reads(every)


class LooksAhead(DataLoader):
    """Reads one batch ahead of the one that it returns, as loaders do that flag the last batch."""

    def __iter__(self):
        batches = super().__iter__()
        latest = next(batches)
        for batch in batches:
            yield latest
            latest = batch
        yield latest


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [Placed, Counted])
def test_a_loader_that_reads_ahead_by_itself_loses_no_batch(kind, workers):
    def make():
        return PrefetchLoader.of(LooksAhead(kind(), 2, num_workers=workers))

    first, second = straight(make, 2)
    seen, rest, later = in_stops(make, (2, 1, 2))
    assert without_reads(seen + rest) == without_reads(first)
    assert len(later) == len(second)


class Damaged(Placed):
    """Raises an error at one sample, and goes on behind it."""

    def samples(self):
        return self

    def __next__(self):
        if self.at == 10:
            raise StopIteration
        self.at += 1
        self.read += 1
        if self.at == 4 and self.worker == 0:
            raise ValueError("sample 4 is broken")
        return self.sample()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_goes_on_after_a_broken_batch(workers):
    def batches(iterator, count):
        seen = []
        for _ in range(count):
            try:
                seen += without_reads(take(iterator, 1))
            except ValueError:
                seen.append("broken")
        return seen

    def make():
        return PrefetchLoader(Damaged(), 1, num_workers=workers)

    torch.manual_seed(0)
    loader = make()
    every = batches(iter(loader), 20)  # and its end
    loader.close()
    assert "broken" in every
    torch.manual_seed(0)
    loader, seen = make(), []
    for count in (3, 2, 2):
        seen += batches(iter(loader), count)
        state, rng = saved(loader.state_dict()), torch.get_rng_state()
        loader.close()
        loader = make()
        loader.load_state_dict(state)
        torch.set_rng_state(rng)
    assert seen + batches(iter(loader), 13) == every
    loader.close()


class Starting(Placed):
    """Begins every pass where the state is that was loaded, as Hugging Face's, unless that is taken back."""

    def __init__(self, lengths=(12, 12)):
        super().__init__(lengths)
        self._starting_state_dict = {}

    def __iter__(self):
        self.at, self.is_loaded = self._starting_state_dict.get("at", 0), True
        return super().__iter__()

    def load_state_dict(self, state):
        self._starting_state_dict = state


def test_processes_that_stay_begin_later_epochs_at_the_start():
    def make():
        return PrefetchLoader(Starting(), 3, num_workers=2, persistent_workers=True)

    first, second = straight(make, 2)
    seen, rest, later = in_stops(make, (3, 2))
    assert (*map(len, (seen, rest)), len(later)) == (5, len(first) - 5, len(second))
    assert [row[2] for batch in later for row in batch] == [row[2] for batch in second for row in batch]


def shows(worker_id):
    info = get_worker_info()
    info.dataset.given = (worker_id, type(info.dataset).__name__)


class Given(Placed):
    def sample(self):
        assert self.given == (self.worker, "Given")
        return super().sample()


def test_the_start_of_a_process_finds_the_stream():
    batches = [values(kind(Given(), 2, num_workers=2, worker_init_fn=shows)) for kind in (DataLoader, PrefetchLoader)]
    assert [[row[:3] for row in batch] for batch in batches[0]] == [[row[:3] for row in batch] for batch in batches[1]]


@pytest.mark.slow
def test_processes_that_are_not_forked_go_on_too():
    def make():
        return PrefetchLoader(Placed(), 2, num_workers=2, multiprocessing_context="forkserver")

    (every,) = straight(make, 1)
    seen, rest, _ = in_stops(make, (3, 2))
    assert without_reads(seen + rest) == without_reads(every)


@pytest.mark.parametrize(("asking", "most"), [(0.0, 300), (0.002, 1), (0.02, 1), (5.0, 1)])
def test_a_process_asks_so_seldom_that_it_takes_a_small_part_of_the_time(asking, most, monkeypatch):
    """Each of 300 batches takes 10 ms. Two processes return states after equal numbers, though one is slower."""
    clock = type("Clock", (), {"now": 100.0, "perf_counter": lambda self: self.now})()
    monkeypatch.setattr(streams, "LOADING_TO_ASKING", 20)
    monkeypatch.setattr(worker_streams, "time", clock)

    def numbers_with_state(asking):
        class Slow(Placed):
            def state_dict(self):
                clock.now += asking
                return super().state_dict()

        places = WorkerPlaces([], 1, None)
        places.begin(Slow())
        numbers = []
        for number in range(1, 301):
            clock.now += 0.01
            if places.state_after([0]) is not None:
                numbers.append(number)
        return numbers

    numbers = numbers_with_state(asking)
    assert len(numbers) <= max(most, 1 + 300 * 0.01 / (20 * asking or 0.01))
    assert asking > 0.1 or set(numbers_with_state(asking / 3)) & set(numbers[1:])


def test_a_round_counts_once_all_processes_told_after_the_same_one():
    position = RoundsPosition(7, 2)
    position.start_from(6, ["from"])
    # The batch is the second one of the first process: not both processes have returned a state of that round.
    for worker, number, whole in (
        (0, 1, []), (1, 1, [(8, ["0:1", "1:1"])]), (0, 2, []), (None, 2, []), (None, 3, []), (1, 3, []),
        (0, 4, []), (1, 5, []), (0, 5, []), (1, 5, [(16, ["0:5", "1:5"])]),
    ):  # fmt: skip
        before = list(position.states)
        if worker is not None:
            position.keep((worker, number, f"{worker}:{number}"))
        assert position.states[len(before) :] == whole
        position.consumed += 1


def test_a_stream_is_named_in_messages_as_itself():
    stream = Stream()
    assert repr(worker_streams.PlacedStream(stream)) == repr(stream)
