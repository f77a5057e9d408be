"""Whether a thread loads: first it is measured what there is to gain, and only then a batch is watched for draws."""

import logging
import random
import sys
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_turbo import _random
from lightning_turbo.data import PrefetchIterator, PrefetchLoader
from lightning_turbo.data.loading import thread_policy
from lightning_turbo.data.loading.thread_policy import LoadProfile, ThreadPolicy
from lightning_turbo.errors import NoEffectWarning
from tests.data.samples import Rows, values

QUICK, SLOW = 1e-4, 0.02  # seconds for a batch


def found(policy):
    """What comes of a batch that is watched, if the next one is to be: nothing was drawn."""
    watch = policy.watch([])
    if watch is not None:
        with watch:
            pass
        policy.judge(watch)
    return watch


def load(policy, *seconds, is_left=True):
    """Whether a thread is wanted after each of these batches, and whether each was traced."""
    return [(bool((watch := found(policy)) and watch._limit), policy.count(each, is_left)) for each in seconds]


def test_a_slow_source_is_measured_then_watched_then_left_to_a_thread():
    profile = LoadProfile()
    # The first batch, which opens files, is not measured, nor is the watched one, which takes longer.
    assert load(ThreadPolicy(profile), 9.0, SLOW, 0.0) == [(False, False), (False, False), (True, True)]
    # The epoch after it begins with a thread, as long as batches were slow.
    assert load(ThreadPolicy(profile), 9.0) == [(False, True)]
    profile.batch_seconds = QUICK
    assert load(ThreadPolicy(profile), 9.0, *[QUICK] * 20) == [(False, False)] * 21
    assert load(ThreadPolicy(profile), 9.0, SLOW) == [(False, False), (False, True)]


def test_a_quick_source_is_never_watched_line_by_line():
    policy = ThreadPolicy(profile := LoadProfile())
    assert load(policy, 9.0, *[QUICK] * 40) == [(False, False)] * 41
    assert profile.draws == ""
    assert not profile.is_watched
    assert policy.is_settled
    assert policy.is_quick()


def test_a_source_that_becomes_slow_is_watched_then():
    policy = ThreadPolicy(LoadProfile())
    assert load(policy, QUICK, *[QUICK] * 20, 1.0, SLOW)[-3:] == [(False, False), (False, False), (True, True)]


def test_nothing_is_started_for_what_is_not_left():
    assert load(ThreadPolicy(LoadProfile()), SLOW, SLOW, SLOW, is_left=False)[-1] == (True, False)


@pytest.mark.parametrize("is_slow", [False, True])
def test_seeds_for_samples_are_told_of_once_and_where_a_thread_would_gain_something(is_slow):
    profile = LoadProfile()
    policy = ThreadPolicy(profile, is_seeded=True)
    load(policy, SLOW)
    if not is_slow:
        assert load(policy, QUICK, QUICK) == [(False, False)] * 2
        return
    with pytest.warns(NoEffectWarning, match="^sample_seeds seeds the random generators .*Use num_workers=1"):
        assert load(policy, SLOW, SLOW) == [(False, False)] * 2
    assert load(ThreadPolicy(profile, is_seeded=True), *[SLOW] * 3) == [(False, False)] * 3
    # Worker processes have generators of their own.
    assert load(ThreadPolicy(LoadProfile(), has_workers=True, is_seeded=True), *[SLOW] * 3)[-1] == (True, True)


class Data(Rows):
    """Draws in training alone, as a dataset with augmentation does."""

    def __init__(self, train):
        super().__init__(12)
        self.train = train

    def __getitem__(self, index):
        return index + self.train * (torch.rand(()).item() if self.train else 0)


@pytest.mark.parametrize("first", [False, True])
def test_what_one_dataset_draws_says_nothing_of_another_of_its_class(first, every_loader_has_a_thread):
    for train in (first, not first):
        loader, profile = PrefetchLoader(Data(train), 2), None
        torch.manual_seed(0)
        if train:
            with pytest.warns(NoEffectWarning, match="draws from the global RNG of torch"):
                got = values(loader)
        else:
            got = values(loader)
        torch.manual_seed(0)
        assert got == values(DataLoader(Data(train), 2))
        profile = loader._profile
        assert bool(profile.draws) == train


def verdicts(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "lightning_turbo.data"]


def test_the_decision_is_logged_at_debug(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "lightning_turbo.data")
    monkeypatch.setattr(thread_policy, "MIN_BATCH_SECONDS", 60.0)
    list(PrefetchLoader(range(80), 2))
    assert [each.rpartition(" takes ")[0] for each in verdicts(caplog)] == ["no thread: a batch"]
    caplog.clear()
    monkeypatch.setattr(thread_policy, "MIN_BATCH_SECONDS", 0.0)
    list(PrefetchLoader(range(80), 2))
    found = verdicts(caplog)
    assert [each.split(":")[0] for each in found] == ["a thread loads", "thread started", "thread ended"]
    caplog.clear()
    with pytest.warns(NoEffectWarning):
        list(PrefetchLoader(Data(True), 2))
    assert verdicts(caplog) == ["no thread: loading draws from the global RNG of torch, which the model may use too"]
    caplog.clear()
    with pytest.warns(NoEffectWarning):
        list(PrefetchLoader(range(80), 2, sample_seeds=1))
    assert verdicts(caplog) == ["no thread: sample_seeds seeds the generators of this process"]


def busy(index):
    for _ in range(300):
        pass
    return index


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody traces")
def test_more_python_than_is_looked_at_counts_as_a_draw(monkeypatch, every_loader_has_a_thread):
    monkeypatch.setattr(_random.GeneratorWatch, "LINES", 1000)
    with pytest.warns(NoEffectWarning, match="Loading a batch runs more than 1000 lines of Python.*num_workers=1"):
        assert values(PrefetchLoader(Rows(12, busy), 4)) == values(DataLoader(range(12), 4))


def test_a_slow_batch_is_looked_at_for_as_long_as_it_takes():
    policy = ThreadPolicy(LoadProfile())
    load(policy, SLOW, 1.0)
    assert policy.watch([])._limit == int(1.0 / _random.GeneratorWatch.LINE_SECONDS)


def test_what_loads_fast_is_loaded_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(thread_policy, "MIN_BATCH_SECONDS", 60.0)
    who = []
    iterator = PrefetchIterator(who.append(threading.current_thread()) or n for n in range(20))
    assert not iterator.ready()  # nobody knows yet
    assert [next(iterator), next(iterator)] == [0, 1]
    assert iterator.ready()
    assert list(iterator) == list(range(2, 20))
    assert not iterator.ready()
    assert set(who) == {threading.current_thread()}


def drawn(draw):
    for n in range(6):
        draw()
        yield n, threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize(
    ("name", "draw"),
    [("torch", lambda: torch.rand(1)), ("random", random.random), ("numpy.random", lambda: np.random.rand())],
)
def test_a_source_that_draws_from_shared_generators_stays_in_the_asking_thread(name, draw, every_loader_has_a_thread):
    with pytest.warns(NoEffectWarning, match=f"global RNG of {name}, .*num_workers=1") as caught:
        assert list(PrefetchIterator(drawn(draw))) == [(n, True) for n in range(6)]
    assert len(caught) == 1
    seeds = iter([torch.rand, *[int] * 5])  # draws at the start of a source keep nothing there
    got = list(PrefetchIterator(drawn(lambda: next(seeds)(1))))
    assert [main for _, main in got] == [True, True, False, False, False, False]
