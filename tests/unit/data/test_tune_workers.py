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
from prefetch_generator import BackgroundGenerator
from torch.utils.data import DataLoader, Dataset

from lightning_turbo.data import PrefetchLoader, tune_workers
from lightning_turbo.data.tune_workers import WorkerRow, _choose

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


def nothing_is_left():
    """No process is left, and no thread after a moment."""
    deadline = time.monotonic() + 20
    while [t for t in threading.enumerate() if t.name == "lightning_turbo-tune" or isinstance(t, BackgroundGenerator)]:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)
    return not multiprocessing.active_children()


SPEEDS = {
    "waits, which every worker shares": ({0: 4.0, 1: 4.1, 2: 2.0, 4: 1.0}, 4),
    "costs nothing, and every process is in its way": ({0: 0.1, 1: 0.4, 2: 0.5, 4: 0.9}, 0),
    "is hidden by one": ({0: 2.0, 1: 1.0, 2: 1.0, 4: 0.99}, 1),
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
    assert tried[:4] == [(1, 2), (0, None), (2, 2), (4, 2)]  # one worker first, as its process can be ended
    assert tried[4:] == ([(best, 4)] if best else [])
    assert (tuning.num_workers, tuning.prefetch_factor) == (best, 4 if best else None)


def test_0_workers_are_not_tried_where_one_gave_nothing_in_time(monkeypatch):
    def late(make_loader, step, clock, parts, settings):
        return WorkerRow(**settings, note=module._LATE)

    monkeypatch.setattr(module, "_measure", late)
    with pytest.raises(RuntimeError, match=r"num_workers=0: not tried; num_workers=1: too late"):
        tune_workers(maker(range(4)), max_workers=1, show=None)


def row(workers, seconds, factor=2, pinned=False):
    return WorkerRow(
        num_workers=workers, prefetch_factor=factor if workers else None, pin_memory=pinned, batches=9, seconds=seconds
    )


def test_the_smallest_within_the_tolerance_is_chosen():
    rows = [row(0, 2.0), row(1, 1.04), row(2, 1.0), row(4, 1.2)]
    assert _choose(rows, 0.05).num_workers == 1
    assert _choose(rows, 0.0).num_workers == 2
    assert _choose(rows, 9.0).num_workers == 0
    assert _choose([row(2, 1.0, 4), row(2, 1.04, 2)], 0.05).prefetch_factor == 2
    assert _choose([row(2, 1.0, 2, True), row(2, 1.04, 2)], 0.05).pin_memory is False
    assert _choose([WorkerRow(num_workers=0, prefetch_factor=None, pin_memory=False, note="x")], 1.0) is None


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
    assert nothing_is_left()


class Hangs(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(60)


@pytest.mark.parametrize(("cls", "step"), [(DataLoader, None), (PrefetchLoader, None), (PrefetchLoader, id)])
def test_a_loader_that_hangs_is_left_in_time_and_its_workers_are_ended(cls, step):
    with pytest.raises(RuntimeError, match=r"got no batch from any setting \(.*too late.*\)"):
        tune_workers(maker(Hangs(), cls), seconds=1.5, max_workers=1, show=None, step=step)
    assert nothing_is_left()


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


@pytest.mark.slow  # by the clock: how long a process takes to import torch
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("cls", [DataLoader, PrefetchLoader])
def test_workers_that_start_too_slowly_leave_what_is_left_to_0_workers(method, cls):
    def make_loader(num_workers, **settings):
        context = method if num_workers else None
        return cls(Waits(0.001), 4, num_workers=num_workers, multiprocessing_context=context, **settings)

    tuning = tune_workers(make_loader, seconds=0.5, max_workers=2, show=None)  # none imports torch so fast
    assert tuning.num_workers == 0
    assert tuning.rows[1].note == "too late to start"
    assert nothing_is_left()
    time.sleep(0.1)  # an error of a process that ended is raised by a signal, in the main thread


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
    assert nothing_is_left()


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
    with pytest.raises(ZeroDivisionError):
        tune_workers(maker(range(10**6)), seconds=1, max_workers=1, show=None, step=lambda batch: 1 / 0)
    assert nothing_is_left()


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
        ({"make_loader": 3}, TypeError, "make_loader=3 cannot be called"),
        ({"step": 3}, TypeError, "step=3 cannot be called"),
        ({"show": 3}, TypeError, "show=3 cannot be called"),
        ({"seconds": 0}, ValueError, "seconds=0: pass the time to spend, a finite number above zero"),
        ({"seconds": None}, ValueError, "seconds=None: pass the time to spend"),
        ({"seconds": math.inf}, ValueError, "seconds=inf: pass the time to spend"),
        ({"max_workers": -1}, ValueError, "max_workers=-1: pass a whole number, 0 or more"),
        ({"max_workers": math.nan}, ValueError, "max_workers=nan: pass a whole number"),
        ({"max_workers": 0.5}, ValueError, "max_workers=0.5: pass a whole number"),
        ({"prefetch_factors": []}, ValueError, "must hold whole numbers of 1 or more"),
        ({"prefetch_factors": 2}, ValueError, "prefetch_factors=2 must hold whole numbers of 1 or more"),
        ({"tolerance": -0.1}, ValueError, "tolerance=-0.1: pass a finite number, 0 or more"),
        ({"tolerance": math.nan}, ValueError, "tolerance=nan: pass a finite number"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        tune_workers(**{"make_loader": maker(range(3)), **arguments})
