"""Samplers and datasets that draw from generators of their own: a run that was stopped equals one that was not."""

import collections
import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading.order import generators_of
from lightning_turbo.errors import NoEffectWarning, TurboWarning
from tests.data.samples import Rows, saved, seeded, take, values

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")

MAKE = {
    "PCG64": lambda: np.random.default_rng(1), "Philox": lambda: np.random.Generator(np.random.Philox(1)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(1)), "MT19937": lambda: np.random.RandomState(1),
    "random": lambda: random.Random(1), "torch": lambda: seeded(1),
}  # fmt: skip
LENGTH = 6  # batches


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    # A normal number leaves a second one behind in some kinds.
    return generator.normalvariate(0, 1) if isinstance(generator, random.Random) else float(generator.normal())


class Shuffled(Sampler):
    """Draws its order from a generator, at once or as it goes, that it holds in an attribute or in a dict."""

    def __init__(self, generator, at_once, deep):
        self.at_once, self.held = at_once, {"rng": generator} if deep else generator

    def __len__(self):
        return 2 * LENGTH

    def __iter__(self):
        generator = self.held["rng"] if isinstance(self.held, dict) else self.held
        order = (int(abs(1000 * draw(generator))) % 100 for _ in range(len(self)))
        yield from list(order) if self.at_once else order


class Noisy(Rows):
    def __init__(self, generator):
        super().__init__(2 * LENGTH)
        self.transforms = [{"noise": generator}]

    def __getitem__(self, index):
        return index + draw(self.transforms[0]["noise"])


class NoisyStream(IterableDataset):
    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        first = draw(self.generator)
        for index in range(2 * LENGTH):
            yield index + first + draw(self.generator)


class Itself(DataLoader):
    """A class with an ``__iter__`` of its own, whose batches are run through."""

    def __iter__(self):
        yield from super().__iter__()


KINDS = {
    "order": lambda make: PrefetchLoader(range(100), 2, sampler=Shuffled(make(), True, False)),
    "order drawn lazily": lambda make: PrefetchLoader(range(100), 2, sampler=Shuffled(make(), False, True)),
    "samples": lambda make: PrefetchLoader(Noisy(make()), 2, shuffle=True, generator=seeded(5)),
    "stream": lambda make: PrefetchLoader(NoisyStream(make()), 2),
    "run through": lambda make: PrefetchLoader.of(Itself(Noisy(make()), 2, shuffle=True, generator=seeded(5))),
}


