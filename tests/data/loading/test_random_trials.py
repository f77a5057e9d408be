"""Loaders of random settings beside a ``DataLoader``, stopped and resumed at random batches of an epoch."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_turbo.data import PrefetchLoader, SeededSampler
from tests.data.samples import Lazy, Rows, Stream, saved, seeded, take, values

pytestmark = pytest.mark.filterwarnings("ignore::lightning_turbo.errors.NoEffectWarning")
LENGTH = 23


def order_of(draw):
    """The arguments of a loader that say in which order its samples come, made again for each process."""
    generator = draw.choice([None, 3])

    def own():
        return None if generator is None else seeded(generator)

    kinds = {
        "sequential": dict,
        "shuffled": lambda: {"shuffle": True, "generator": own()},
        "replaced": lambda: {
            "sampler": RandomSampler(range(LENGTH), replacement=True, num_samples=17, generator=own())
        },
        "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * LENGTH, 19, generator=own())},
        "subset": lambda: {"sampler": SubsetRandomSampler(range(3, LENGTH), generator=own())},
        "seeded": lambda: {"sampler": SeededSampler(range(LENGTH), 5)},
        "lazy": lambda: {"sampler": Lazy(LENGTH)},
        "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(LENGTH), generator=own()), 3, False)},
        "stream": dict,
    }
    name = draw.choice(list(kinds))
    return name, kinds[name]


def augmented(index):
    """A sample with numbers of all three global RNGs."""
    return torch.tensor([float(index), torch.rand(()).item(), random.random(), float(np.random.rand())])


def trial(number):
    """Run one loader to the end of its second epoch with stops, and compare it with a ``DataLoader`` without any."""
    draw = random.Random(number)
    name, order = order_of(draw)
    workers = draw.choice([0, 0, 0, 0, 1, 2])
    settings = {"num_workers": workers, "persistent_workers": workers > 0 and draw.random() < 0.5}
    if name != "batches":
        settings |= {"batch_size": draw.randint(1, 6), "drop_last": draw.random() < 0.3}
    # Worker processes have their own generators, whose states are not saved.
    load = augmented if not workers and draw.random() < 0.4 else torch.tensor

    def make(cls):
        return cls(Stream(LENGTH) if name == "stream" else Rows(LENGTH, load), **settings, **order())

    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    plain = make(DataLoader)
    expected = [values(plain), values(plain)]
    del plain  # with its processes
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    loader = make(PrefetchLoader)
    for epoch in expected:
        seen, iterator = [], iter(loader)
        for _ in range(draw.randint(0, 3)):
            seen += take(iterator, draw.randint(0, 3))
            if not 0 < len(seen) < len(epoch):
                continue
            state, rng = saved(loader.state_dict()), (torch.get_rng_state(), random.getstate(), np.random.get_state())
            loader.close()
            torch.rand(draw.randint(1, 5))
            loader = make(PrefetchLoader)
            loader.load_state_dict(state)
            # A Trainer's ExactResume puts them back after iter().
            iterator = iter(loader)
            torch.set_rng_state(rng[0])
            random.setstate(rng[1])
            np.random.set_state(rng[2])
        seen += values(iterator)
        assert seen == epoch, (number, name, settings)
    loader.close()


@pytest.mark.parametrize("first", [0, pytest.param(12, marks=pytest.mark.slow)])
def test_loaders_of_random_settings_go_on_as_a_dataloader(first):
    for number in range(first, first + 12):
        trial(number)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(60, 660, 60))
def test_many_loaders_of_random_settings(first):
    for number in range(first, first + 60):
        trial(number)
