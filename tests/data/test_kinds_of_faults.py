"""Kinds of datasets, samplers and generators that break a loader which works ahead, each beside a plain DataLoader."""

import contextlib
import gc
import random
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Sampler, Subset, TensorDataset

from lightning_turbo.data import PackedDataset, PrefetchIterator, PrefetchLoader, pack, seed_samples
from lightning_turbo.errors import NoEffectWarning
from tests.data.samples import Rows, seeded, take, values
from tests.leftovers import prefetch_threads

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")


@contextlib.contextmanager
def seeded_all():
    with torch.random.fork_rng(devices=[]), numpy_seed(0), python_seed(0):
        torch.manual_seed(0)
        yield


@contextlib.contextmanager
def numpy_seed(seed):
    state = np.random.get_state()
    np.random.seed(seed)
    yield
    np.random.set_state(state)


@contextlib.contextmanager
def python_seed(seed):
    state = random.getstate()
    random.seed(seed)
    yield
    random.setstate(state)


def inline(index):
    state = np.random.get_state()
    np.random.seed(index)
    number = np.random.rand()
    np.random.set_state(state)
    return number


def with_torch(index):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        return torch.rand(1).item()


def with_context(context, draw):
    def load(index):
        with context(index):
            return draw()

    return load


TEMPORARY = {
    "numpy": with_context(numpy_seed, np.random.rand), "random": with_context(python_seed, random.random),
    "torch": with_torch, "inline": inline,
}  # fmt: skip


def in_steps(loader, draw):
    """The batches of two epochs, each beside what a step draws from a generator and whether a thread loads."""
    return [(batch.tolist(), draw(), bool(prefetch_threads())) for _ in range(2) for batch in loader]


def torch_number():
    return torch.rand(1).item()


# What a step draws from the generator that is set for the sample, by the name of the sample's case.
OF_THE_STEP = {"numpy": np.random.rand, "random": random.random, "torch": torch_number, "inline": np.random.rand}


@pytest.mark.parametrize("kind", TEMPORARY)
def test_a_generator_that_is_set_for_a_sample_and_put_back_harms_no_step_that_draws_from_it(kind):
    data, draw = Rows(12, TEMPORARY[kind]), OF_THE_STEP[kind]
    with seeded_all():
        plain = in_steps(DataLoader(data, 2), draw)
    with seeded_all(), pytest.warns(NoEffectWarning, match="what is done with a batch draws random numbers"):
        assert in_steps(PrefetchLoader(data, 2), draw) == plain


@pytest.mark.parametrize("load", TEMPORARY.values(), ids=TEMPORARY)
def test_a_generator_that_is_set_for_a_sample_and_put_back_has_its_numbers_in_a_thread(load):
    loader = PrefetchLoader(Rows(12, load), 2, prefetch_batches=1)
    seen, threads = [], []
    for batch in loader:
        seen.append(batch.tolist())
        threads.append(bool(prefetch_threads()))
    assert seen == values(DataLoader(Rows(12, load), 2))
    assert threads[2]


class Noisy(Rows):
    def __init__(self, rng):
        super().__init__(24)
        self.transforms = [rng]

    def __getitem__(self, index):
        return index + self.transforms[0].random()


@pytest.mark.parametrize("make", [np.random.default_rng, random.Random])
def test_a_generator_of_the_dataset_in_epochs_that_are_broken_off(make):
    def run(cls):
        loader = cls(Noisy(make(0)), batch_size=2)
        return [take(loader, 3) for _ in range(3)]

    with pytest.warns(NoEffectWarning, match="loading draws random numbers"):
        ours = run(PrefetchLoader)
    assert ours == run(DataLoader)


class Flat(IterableDataset):
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            yield from batch.flatten()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_dataset_that_iterates_a_loader_of_ours(threads):
    def run(cls, **more):
        inner = cls(Rows(12, lambda n: torch.arange(4) + 4 * n), batch_size=2, **more)
        return values(cls(Flat(inner), batch_size=8))

    assert run(PrefetchLoader, threads=threads) == run(DataLoader)


def packed(folder):
    pack([{"image": np.full((2, 2), n, dtype=np.float32)} for n in range(12)], folder)
    return PackedDataset(folder)


# Datasets without a line of the user's.
WITHOUT_CODE = {
    "tensors": lambda: TensorDataset(torch.arange(12.0), torch.ones(12, 2)),
    "subset": lambda: Subset(TensorDataset(torch.arange(24.0)), range(6, 18)),
    "concatenated": lambda: ConcatDataset([TensorDataset(torch.arange(6.0)), TensorDataset(torch.ones(6))]),
    "list": lambda: [torch.full((2,), float(n)) for n in range(12)],
    "dicts": lambda: [{"image": np.full(3, n)} for n in range(12)],
    "packed": lambda: packed("packed"),
    "rows": lambda: Rows(12),
}


