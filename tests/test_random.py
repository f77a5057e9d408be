"""Generators: which ones are used, and finding those that a dataset holds without side effects."""

import gc
import os
import random
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Sampler

from lightning_turbo import _random
from lightning_turbo._random import GeneratorWatch, generators_in, parts_in, set_shared_state, shared_state
from lightning_turbo.data import PrefetchLoader
from tests.data.samples import holds_in_a_fork


def watched(function, held=()):
    with GeneratorWatch(held) as watch:
        function()
    return watch.found


def put_back():
    """Draw from a seed, and put the generator back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.rand(())


OWN = [random.Random(1), np.random.RandomState(1), np.random.default_rng(1), torch.Generator()]
DRAWS = {
    "nothing": (int, ""),
    "torch": (lambda: torch.rand(()), "the global RNG of torch"),
    "the functions of random": (random.random, "the global RNG of random"),
    "NumPy's functions": (np.random.rand, "the global RNG of numpy.random"),
    "two of them": (lambda: (torch.rand(()), np.random.rand()), "the global RNG of torch and numpy.random"),
    "put back": (put_back, ""),
    "held, of Python": (OWN[0].random, "a random generator that the dataset holds"),
    "held, of NumPy before 1.17": (OWN[1].rand, "a random generator that the dataset holds"),
    "held, of NumPy": (OWN[2].random, "a random generator that the dataset holds"),
    "held, of torch": (lambda: torch.rand((), generator=OWN[3]), "a random generator that the dataset holds"),
}


@pytest.mark.parametrize(("function", "drawn"), DRAWS.values(), ids=DRAWS)
def test_what_is_drawn_from_is_found(function, drawn):
    found = watched(function, OWN)
    assert found.startswith(f"draws from {drawn}") if drawn else not found


def test_the_second_normal_number_of_numpy_is_a_draw():
    """It is cached with the first one, and nothing else in the state changes."""
    np.random.normal()
    assert watched(np.random.normal).startswith("draws from the global RNG of numpy.random")


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
        free = gc.isenabled() and _random.states_lock.acquire(timeout=1.0)
        if free:
            _random.states_lock.release()
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
