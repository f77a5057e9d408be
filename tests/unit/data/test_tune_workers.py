"""tune_workers: the choice, the time budget, and that nothing is left."""

import importlib
import json
import math
import multiprocessing
import os
import random
import threading
import time
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_turbo.data import PrefetchLoader, tune_workers
from lightning_turbo.data.tune_workers import WorkerRow
from tests.leftovers import nothing_is_left

module = importlib.import_module("lightning_turbo.data.tune_workers")
pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Waits(Dataset):
    def __init__(self, seconds, length=4000):
        self.seconds, self.length = seconds, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return index


def maker(dataset, cls=DataLoader, **more):
    def make_loader(**settings):
        return cls(dataset, 4, **settings, **more)

    return make_loader


SPEEDS = {
    "waits, which every worker shares": ({0: 4.0, 1: 4.1, 2: 2.0, 4: 1.0}, 4),
    "costs nothing, and every process is in its way": ({0: 0.1, 1: 0.4, 2: 0.5, 4: 0.9}, 0),
    "is hidden by one, within the tolerance": ({0: 2.0, 1: 1.04, 2: 1.0, 4: 1.2}, 1),
}


@pytest.mark.parametrize(("speeds", "best"), SPEEDS.values(), ids=SPEEDS)
def test_the_choice_follows_from_the_times(speeds, best, monkeypatch):
    """No clock is read: each setting takes what the table says, and the second prefetch factor a tenth less."""
    tried = []

    def measure(make_loader, step, clock, parts, settings):
        tried.append((settings["num_workers"], settings["prefetch_factor"]))
        seconds = speeds[settings["num_workers"]] * (0.9 if settings["prefetch_factor"] == 4 else 1.0)
        return WorkerRow(**settings, batches=9, seconds=seconds)

    monkeypatch.setattr(module, "_measure", measure)
    tuning = tune_workers(maker(range(4)), max_workers=4, show=None)
    first = [(1, 2), (0, None)] if multiprocessing.get_start_method() == "fork" else [(0, None), (1, 2)]
    assert tried[:4] == [*first, (2, 2), (4, 2)]  # one worker first, as its process can be ended
    assert tried[4:] == ([(best, 4)] if best else [])
    assert (tuning.num_workers, tuning.prefetch_factor) == (best, 4 if best else None)


@pytest.mark.parametrize(("method", "tried"), [("fork", [1]), ("spawn", [0, 1])])
def test_the_search_ends_where_workers_give_nothing_in_time(method, tried, monkeypatch):
    """And keeps what it has: where processes start slowly, 0 workers were tried before."""
    asked = []

    def late(make_loader, step, end, parts, settings):
        asked.append(settings["num_workers"])
        found = {"note": module._LATE} if settings["num_workers"] else {"batches": 9, "seconds": 1.0}
        return WorkerRow(**settings, **found)

    monkeypatch.setattr(module, "_measure", late)
    monkeypatch.setattr(module.multiprocessing, "get_start_method", lambda: method)
    if method == "spawn":
        assert tune_workers(maker(range(4)), max_workers=4, show=None).num_workers == 0
    else:
        with pytest.raises(RuntimeError, match=r"got no batch from any setting \(num_workers=1: too late\)"):
            tune_workers(maker(range(4)), max_workers=4, show=None)
    assert asked == tried


@pytest.mark.parametrize("cls", [DataLoader, PrefetchLoader])
def test_the_settings_and_the_table(cls):
    shown = []
    tuning = tune_workers(
        maker(Waits(0.001), cls), seconds=2, max_workers=1, prefetch_factors=[2, 3], show=shown.append
    )
    assert set(tuning.settings) == {"num_workers", "prefetch_factor", "pin_memory"}
    cls(range(3), **tuning.settings)
    lines = shown[0].splitlines()
    assert lines[0].split() == ["workers", "prefetch", "pinned", "batches", "ms", "a", "batch"]
    assert sum(line.endswith("<-") for line in lines) == 1
    nothing_is_left()


