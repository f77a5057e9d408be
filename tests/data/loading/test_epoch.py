"""Stop, save, load, go on: every sample once, in order, whatever was prefetched."""

import itertools
import random

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo._random import changed_generators, shared_state
from lightning_turbo.data import DeviceTransfer, PrefetchLoader
from lightning_turbo.errors import TurboWarning
from tests.data.samples import Rows, Stream, saved, seeded, take, values

# torchdata calls a function of torch that is on its way out.
pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class Both(PrefetchLoader, StatefulDataLoader):
    pass


def plain(**settings):
    return PrefetchLoader(range(20), **settings)


def by_threads(**settings):
    return plain(threads=1 if settings.get("num_workers") else 3, **settings)


def stateful(**settings):
    return PrefetchLoader.of(StatefulDataLoader(range(20), **settings))


def inherited(**settings):
    return Both(range(20), **settings)


def on_device(make=plain, **settings):
    loader = make(**settings)
    loader.transfer = DeviceTransfer("cpu", transform=lambda batch: batch + 0)
    return loader


def on_device_stateful(**settings):
    return on_device(stateful, **settings)


def going_on(make, state):
    """A loader like the one that ``state`` is of, which goes on from there."""
    other = make()
    other.load_state_dict(state)
    return other


MAKERS = [plain, by_threads, stateful, inherited, on_device, on_device_stateful]
CASES = [(make, used, 0) for make in MAKERS for used in (0, 2, 6)] + [(make, 3, 2) for make in MAKERS]


@pytest.mark.parametrize(("make", "used", "workers"), CASES)
def test_the_rest_of_the_epoch_is_what_was_not_used(make, used, workers):
    """A for loop drops its iterator at a break; what it had prefetched does not count as used."""

    def build():
        return make(batch_size=3, shuffle=True, num_workers=workers)

    torch.manual_seed(1)
    loader = build()
    first = take(loader, used)
    state = saved(loader.state_dict())
    torch.manual_seed(2)
    other = going_on(build, state)
    rest = values(other)
    assert len(first) + len(rest) == 7
    if used:  # without a first batch the order is not drawn yet, and comes from the seed of the new process
        assert sorted(itertools.chain(*first, *rest)) == list(range(20))
    assert sorted(itertools.chain(*values(other))) == list(range(20))  # the epoch after it is whole


def test_a_state_survives_a_second_stop():
    def make():
        return plain(batch_size=3, shuffle=True)

    torch.manual_seed(1)
    loader = make()
    iterator = iter(loader)
    whole = take(iterator, 2)
    state = loader.state_dict()
    reference = whole + values(iterator)
    for _ in range(2):
        loader = going_on(make, state)
        assert loader.state_dict() == state  # not begun yet
        whole += take(loader, 2)
        state = loader.state_dict()
    assert whole == reference[:6]
    assert state["consumed"] == 6


def test_resuming_leaves_the_process_wide_generators_alone():
    loader = plain(batch_size=3, shuffle=True)
    take(loader, 1)
    state = loader.state_dict()
    torch.empty((), dtype=torch.int64).random_()
    fresh = plain(batch_size=3, shuffle=True)
    for warm_up in (True, False):
        torch.manual_seed(3)
        fresh.load_state_dict(state)
        list(fresh)
        if not warm_up:
            drawn = torch.rand(3)
    torch.manual_seed(3)  # a plain loop has put the generators back already, and no seed for workers is drawn again
    assert torch.equal(drawn, torch.rand(3))


class Counts(DataLoader):
    """A loader class that keeps its state itself, not in its iterator."""

    given = start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        self.given = start
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.given = number + 1
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.start = state["given"]


class Repeats(DataLoader):
    """A loader class that hands out each batch twice, as MONAI's ThreadDataLoader does."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch


@pytest.mark.parametrize(
    ("cls", "used", "settings"),
    [
        (Counts, 2, {}),
        *((Repeats, used, {"shuffle": True, "num_workers": workers}) for used in (3, 9) for workers in (0, 1)),
    ],
)
def test_classes_that_iterate_in_their_own_way(cls, used, settings):
    def make():
        return PrefetchLoader.of(cls(range(20), batch_size=3, **settings))

    loader = make()
    iterator = iter(loader)
    take(iterator, used)
    state = saved(loader.state_dict())
    assert state == {"given": 2} if cls is Counts else state["consumed"] == used
    rest = values(iterator)
    assert len(rest) == (14 if cls is Repeats else 7) - used
    assert values(going_on(make, state)) == rest


def noisy(index):
    return torch.tensor([float(index), torch.rand(()).item(), random.random(), float(np.random.rand())])


@pytest.mark.filterwarnings("ignore::lightning_turbo.errors.NoEffectWarning")
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_that_are_run_through_draw_nothing_from_the_process_wide_generators(shuffle):
    """A loop has put these back already when it calls iter()."""

    def make():
        return PrefetchLoader.of(Repeats(Rows(12, noisy), 2, shuffle=shuffle))

    loader = make()
    take(loader, 4)
    other = going_on(make, saved(loader.state_dict()))
    generators = shared_state()
    iterator = iter(other)
    assert changed_generators(generators, shared_state()) == []
    assert len(values(iterator)) == 8


def test_states_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"A state with the keys \['x'\] does not belong to PrefetchLoader"):
        plain().load_state_dict({"x": 1})
    own = PrefetchLoader.of(StatefulDataLoader(Stream()))  # whose state is torchdata's own
    with pytest.raises(ValueError, match="does not belong to PrefetchStatefulDataLoader"):
        own.load_state_dict({"version": 5, "consumed": 1})
    loader = PrefetchLoader(range(20), **OWN["torch"]())
    take(loader, 1)
    other = going_on(lambda: plain(batch_size=3, shuffle=True), loader.state_dict())
    with pytest.raises(ValueError, match=r"a loader with 1 random generators, and this one has 0"):
        next(iter(other))


class Drawn(Sampler):
    """Draws its order from a generator that it holds."""

    def __init__(self, rng):
        self.rng = rng

    def __iter__(self):
        return iter(torch.randperm(20, generator=self.rng).tolist())

    def __len__(self):
        return 20


class Batches(Sampler):
    """A batch sampler with a sampler under a name of its own."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        order = list(self.inner)
        yield from (order[n : n + 3] for n in range(0, 20, 3))

    def __len__(self):
        return 7