@pytest.mark.filterwarnings("ignore:threads=2 has no effect here")
@pytest.mark.parametrize("make", WITHOUT_CODE.values(), ids=WITHOUT_CODE)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_dataset_without_a_line_of_the_users_gives_a_plain_loaders_batches(make, threads):
    data = make()
    ours, seen = PrefetchLoader(data, 2, threads=threads, prefetch_batches=1), []
    plain = list(DataLoader(data, 2))
    for batch in ours:
        seen.append(batch)
        if len(seen) == 3:  # it has to wait for room
            assert prefetch_threads()
    assert len(seen) == len(plain) == 6
    for one, other in zip(seen, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def draw_for_sample(_):
    return torch.rand(2)


SEEDED = {**WITHOUT_CODE, "drawing": lambda: Rows(12, draw_for_sample)}


def seeded_batches(data, how, settings):
    """The ways in which a loader over a dataset gets sample seeds."""
    if how == "argument":
        return PrefetchLoader(data, 2, sample_seeds=1, **settings)
    return PrefetchLoader.of(seed_samples(DataLoader(data, 2, **settings), 1))


@pytest.mark.parametrize("make", SEEDED.values(), ids=SEEDED)
@pytest.mark.parametrize("how", ["argument", "function"])
def test_seeds_for_samples_are_set_in_no_thread_beside_the_step(make, how):
    """The step draws once a thread could have been started, and finds the generators as it left them."""
    data, plain, seen = make(), [], []
    with seeded_all():
        for batch in seed_samples(DataLoader(data, 2), 1):
            plain.append((batch, torch_number() if len(plain) > 2 else None))
    with seeded_all():
        for batch in seeded_batches(data, how, {}):
            assert not prefetch_threads()
            seen.append((batch, torch_number() if len(seen) > 2 else None))
    assert_same(seen, plain)


@pytest.mark.parametrize("wrap", [iter, lambda loader: (batch for batch in loader)], ids=["iterator", "generator"])
def test_seeds_for_samples_of_an_iterator_harm_no_step_that_draws(wrap):
    plain, ours = (seed_samples(DataLoader(SEEDED["drawing"](), 2), 1) for _ in range(2))
    with seeded_all():
        expected = [(batch, torch_number()) for batch in plain]
    with seeded_all(), pytest.warns(NoEffectWarning, match="what is done with a batch draws random numbers"):
        seen = [(batch, torch_number()) for batch in PrefetchIterator(wrap(ours))]
    assert_same(seen, expected)


def assert_same(seen, expected):
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["argument", "function"])
def test_worker_processes_load_seeded_samples_ahead_without_a_word(how):
    data = SEEDED["drawing"]()
    assert_same(list(seeded_batches(data, how, {"num_workers": 1})), list(seed_samples(DataLoader(data, 2), 1)))


class Buckets(Sampler):
    """Knows its length only while it is iterated."""

    def __init__(self):
        pass

    def __iter__(self):
        self.batches = [[0, 1], [2, 3], [4]]
        yield from self.batches

    def __len__(self):
        return len(self.batches)


def test_a_length_is_not_asked_for_before_the_order_begins():
    loader = PrefetchLoader(range(5), batch_sampler=Buckets())
    assert values(loader) == [[0, 1], [2, 3], [4]]
    assert loader.state_dict()["length"] == 3


@pytest.mark.parametrize("stop", [2, 5])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("own", [False, True])
def test_a_plain_loop_that_puts_the_generator_back_has_the_next_epochs_too(own, workers, stop):
    def make():
        generator = seeded(3) if own else None
        return PrefetchLoader(range(20), batch_size=4, shuffle=True, generator=generator, num_workers=workers)

    loader = make()
    iterator = iter(loader)
    take(iterator, stop)
    state, rng = loader.state_dict(), torch.get_rng_state()
    rest = values(iterator)
    straight = [*([rest] if rest else []), values(loader), values(loader)]
    again = make()
    again.load_state_dict(state)
    torch.set_rng_state(rng)
    assert [values(again) for _ in straight] == straight


def test_the_file_list_of_a_dataset_is_not_walked_for_threads():
    class Files(Rows):
        def __init__(self):
            super().__init__(8)
            self.files = [Unread() for _ in range(200)]

    class Unread:
        def __reduce__(self):
            raise AssertionError("the dataset was pickled")

    assert values(PrefetchLoader(Files(), 2, threads=2)) == [[n, n + 1] for n in range(0, 8, 2)]


@pytest.mark.parametrize(
    "settings", [{}, {"threads": 3}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]
)
def test_iterators_and_loaders_are_freed_without_the_collector(settings):
    """In a cycle of references, torch's iterator over workers that stay keeps whoever lets it go waiting for 5 s."""
    gc.collect()
    gc.disable()
    try:
        loader = PrefetchLoader(Rows(6), batch_size=2, shuffle=True, **settings)
        for _ in range(3):
            iterator = iter(loader)
            assert len(list(iterator)) == 3
        gone = weakref.ref(iterator), weakref.ref(loader)
        del iterator, loader
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_a_loader_in_a_thread_of_the_users_gives_the_same_batches_while_another_thread_draws():
    """The draws cannot be attributed to a loader, so batches are loaded in the calling thread, with a warning."""
    drawn = threading.Event()

    def load(index):
        drawn.clear()
        drawn.wait()
        return index

    loader = PrefetchLoader(Rows(12, load), 2)
    got = []

    def iterate():
        with pytest.warns(NoEffectWarning, match="draws random numbers"):
            got.append(values(loader))

    thread = threading.Thread(target=iterate)
    thread.start()
    while thread.is_alive():
        torch.rand(1)
        drawn.set()
        time.sleep(0.0005)
    assert got == [values(DataLoader(range(12), 2))]