@pytest.mark.filterwarnings("ignore::lightning_turbo.errors.NoEffectWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_resumed_run_draws_the_same(make, kind):
    straight = KINDS[kind](make)
    whole = [batch for _ in range(3) for batch in values(straight)]
    for stop in random.Random(0).sample(range(1, 3 * LENGTH), 6):
        first, epoch = KINDS[kind](make), (stop - 1) // LENGTH
        seen = [batch for _ in range(epoch) for batch in values(first)]
        iterator = iter(first)
        seen += take(iterator, stop - epoch * LENGTH)
        again = KINDS[kind](make)
        again.load_state_dict(saved(first.state_dict()))
        if kind == "stream" and stop % LENGTH == 0:
            assert values(again) == []  # its length is not known: its end is still to come
        while len(seen) < len(whole):
            seen += values(again)
        assert seen == whole, stop
        iterator.close()


@pytest.mark.parametrize("kind", ["samples", "run through"])
def test_a_batch_that_a_trainer_had_fetched_and_not_used_is_loaded_as_it_was(kind):
    """And draws between that batch and the state, as of a validation, are not undone."""

    def run(resume):
        first = KINDS[kind](MAKE["PCG64"])
        with pytest.warns(NoEffectWarning, match="loading draws random numbers"):
            seen = take(iterated := iter(first), 4)
        first.dataset.transforms[0]["noise"].normal()
        if not resume:
            return seen + values(iterated) + values(first)
        state = iterated.state_dict(unused=1)
        again = KINDS[kind](MAKE["PCG64"])
        again.load_state_dict(saved(state))
        with pytest.warns(NoEffectWarning, match="loading draws random numbers"):
            return seen[:3] + values(again) + values(again)

    assert run(resume=True) == run(resume=False)


class Slotted:
    __slots__ = ("generator",)

    def __init__(self, generator):
        self.generator = generator

    def add(self, index):
        return index + draw(self.generator)


def numbers(generator):
    while True:
        yield draw(generator)


def started(generator):
    drawn = numbers(generator)
    next(drawn)
    return lambda index: index + next(drawn)


@pytest.mark.parametrize(
    "load",
    [
        lambda generator: lambda index: index + draw(generator),
        lambda generator: lambda index, own=generator: index + draw(own),
        lambda generator: lambda index, *, own=generator: index + draw(own),
        lambda generator: functools.partial(lambda own, index: index + draw(own), generator),
        lambda generator: Slotted(generator).add,
        lambda generator: (lambda held: lambda index: index + draw(held[0]))(collections.deque([generator])),
        started,
    ],
)
def test_a_generator_is_found_wherever_a_transform_keeps_it(load):
    plain = DataLoader(Rows(2 * LENGTH, load(MAKE["PCG64"]())), 2)
    ours = PrefetchLoader(Rows(2 * LENGTH, load(MAKE["PCG64"]())), 2)
    with pytest.warns(NoEffectWarning, match="loading draws random numbers"):
        assert take(iter(ours), 3) == take(iter(plain), 3)
    assert values(ours) == values(plain)


def test_generators_in_worker_processes_are_told_of():
    loader = PrefetchLoader(Noisy(np.random.default_rng(1)), 2, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.warns(TurboWarning, match="not part of the loader's state.*Pass sample_seeds=0"):
        loader.state_dict()
    list(iterator)
    loader.state_dict()  # new processes begin with the generator as it is here; a warning would be an error


def test_another_number_of_generators_warns():
    first = PrefetchLoader(Noisy(np.random.default_rng(1)), 2)
    take(first, 1)
    again = PrefetchLoader(range(2 * LENGTH), 2)
    again.load_state_dict(first.state_dict())
    with pytest.warns(TurboWarning, match="held 1 random generators, and this one holds 0"):
        take(again, 1)


class Odd(Rows):
    """Holds generators that have no state of their own."""

    def __init__(self):
        super().__init__(12)
        self.held = [random.SystemRandom(), np.random.mtrand._rand, random._inst, torch.default_generator]

    def __getitem__(self, index):
        return index + 0 * self.held[0].random()


def test_generators_of_the_system_and_of_the_process_are_not_the_datasets_own():
    loader = PrefetchLoader(Odd(), 2)
    iterator = iter(loader)
    take(iterator, 3)
    state = saved(loader.state_dict())
    assert state["held"] == []
    again = PrefetchLoader(Odd(), 2)
    again.load_state_dict(state)
    assert values(again) == values(iterator)


class Endless(Sampler):
    """Draws each entry from a generator of its own, for ever."""

    def __init__(self):
        self.generator = seeded(1)

    def __iter__(self):
        while True:
            yield int(torch.randint(1000, (), generator=self.generator))


LONG = {
    "sequential": dict,
    "with replacement": lambda: {
        "sampler": RandomSampler(range(1000), replacement=True, num_samples=10**10, generator=seeded(2)),
    },
    "with replacement, from a seed": lambda: {
        "sampler": RandomSampler(range(1000), replacement=True, num_samples=10**10),
    },
    "endless": lambda: {"sampler": Endless()},
}  # fmt: skip


@pytest.mark.parametrize("order", LONG.values(), ids=LONG)
@pytest.mark.parametrize("used", [1, 3, 40])
def test_an_order_of_ten_thousand_million_entries_is_drawn_as_it_is_needed(order, used):
    """Whole, it would not fit into memory."""

    def make(cls):
        torch.manual_seed(0)
        return cls(Rows(10**10), 4, **order())

    expected = take(make(DataLoader), used + 5)
    loader = make(PrefetchLoader)
    assert take(loader, used) == expected[:used]
    again = make(PrefetchLoader)
    again.load_state_dict(saved(loader.state_dict()))
    assert take(again, 5) == expected[used:]


def test_generators_of_a_dataset_that_lightning_keeps_with_a_samplers_arguments_are_not_the_samplers():
    class Noisy(torch.utils.data.Dataset):
        def __init__(self):
            self.generator = np.random.default_rng(0)

        def __len__(self):
            return 4

    sampler = RandomSampler(Noisy())
    batches = BatchSampler(sampler, 2, drop_last=False)
    setattr(batches, "__pl_saved_args", (sampler, 2, False))  # as Lightning does in its hooks
    assert generators_of(None, batches) == []