def weighted():
    return WeightedRandomSampler([1.0] * 20, 20, replacement=False, generator=seeded())


OWN = {
    "torch": lambda: {"batch_size": 3, "shuffle": True, "generator": seeded()},
    "own sampler": lambda: {"batch_size": 3, "sampler": Drawn(seeded())},
    "own batch sampler": lambda: {"batch_sampler": Batches(RandomSampler(range(20), generator=seeded()))},
    "wrapped by Lightning": lambda: {
        "batch_size": 3, "sampler": DistributedSamplerWrapper(weighted(), num_replicas=1, rank=0),
    },
}  # fmt: skip


@pytest.mark.parametrize("used", [2, 7, "all"])
@pytest.mark.parametrize("settings", OWN.values(), ids=OWN)
def test_a_later_epoch_goes_on_whatever_its_order_comes_from(settings, used):
    """From its middle, after its last batch, after its end, and before its first batch."""

    def make():
        return PrefetchLoader(range(20), **settings())

    loader = make()
    list(loader)
    iterator = iter(loader)
    take(iterator, 7 if used == "all" else used)
    assert used != "all" or next(iterator, None) is None
    state = saved(loader.state_dict())
    expected = [] if used in (7, "all") else values(iterator)
    expected += values(loader)
    other = going_on(make, state)
    got = values(other)
    if len(got) < 7:
        got += values(other)
    assert got == expected


class EntryByEntry(Sampler):
    """Draws each entry from torch's global generator when it is asked for it."""

    def __iter__(self):
        for _ in range(20):
            yield int(torch.randint(20, ()))

    def __len__(self):
        return 20


GLOBAL = {
    "entry by entry": {"sampler": EntryByEntry()},
    "entry by entry, for worker processes": {"sampler": EntryByEntry(), "num_workers": 2},
    "for worker processes that stay": {"shuffle": True, "num_workers": 2, "persistent_workers": True},
    "entry by entry, for those that stay": {"sampler": EntryByEntry(), "num_workers": 1, "persistent_workers": True},
}


@pytest.mark.filterwarnings("ignore::lightning_turbo.errors.NoEffectWarning")
@pytest.mark.parametrize("used", [1, 4, 7])
@pytest.mark.parametrize("settings", GLOBAL.values(), ids=GLOBAL)
def test_an_order_of_the_global_generator_goes_on_where_a_plain_loop_puts_it_back(settings, used):
    def make():
        return PrefetchLoader(range(20), batch_size=3, **settings)

    loader = make()
    list(loader)
    iterator = iter(loader)
    take(iterator, used)
    state, generator = saved(loader.state_dict()), torch.get_rng_state()
    expected = values(iterator) + values(loader)
    torch.rand(99)
    other = going_on(make, state)
    torch.set_rng_state(generator)
    got = values(other)
    if used < 7:
        got += values(other)
    assert got == expected
    loader.close()
    other.close()


@pytest.mark.parametrize("error", [NotImplementedError, TypeError, ValueError])
def test_a_length_that_raises(error):
    class Sampling(Drawn):
        def __iter__(self):
            return iter(range(20))

        def __len__(self):
            raise error

    class Streaming(Stream):
        def __len__(self):
            raise error

    for make in (lambda: plain(batch_size=3, sampler=Sampling(None)), lambda: PrefetchLoader(Streaming(), 3)):
        loader = make()
        iterator = iter(loader)
        next(iterator)
        assert values(going_on(make, saved(loader.state_dict()))) == values(iterator)


