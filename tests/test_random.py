"""Generators: which ones are used, and finding those that a dataset holds without side effects."""

import contextlib
import gc
import os
import random
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_turbo import _random
from lightning_turbo._random import GeneratorWatch, generators_in, parts_in, set_shared_state, shared_state
from lightning_turbo.data import PrefetchLoader, seed_samples
from tests.data.samples import holds_in_a_fork

traced = pytest.mark.skipif(sys.gettrace() is not None, reason="another trace function is set")


def watched(function, **settings):
    with GeneratorWatch(**settings) as watch:
        function()
    assert sys.gettrace() is None
    return watch


def module_of(source):
    """Return a module of the user, other than that of the dataset."""
    module = types.ModuleType("users_helpers")
    exec(source, vars(module))
    return module


HELPERS = """
import contextlib, random, numpy, torch

def numpy_inside(index):
    state = numpy.random.get_state()
    numpy.random.seed(index)
    number = numpy.random.rand()
    numpy.random.set_state(state)
    return number

@contextlib.contextmanager
def python_seed(index):
    state = random.getstate()
    random.seed(index)
    try:
        yield
    finally:
        random.setstate(state)

class Forked:
    def __call__(self, index):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return torch.rand(()).item()
"""
HELPER = module_of(HELPERS)


def by_context(index):
    with HELPER.python_seed(index):
        return random.random()


def only_some(index):
    """Only one sample sets a seed in the same lines."""
    with HELPER.python_seed(index) if index == 30 else contextlib.nullcontext():
        return abs(index)


KINDS = {"module": HELPER.numpy_inside, "context": by_context, "object": HELPER.Forked(), "some": only_some}


@traced
@pytest.mark.parametrize("load", KINDS.values(), ids=KINDS)
def test_a_seed_that_is_restored_is_detected_wherever_it_is_set(load):
    assert watched(lambda: list(map(load, range(32)))).found.startswith("draws from the global RNG of ")
    assert watched(lambda: list(map(load, range(32))), lines=0).found == ""  # the final states are equal


@traced
def test_seeds_of_samples_are_detected_without_python_code_of_the_user():
    loader = seed_samples(DataLoader([torch.zeros(2)] * 4, 2), 1)
    assert "torch and random and numpy.random" in watched(lambda: list(loader)).found


def test_the_second_normal_number_of_numpy_is_a_draw():
    """It is cached with the first one, and nothing else in the state changes."""
    np.random.normal()
    assert watched(np.random.normal).found.startswith("draws from the global RNG of numpy.random")


@traced
def test_a_line_is_compared_twice_and_the_lines_are_counted(monkeypatch):
    compared, holds = [], _random._Snapshot.holds
    monkeypatch.setattr(_random._Snapshot, "holds", lambda self: compared.append(1) or holds(self))

    def work():
        total = 0
        for number in range(1000):
            total += number
        return total

    assert watched(work).found == ""
    assert len(compared) <= 2 * 7
    assert watched(work, lines=500).found.startswith("runs more than 500 lines of Python")
    assert watched(lambda: None, lines=500).found == ""


@traced
def test_another_trace_function_is_restored():
    sys.settrace(mine := lambda *event: None)
    try:
        with GeneratorWatch() as watch:
            random.random()
        assert sys.gettrace() is mine
    finally:
        sys.settrace(None)
    assert watch.found.startswith("draws from the global RNG of random")


# ---- Where generators are searched.


class Model: ...


class Lazy:
    """Acts as a proxy that is created on its first use."""

    opened = 0

    @property
    def __class__(self):
        Lazy.opened += 1
        return Lazy


class Unbound:
    @property
    def __dict__(self):
        raise RuntimeError("working outside of the application's context")

    def __getattr__(self, name):
        raise RuntimeError(f"{name}: working outside of the application's context")


class Unread(list):
    def __len__(self):
        raise OSError("the file is not there yet")


class Mapping(dict):
    def __len__(self):
        raise OSError("the file is not there yet")

    def values(self):
        raise OSError("the file is not there yet")


def gone():
    model = Model()
    return weakref.proxy(model)


class Data(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(index)


class Order(Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        return iter(range(12))

    def __len__(self):
        return 12


LAZY = {"proxy": gone, "unbound": Unbound, "list": Unread, "dict": Mapping, "lazy": Lazy}


@pytest.mark.parametrize("settings", [{}, {"sample_seeds": 1}, {"threads": 2}], ids=str)
@pytest.mark.parametrize("where", ["dataset", "sampler"])
@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
def test_searching_generators_does_not_use_attributes_of_a_dataset_or_sampler(make, where, settings):
    data, order = Data(), Order()
    (data if where == "dataset" else order).part = [make()]
    (data if where == "dataset" else order).other = make()
    opened = Lazy.opened
    loader = PrefetchLoader(data, 4, sampler=order, **settings)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    loader.state_dict()
    assert Lazy.opened == opened


class Slotted:
    __slots__ = ("__dict__", "slot")

    def __init__(self):
        self.slot = random.Random(1)
        self.first, self.second = random.Random(2), {"deep": random.Random(3)}


def test_the_order_of_generators_does_not_depend_on_how_attributes_are_stored():
    """Checkpoints identify states by this order."""
    plain, asked = Slotted(), Slotted()
    asked.__dict__["first"]  # creates the dict of attributes that the object stored inline
    for holder in (plain, asked):
        assert generators_in(holder) == [holder.first, holder.slot, holder.second["deep"]]


def test_long_containers_are_left_out():
    class Long(list):
        pass

    assert generators_in([random.Random()] * 300) == generators_in(Long([random.Random()] * 300)) == []
    assert len(parts_in([random.Random() for _ in range(3)])) == 3


# ---- States are read without garbage collection.


def test_a_disabled_garbage_collector_stays_disabled():
    gc.disable()
    try:
        list(PrefetchLoader(range(8), 2))
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_process_forked_while_a_thread_reads_states_has_garbage_collection_and_a_free_lock():
    inside, release = threading.Event(), threading.Event()

    def read():
        with _random.uncollected():
            inside.set()
            release.wait(0.2)

    def is_free():
        free = gc.isenabled() and _random._reading.acquire(timeout=1.0)
        if free:
            _random._reading.release()
        return free

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait()
    assert holds_in_a_fork(is_free)
    release.set()
    thread.join()
    assert is_free()


def test_another_bit_generator_of_numpys_global_functions_is_left_alone():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        state = shared_state()
        number = np.random.random()
        set_shared_state(state)
        assert "numpy" not in state
        assert np.random.random() != number  # its state is neither saved nor set
    finally:
        np.random.set_bit_generator(before)
    state = shared_state()
    number = np.random.normal()
    set_shared_state(state)
    assert np.random.normal() == number
