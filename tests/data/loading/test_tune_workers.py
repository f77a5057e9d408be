"""tune_workers: the choice, the time budget, and that nothing is left."""

import functools
import importlib
import random
import threading
import time
import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo.data import DevicePrefetcher, PrefetchLoader, tune_workers
from tests.data.samples import Rows, Stream, values

module = importlib.import_module("lightning_turbo.data.loading.tune_workers")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def after(seconds, index):
    time.sleep(seconds)
    return index


def waits(seconds=0.001):
    return Rows(4000, functools.partial(after, seconds))


def bad(index):
    raise ValueError("no such row")


class Drawing(Rows):
    """Draws from a generator of its own."""

    def __init__(self, length, own):
        super().__init__(length)
        self.own = own

    def __getitem__(self, index):
        self.own.random()
        return index


def maker(dataset, cls=DataLoader, **more):
    return lambda **settings: cls(dataset, 4, **settings, **more)


SPEEDS = {
    "waits, which every worker shares": ("fork", {1: 4.1, 0: 4.0, 2: 2.0, 4: 1.0}, 4),
    "costs nothing, and every process is in its way": ("fork", {1: 0.4, 0: 0.1, 2: 0.5, 4: 0.9}, 0),
    "is hidden by one, within the tolerance": ("spawn", {0: 2.0, 1: 1.04, 2: 1.0, 4: 1.2}, 1),
    "gives nothing in time where processes start slowly": ("spawn", {0: 1.0, 1: module.LATE}, 0),
    "gives nothing in time": ("fork", {1: module.LATE}, r"got no batch \(num_workers=1: too late\)"),
}


@pytest.mark.parametrize(("method", "speeds", "best"), SPEEDS.values(), ids=SPEEDS)
def test_the_choice_follows_from_the_times(method, speeds, best, monkeypatch):
    """No clock is read: each number of workers takes what the table says, in its order, or is too late."""
    tried = []

    def measure(make_loader, step, end, parts, num_workers):
        tried.append(num_workers)
        return speeds[num_workers]

    monkeypatch.setattr(module, "_measure", measure)
    monkeypatch.setattr(module, "start_method", lambda: method)
    if isinstance(best, str):
        with pytest.raises(RuntimeError, match=best):
            tune_workers(maker(range(4)), max_workers=4, show=None)
    else:
        assert tune_workers(maker(range(4)), max_workers=4, show=None).settings == {"num_workers": best}
    assert tried == list(speeds)


@pytest.mark.parametrize("cls", [DataLoader, PrefetchLoader])
def test_the_table_marks_the_choice(cls):
    shown = []
    tuning = tune_workers(maker(waits(), cls), seconds=1.5, max_workers=1, show=shown.append)
    lines = shown[0].splitlines()
    assert lines[0].split() == ["workers", "ms", "a", "batch"]
    assert [line.endswith("<-") for line in lines[1:]] == [tuning.num_workers == 0, tuning.num_workers == 1]


@pytest.mark.slow  # torch gives a worker five seconds to end
@pytest.mark.parametrize(("cls", "step"), [(DataLoader, None), (PrefetchLoader, id)])
def test_a_loader_that_hangs_is_left_in_time_and_its_workers_are_ended(cls, step):
    with pytest.raises(RuntimeError, match=r"got no batch \(.*too late.*\)"):
        tune_workers(maker(waits(60), cls), seconds=1.5, max_workers=1, show=None, step=step)


def test_random_generators_are_put_back_and_the_step_is_measured():
    generator, own, seen = torch.Generator().manual_seed(1), random.Random(1), []
    torch.manual_seed(1)
    random.seed(1)
    expected = generator.get_state(), torch.get_rng_state(), random.getstate(), own.getstate()

    def step(batch):
        seen.append(batch.tolist())
        time.sleep(0.01 + 0 * torch.rand(1).item())

    make_loader = maker(Drawing(1000, own), shuffle=True, generator=generator)
    assert tune_workers(make_loader, seconds=0.5, max_workers=0, show=None, step=step).rows[0] > 0.01
    assert seen[0] == seen[1] != seen[2]  # the first one is slow after a fork, and made once more to be timed
    assert torch.equal(generator.get_state(), expected[0])
    assert torch.equal(torch.get_rng_state(), expected[1])
    assert (random.getstate(), own.getstate()) == expected[2:]