class Hangs(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(60)


@pytest.mark.slow  # torch gives a worker five seconds to end
@pytest.mark.parametrize(("cls", "step"), [(DataLoader, None), (PrefetchLoader, id)])
def test_a_loader_that_hangs_is_left_in_time_and_its_workers_are_ended(cls, step):
    with pytest.raises(RuntimeError, match=r"got no batch from any setting \(.*too late.*\)"):
        tune_workers(maker(Hangs(), cls), seconds=1.5, max_workers=1, show=None, step=step)
    nothing_is_left()


def test_random_generators_are_put_back():
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    random.seed(1)
    expected = generator.get_state(), torch.get_rng_state(), random.getstate()
    tune_workers(
        maker(torch.zeros(20), shuffle=True, generator=generator),
        seconds=0.5, max_workers=0, show=None, step=lambda batch: torch.rand(1),
    )  # fmt: skip
    assert torch.equal(generator.get_state(), expected[0])
    assert torch.equal(torch.get_rng_state(), expected[1])
    assert random.getstate() == expected[2]


def test_workers_that_cannot_be_started_are_told():
    class Local(Waits):
        pass

    def make_loader(num_workers, **settings):
        context = "spawn" if num_workers else None
        return DataLoader(Local(0.001), 4, num_workers=num_workers, multiprocessing_context=context, **settings)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tuning = tune_workers(make_loader, seconds=1, max_workers=1, show=None)
    assert tuning.num_workers == 0
    assert "local object 'test_workers_that" in tuning.rows[1].note
    nothing_is_left()


def test_the_step_is_part_of_what_is_measured_and_runs_where_training_does():
    threads, seen = set(), []

    def step(batch):
        threads.add(threading.current_thread())
        seen.append(batch.tolist())
        time.sleep(0.01)

    tuning = tune_workers(maker(range(10**6)), seconds=1, max_workers=0, show=None, step=step)
    assert tuning.rows[0].seconds > 0.01
    assert seen[0] == seen[1] != seen[2]  # the first one is slow after a fork, and made once more to be timed
    assert threads == {threading.current_thread()}


def test_an_error_in_the_step_is_raised_and_nothing_is_left():
    for cls in (DataLoader, PrefetchLoader):
        with pytest.raises(ZeroDivisionError):
            tune_workers(maker(range(10**6), cls), seconds=1, max_workers=1, show=None, step=lambda batch: 1 / 0)
    nothing_is_left()


def test_errors_are_told():
    class Bad(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise ValueError("no such row")

    with pytest.raises(RuntimeError, match=r"num_workers=0: ValueError: no such row.*Give it more seconds, or repair"):
        tune_workers(maker(Bad()), seconds=2, max_workers=0, show=None)
    with pytest.raises(RuntimeError, match="the loader is empty"):
        tune_workers(maker(torch.zeros(0, 3)), seconds=2, max_workers=0, show=None)


def test_the_answer_is_kept_in_a_file(tmp_path):
    path = tmp_path / "workers.json"
    first = tune_workers(maker(range(10**6)), seconds=0.5, max_workers=0, cache=path, show=None)
    again = tune_workers(maker(Hangs()), seconds=30, cache=path, show=None)
    assert again.cached
    assert (again.settings, again.rows) == (first.settings, first.rows)
    stored = json.loads(path.read_text())
    stored["machine"]["cores"] = (os.cpu_count() or 1) + 1
    path.write_text(json.dumps(stored))
    assert not tune_workers(maker(range(10**6)), seconds=0.5, max_workers=0, cache=path, show=None).cached
    path.write_text("no json")
    assert not tune_workers(maker(range(10**6)), seconds=0.5, max_workers=0, cache=path, show=None).cached


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"make_loader": 3}, TypeError, "make_loader: expected a function that returns a DataLoader, got 3"),
        ({"step": 3}, TypeError, "step=3: expected a function or None"),
        ({"show": 3}, TypeError, "show=3: expected a function or None"),
        ({"seconds": 0}, ValueError, "seconds: expected a finite number above zero, got 0"),
        ({"seconds": None}, ValueError, "above zero, got None"),
        ({"seconds": math.inf}, ValueError, "above zero, got inf"),
        ({"max_workers": -1}, ValueError, "max_workers: expected a whole number of 0 or more, or None, got -1"),
        ({"max_workers": 0.5}, ValueError, "or None, got 0.5"),
        ({"prefetch_factors": []}, ValueError, r"expected whole numbers of 1 or more, as .*, got \[\]"),
        ({"prefetch_factors": 2}, ValueError, "prefetch_factors: expected whole numbers of 1 or more, .* got 2"),
        ({"tolerance": -0.1}, ValueError, "tolerance: expected a finite number of 0 or more, as 0.05, got -0.1"),
        ({"tolerance": math.nan}, ValueError, "got nan"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        tune_workers(**{"make_loader": maker(range(3)), **arguments})
