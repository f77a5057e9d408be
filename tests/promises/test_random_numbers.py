"""Random numbers of samples and steps: those of a DataLoader, and of a run that never stopped."""

import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_turbo import PrefetchLoader
from lightning_turbo.errors import TurboWarning
from tests.data.samples import seeded, take, values
from tests.promises.runs import (
    LENGTH,
    Slow,
    another_process,
    draws,
    generators,
    is_told,
    listed,
    put_back,
    seed,
    stock,
    stopped,
    turbo,
)

pytestmark = [
    pytest.mark.usefixtures("all_ends", "every_loader_has_a_thread"),
    pytest.mark.timeout(60),
    # A loader whose thread would change random numbers says that it has none.
    pytest.mark.filterwarnings("ignore::lightning_turbo.errors.NoEffectWarning"),
]


def of_torch(index):
    return index + torch.rand(()).item()


def of_python(index):
    return index + random.random()


def of_numpy(index):
    return index + np.random.rand()


def of_none(index):
    return float(index)


def put_back_by_torch(index):
    """Draw from a seed of the sample, and put torch's generator back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        time.sleep(0.001)
        return of_torch(index)


def put_back_by_hand(index):
    """Draw from a seed of the sample, and put the generators of Python and NumPy back."""
    states = generators()
    seed(index)
    time.sleep(0.001)
    sample = of_python(index) + of_numpy(index)
    put_back(states)
    return sample


def drawn(kind, change, step=0.0, **settings):
    """Return the batches of two epochs, the numbers that a step draws after each, and the generators at the end."""
    seed(0)
    loader = kind(Slow(change), batch_size=4, **settings)
    seen = []
    for _ in range(2):
        for batch in loader:
            time.sleep(step)
            seen.append((listed(batch), draws()))
    return seen, generators()


@pytest.mark.parametrize("change", [of_torch, of_python, of_numpy, of_none, put_back_by_torch, put_back_by_hand])
def test_samples_and_steps_draw_what_they_draw_with_a_plain_loader(change):
    settings = {"shuffle": True, "step": 0.005}
    assert drawn(PrefetchLoader, change, **settings) == drawn(DataLoader, change, **settings)


def all_three(index):
    return of_torch(index) + of_python(index) + of_numpy(index)


def test_samples_of_worker_processes_draw_what_they_draw_with_a_plain_loader():
    settings = {"shuffle": True, "num_workers": 2}
    assert drawn(PrefetchLoader, all_three, **settings) == drawn(DataLoader, all_three, **settings)


def late(index):
    return of_torch(index) if index >= 24 else of_none(index)


def rare(index):
    return of_torch(index) if index == 25 else of_none(index)


@pytest.mark.parametrize("change", [late, rare])
def test_draws_that_begin_late_are_a_plain_loaders_or_told(change):
    plain = drawn(DataLoader, change, step=0.005)
    seen, told = is_told(lambda: drawn(PrefetchLoader, change, step=0.005))
    assert seen == plain or told


# ---- Generators that the dataset holds.


class Holding(Slow):
    def __init__(self):
        super().__init__(self.draw)
        self.torch, self.python, self.numpy = seeded(1), random.Random(1), np.random.default_rng(1)

    def draw(self, index):
        return index + torch.rand((), generator=self.torch).item() + self.python.random() + self.numpy.random()


def holding(kind, workers=0):
    return kind(Holding(), batch_size=4, shuffle=True, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_generators_of_the_dataset_draw_what_they_draw_with_a_plain_loader(workers):
    epochs = []
    for kind in (DataLoader, PrefetchLoader):
        seed(0)
        loader = holding(kind, workers)
        epochs.append([values(loader) for _ in range(2)])
    assert epochs[0] == epochs[1]


@pytest.mark.parametrize(("whole", "batches"), [(0, 3), (1, 0), (1, 3)])
def test_generators_of_the_dataset_go_on_after_a_stop(whole, batches):
    """In the middle of an epoch, and at the end of a whole one."""
    seed(0)
    plain = holding(DataLoader)
    straight = [values(plain) for _ in range(3)]
    seed(0)
    loader = holding(PrefetchLoader)
    seen = [values(loader) for _ in range(whole)]
    begun = take(iter(loader), batches) if batches else []
    again = another_process(lambda: holding(PrefetchLoader), loader)
    seen.append(begun + values(again))
    assert [*seen, *(values(again) for _ in range(2 - whole))] == straight


def test_generators_of_the_dataset_in_a_worker_process_are_told_at_a_stop():
    loader = holding(PrefetchLoader, 1)
    take(iter(loader), 3)
    with pytest.warns(TurboWarning, match="Holding holds a random generator"):
        loader.state_dict()


@pytest.mark.parametrize("make", [lambda: Slow(of_torch), lambda: Slow(of_numpy), Holding])
def test_a_run_whose_samples_and_steps_draw_goes_on(make, tmp_path):
    def loader():
        return DataLoader(make(), batch_size=4, shuffle=True)

    assert stopped(turbo, loader, (2, 5, 8, 11), tmp_path) == stock(loader())


# ---- Sample seeds.


def numbered(index):
    return torch.tensor([index, *draws()], dtype=torch.float64)


def with_seeds(workers=0, **settings):
    return PrefetchLoader(Slow(numbered), batch_size=4, num_workers=workers, sample_seeds=3, **settings)


def by_sample(batches):
    """Return what was drawn for each sample."""
    return {int(index): numbers for batch in batches for index, *numbers in listed(batch)}


@pytest.fixture(scope="module")
def seeded_epochs():
    loader = with_seeds()
    first, second = by_sample(loader), by_sample(loader)
    assert len({tuple(numbers) for numbers in [*first.values(), *second.values()]}) == 2 * LENGTH
    return first, second


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_sample_seeds_are_the_same_with_any_workers_and_order(workers, seeded_epochs):
    seed(5)
    loader = with_seeds(workers, shuffle=True)
    assert (by_sample(loader), by_sample(loader)) == seeded_epochs


def test_sample_seeds_are_the_same_on_any_ranks(seeded_epochs):
    samplers = [DistributedSampler(range(LENGTH), 2, rank) for rank in range(2)]
    for epoch, expected in enumerate(seeded_epochs):
        found = {}
        for sampler in samplers:
            sampler.set_epoch(epoch)
            found |= by_sample(with_seeds(sampler=sampler))
        assert found == expected


@pytest.mark.parametrize("batches", [3, 8])
@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 0)])
def test_sample_seeds_are_the_same_after_a_stop(before, now, batches, seeded_epochs):
    loader = with_seeds(before, shuffle=True)
    found = by_sample(batch for _, batch in zip(range(batches), loader, strict=False))
    again = another_process(lambda: with_seeds(now, shuffle=True), loader)
    if batches < 8:
        found |= by_sample(again)
    assert (found, by_sample(again)) == seeded_epochs