def test_workers_that_cannot_be_started_are_refused():
    class Local(Rows):
        pass

    def make_loader(num_workers):
        return DataLoader(Local(), 4, num_workers=num_workers, multiprocessing_context="spawn" if num_workers else None)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tuning = tune_workers(make_loader, seconds=1, max_workers=1, show=None)
    assert tuning.num_workers == 0
    assert "ocal object" in tuning.rows[1]


def test_an_error_in_the_step_is_raised_and_nothing_is_left():
    for cls in (DataLoader, PrefetchLoader):
        with pytest.raises(ZeroDivisionError):
            tune_workers(maker(range(10**6), cls), seconds=1, max_workers=1, show=None, step=lambda batch: 1 / 0)


def test_errors_of_loading_are_reported():
    with pytest.raises(RuntimeError, match=r"num_workers=0: ValueError: no such row.*Give it more seconds, or repair"):
        tune_workers(maker(Rows(9, bad)), seconds=2, max_workers=0, show=None)


class InPlace(Sampler):
    """Shuffles its own list."""

    def __init__(self, data):
        self.data, self.order, self.own = data, list(range(len(data))), random.Random(0)

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        self.own.shuffle(self.order)
        return iter(self.order)


class Counting(InPlace):
    """Counts its passes."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(torch.randperm(len(self), generator=torch.Generator().manual_seed(self.passes)).tolist())


class WithState(Counting):
    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


SAMPLERS = {
    "shuffles in place": InPlace,
    "counts its passes": Counting,
    "has a state": WithState,
    "draws from its generator": lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(3)),
    "has an epoch": lambda data: DistributedSampler(data, 2, 0),
    "in a batch sampler": lambda data: BatchSampler(InPlace(data), 4, drop_last=False),
}


@pytest.mark.parametrize("cls", [DataLoader, PrefetchLoader])
@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_samplers_stay_where_they_are(make, cls):
    def order(measured):
        sampler = make(Rows(24))
        is_batched = isinstance(sampler, BatchSampler)
        which = {"batch_sampler": sampler} if is_batched else {"sampler": sampler, "batch_size": 4}
        if measured:
            tune_workers(lambda **more: cls(Rows(24), **which, **more), seconds=0.2, max_workers=0, show=None)
        loader = DataLoader(Rows(24), **which)
        return [values(loader) for _ in range(2)]

    assert order(measured=True) == order(measured=False)


def test_a_sampler_that_cannot_be_copied_is_refused_and_its_data_is_not_copied():
    class Uncopied(Rows):
        def __deepcopy__(self, memo):
            raise AssertionError

    data = Uncopied(24)
    sampler = InPlace(data)
    tune_workers(maker(data, sampler=sampler), seconds=0.2, max_workers=0, show=None)
    sampler.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"expected a loader whose sampler can be copied.*_thread.lock"):
        tune_workers(maker(data, sampler=sampler), seconds=0.2, max_workers=0, show=None)


class WithoutLength(Sampler):
    def __iter__(self):
        return iter(range(64))


@pytest.mark.parametrize("settings", [{"dataset": Stream(64)}, {"dataset": range(64), "sampler": WithoutLength()}])
def test_loaders_without_a_length_are_measured(settings):
    def make_loader(num_workers):
        return DataLoader(batch_size=4, num_workers=num_workers, **settings)

    assert tune_workers(make_loader, seconds=0.5, max_workers=0, show=None).num_workers == 0


def test_an_error_of_the_dataset_is_raised_unchanged():
    def broken(index):
        raise RuntimeError("the request to the bucket timed out")

    with pytest.raises(RuntimeError, match="num_workers=0: RuntimeError: the request to the bucket timed out"):
        tune_workers(maker(Rows(4, broken)), seconds=0.5, max_workers=0, show=None)


@pytest.mark.parametrize(
    "make",
    [lambda loader: [1, 2], lambda loader: DevicePrefetcher(loader, "cpu"), iter],
    ids=["a list", "a wrapper", "an iterator"],
)
def test_a_result_that_is_not_a_loader_is_refused(make):
    with pytest.raises(
        TypeError, match=r"make_loader: expected a function that returns a DataLoader; where something wra"
    ):
        tune_workers(lambda **settings: make(DataLoader(range(8))), seconds=0.5, max_workers=0, show=None)
    with pytest.raises(TypeError, match="make_loader: expected a function that returns a DataLoader"):
        tune_workers([torch.ones(2)], seconds=0.5)
