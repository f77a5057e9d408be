"""An ``IterableDataset``, beside a DataLoader, stock Lightning and runs that never stopped: no sample twice or lost."""

import itertools
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo import PrefetchLoader
from tests.data.samples import take, values
from tests.promises.runs import LENGTH, Slow, another_process, is_told, seed, stock, stopped, turbo

pytestmark = [
    pytest.mark.usefixtures("all_ends", "every_loader_has_a_thread"),
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::lightning_turbo.errors.NoEffectWarning"),
    # torchdata calls a deprecated function of torch.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
]


class Unsized(IterableDataset):
    """The numbers below ``LENGTH``, interleaved over the worker processes."""

    first, read = 0, 0

    def __iter__(self):
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        begin, self.first = self.first, 0
        for self.at in range(begin + 1, LENGTH // workers + 1):
            time.sleep(1e-4)
            self.read += 1
            yield self.sample(number + (self.at - 1) * workers)
        self.at = 0

    def sample(self, index):
        return index


class Sized(Unsized):
    def __len__(self):
        return LENGTH


class WithState(Unsized):
    at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.first = state["at"]


class SizedWithState(WithState, Sized):
    """Has both."""


def beside(kind, make, workers, plain=DataLoader):
    """Check an epoch with three stops and the one after it."""

    def loader(kind):
        return kind(make(), batch_size=4, num_workers=workers)

    seed(0)
    straight = loader(plain)
    expected = [values(straight), values(straight)]
    seed(0)
    again, seen = loader(kind), []
    for batches in (2, 3, 1):
        seen += take(iter(again), batches)
        again = another_process(lambda: loader(kind), again)
    assert [seen + values(again), values(again)] == expected
    again.close()


ASKS_TORCHDATA = pytest.mark.filterwarnings("ignore:.*has a state_dict, which its worker processes are not asked for")


@ASKS_TORCHDATA
@pytest.mark.parametrize(("make", "workers"), [
    (Unsized, 0), (Unsized, 1), (Unsized, 2), (WithState, 0), (WithState, 1), (WithState, 2), (Sized, 0),
    (SizedWithState, 1),
])  # fmt: skip
def test_three_stops_in_one_epoch_of_a_stream(make, workers):
    beside(PrefetchLoader, make, workers)


def torchdatas(*arguments, **settings):
    return PrefetchLoader.of(StatefulDataLoader(*arguments, **settings))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("make", [WithState, Slow])
def test_three_stops_in_one_epoch_of_a_loader_of_torchdata(make, workers):
    beside(torchdatas, make, workers, plain=StatefulDataLoader)


@pytest.mark.parametrize("make", [WithState, SizedWithState])
def test_a_stream_with_a_state_is_not_run_through_after_a_stop(make):
    def loader():
        return PrefetchLoader(make(), batch_size=4)

    before = loader()
    seen = take(iter(before), 6)
    again = another_process(loader, before)
    assert seen + values(again) == values(DataLoader(make(), batch_size=4))
    assert again.dataset.read < LENGTH


# ---- Runs.


@ASKS_TORCHDATA
@pytest.mark.parametrize(("kind", "make", "workers"), [
    (DataLoader, Unsized, 0), (DataLoader, Sized, 0), (DataLoader, WithState, 0), (DataLoader, WithState, 1),
    (StatefulDataLoader, WithState, 0), (StatefulDataLoader, WithState, 2),
])  # fmt: skip
def test_three_stops_in_one_epoch_of_a_run(kind, make, workers, tmp_path):
    """Lightning has fetched one batch more than it used where the stream has no length."""

    def loader():
        return kind(make(), batch_size=4, num_workers=workers)

    straight = stock(loader())
    assert stopped(turbo, loader, (2, 5, 6), tmp_path) == straight


class Draws(Unsized):
    def sample(self, index):
        return index + torch.rand(())


class SizedDraws(Draws, Sized):
    """Has both."""


@pytest.mark.parametrize("make", [Draws, SizedDraws])
def test_a_run_whose_stream_and_steps_draw_goes_on(make, tmp_path):
    def loader():
        return DataLoader(make(), batch_size=4)

    assert stopped(turbo, loader, (3, 9), tmp_path) == stock(loader())


# ---- Streams that go on for ever.


class Live(IterableDataset):
    """Goes on with the next number in each pass, as a queue does."""

    def __init__(self):
        self.numbers = itertools.count()

    def __iter__(self):
        for number in self.numbers:
            time.sleep(1e-3)
            yield number


def test_samples_that_a_break_loses_are_told():
    def epochs(kind):
        loader = kind(Live(), batch_size=2)
        seen = []
        for _ in range(3):
            for batch, _ in zip(loader, range(5), strict=False):
                seen += batch.tolist()
                time.sleep(0.005)
        return seen

    seen, told = is_told(lambda: epochs(PrefetchLoader))
    assert seen == epochs(DataLoader) or told


def test_a_run_with_a_limit_loses_no_sample():
    assert turbo(DataLoader(Live(), batch_size=2), limit_train_batches=5) == stock(
        DataLoader(Live(), batch_size=2), limit_train_batches=5
    )


class Waits(IterableDataset):
    """Has no more to give after some numbers, until it is let go."""

    def __init__(self):
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def __iter__(self):
        yield from range(12)
        self.waits.set()
        self.goes_on.wait(30)


@pytest.mark.parametrize("end", ["dropped", "closed"])
def test_a_stream_that_waits_is_left_in_time(end):
    stream = Waits()
    loader = PrefetchLoader(stream, batch_size=2)
    iterators = [iter(loader)]
    assert take(iterators[0], 3) == [[0, 1], [2, 3], [4, 5]]
    stream.waits.wait(10)  # where a thread reads ahead
    began = time.monotonic()
    is_told(loader.close if end == "closed" else iterators.clear)
    seconds = time.monotonic() - began
    stream.goes_on.set()
    assert seconds < 10