def test_a_loader_of_another_length_without_a_known_order_cannot_go_on_exactly_which_is_said():
    def build(batch_size):
        return plain(batch_size=batch_size, sampler=WeightedRandomSampler([1.0] * 20, 20))

    loader = build(3)
    iterator = iter(loader)
    take(iterator, 2)
    with pytest.warns(TurboWarning, match="The loader had 7 batches of 3 then .* 4 of 5 now"):
        build(5).load_state_dict(loader.state_dict())
    list(iterator)
    build(5).load_state_dict(loader.state_dict())  # a whole epoch; a warning would be an error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.parametrize("make", [plain, by_threads])
def test_who_is_interrupted_while_a_batch_is_loaded_goes_on_with_that_batch(make, at, error):
    loads = []

    def build():
        return make(batch_size=3, shuffle=True, generator=seeded(), collate_fn=collate)

    def collate(samples):
        loads.append(samples)
        if len(loads) == at + 1:
            raise error
        return torch.tensor(samples)

    loader = build()
    iterator = iter(loader)
    take(iterator, at)
    with pytest.raises(error):
        next(iterator)
    state = saved(loader.state_dict())
    assert state["consumed"] == at
    with pytest.raises(RuntimeError, match=f"a {error.__name__} stopped it while a batch was loaded"):
        next(iterator)
    again = going_on(build, state)
    expected = plain(batch_size=3, shuffle=True, generator=seeded())
    assert values(again) == values(expected)[at:]
    assert values(again) == values(expected)


class Drawing(IterableDataset):
    """A stream whose order comes from the seed of the process."""

    def __iter__(self):
        return iter(torch.randperm(20).tolist())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("restored", ["before iter", "after iter"])
@pytest.mark.parametrize("dataset", [range(20), Drawing()], ids=["samples", "stream"])
def test_a_stop_between_iter_and_the_first_batch(dataset, restored, workers):
    """What iter() draws from the global generators, as the seed of worker processes, is drawn once."""

    def make():
        settings = {} if isinstance(dataset, IterableDataset) else {"shuffle": True}
        return PrefetchLoader(dataset, 3, num_workers=workers, **settings)

    torch.manual_seed(0)
    loader = make()
    iterator = iter(loader)
    state, rng = saved(loader.state_dict()), torch.get_rng_state()
    expected = values(iterator), values(loader), torch.rand(1)
    torch.manual_seed(1)
    other = going_on(make, state)
    if restored == "before iter":
        torch.set_rng_state(rng)
    again = iter(other)
    if restored == "after iter":
        torch.set_rng_state(rng)
    got = values(again), values(other), torch.rand(1)
    # A stream that is opened again draws for itself alone.
    assert got[:1] == expected[:1] if isinstance(dataset, IterableDataset) else got == expected


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_that_draws_its_order_is_run_through_in_that_order(workers):
    def make():
        return PrefetchLoader(Drawing(), 3, num_workers=workers)

    loader = make()
    iterator = iter(loader)
    take(iterator, 2)
    state = saved(loader.state_dict())
    torch.rand(1)
    assert values(going_on(make, state)) == values(iterator)


STATES_BEFORE = [
    # With a worker process each value meets each sampler; the rest is for the slow form.
    pytest.param(workers, begun, own, sampler, drawn, marks=[pytest.mark.slow] * (workers and (n + place) % 3 != 0))
    for workers in (0, 1)
    for place, sampler in enumerate((None, "replacement", "own"))
    for n, (begun, own, drawn) in enumerate(itertools.product((False, True), repeat=3))
]


@pytest.mark.parametrize(("workers", "begun", "own", "sampler", "drawn_meanwhile"), STATES_BEFORE)
def test_a_state_before_the_first_batch_fixes_the_order(workers, begun, own, sampler, drawn_meanwhile):
    """In the same loader, and in one of another process, which has drawn other numbers."""

    def make():
        generator = seeded(5) if own else None
        order = {"shuffle": True, "generator": generator}
        if sampler == "replacement":
            order = {"sampler": RandomSampler(range(20), replacement=True, generator=generator), "generator": generator}
        if sampler == "own":
            order = {"sampler": Drawn(generator), "generator": generator}
        return PrefetchLoader(range(20), 3, num_workers=workers, **order)

    torch.manual_seed(0)
    loader = make()
    if begun:
        list(loader)
    rest = iter(loader) if begun else loader
    state = saved(loader.state_dict())
    expected = values(rest)
    for again in (loader, make()):
        if drawn_meanwhile:
            torch.manual_seed(7)
        again.load_state_dict(state)
        assert values(again) == expected
        assert len(values(again)) == 7


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_loader_of_torchdata_that_was_asked_for_its_state_is_copied(num_workers, is_resumed):
    settings = {"batch_size": 2, "num_workers": num_workers}
    loader = StatefulDataLoader(Rows(8), **settings)
    if is_resumed:
        saved = StatefulDataLoader(Rows(8), **settings)
        take(iter(saved), 1)
        loader.load_state_dict(saved.state_dict())
    loader.state_dict()
    expected = [[0, 1], [2, 3], [4, 5], [6, 7]][int(is_resumed) :]
    assert values(PrefetchLoader.of(loader)) == expected
    assert values(loader) == expected, "the loader itself is not changed"
