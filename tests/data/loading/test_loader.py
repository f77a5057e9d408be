"""PrefetchLoader: a DataLoader in every respect."""

import inspect
import itertools
import multiprocessing
import random
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.errors import NoEffectWarning
from tests.data.samples import Custom, Rows, Stream, seeded, take, values

pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


def several(n):
    return torch.tensor([n, n * n]), {"name": str(n), "half": n / 2}


def numbers():
    return Rows(23, several)


class RandomBatches:
    """A batch sampler that is no BatchSampler and knows its epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(20, generator=seeded(self.epoch)).tolist()
        yield from (order[n : n + 3] for n in range(0, 20, 3))

    def __len__(self):
        return 7


def flat(batch):
    return tree_map_only(torch.Tensor, torch.Tensor.tolist, batch)


def epochs(cls, dataset, settings, count=3):
    """The batches of some epochs, with draws of a pretended model in between."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    loader = cls(dataset, **settings)
    got = []
    for epoch in range(count):
        for owner in (loader.sampler, loader.batch_sampler):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        for batch in loader:
            got.append((flat(batch), torch.rand(1).item()))
        got.append(random.random())
    if loader.persistent_workers and cls is DataLoader:
        loader._iterator._shutdown_workers()  # left to the collector, torch may wait for seconds for one of them
    elif loader.persistent_workers:
        loader.close()
    return got, [*torch.rand(3).tolist(), random.random(), np.random.rand()]


SETTINGS = {
    "plain": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "single samples": lambda: {"batch_size": None, "shuffle": True},
    "own generator": lambda: {"batch_size": 4, "shuffle": True, "generator": seeded(3)},
    "with replacement": lambda: {"batch_size": 4, "sampler": RandomSampler(range(23), replacement=True)},
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler(list(range(1, 24)), 30)},
    "distributed": lambda: {"batch_size": 4, "sampler": DistributedSampler(range(23), 2, 1, shuffle=True)},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(SequentialSampler(range(23)), 5, False)},
    "own batch sampler": lambda: {"batch_sampler": RandomBatches()},
    "a list as sampler": lambda: {"batch_size": 2, "sampler": [3, 1, 2]},
    "own collate": lambda: {"batch_size": 3, "collate_fn": list},
    "one more than nothing": lambda: {"batch_size": 100},
}
CASES = [
    (numbers, name, {}, threads) for name in SETTINGS for threads in (1, 3) if name != "single samples" or threads == 1
]
CASES += [
    (numbers, name, {"num_workers": 1, "persistent_workers": persistent}, threads)
    for name in ("shuffled", "single samples", "own batch sampler")
    for persistent, threads in ((False, 1), (True, 1), (False, 3))
    if name != "single samples" or threads == 1
]
CASES += [(Stream, "plain", {"num_workers": workers}, 1) for workers in (0, 2)]


@pytest.mark.parametrize(("dataset", "name", "workers", "threads"), CASES)
def test_batches_and_random_state_equal_the_plain_loaders(dataset, name, workers, threads):
    plain, ours = ({**SETTINGS[name](), **workers} for _ in range(2))
    assert epochs(PrefetchLoader, dataset(), {**ours, "threads": threads}) == epochs(DataLoader, dataset(), plain)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods(method):
    settings = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": method}
    for threads in (1, 2):
        assert values(PrefetchLoader(range(10), threads=threads, **settings)) == values(DataLoader(range(10), 4))


def augmented():
    """Draws from the generators of its process, as most augmentation does."""
    return Rows(12, lambda index: (torch.rand(2) + index, random.random(), np.random.rand()))


def test_random_augmentation_is_that_of_the_plain_loader():
    settings = {"batch_size": 3, "shuffle": True}
    with pytest.warns(NoEffectWarning, match="loading draws random numbers"):
        ours = epochs(PrefetchLoader, augmented(), settings)
    assert ours == epochs(DataLoader, augmented(), settings)
    settings.update(num_workers=1, multiprocessing_context="fork")
    assert epochs(PrefetchLoader, augmented(), settings) == epochs(DataLoader, augmented(), settings)


class Jittered(Rows):
    """Draws from a generator that lies in it."""

    def __init__(self, rng):
        super().__init__(23)
        self.parts = {"inner": [rng]}

    def __getitem__(self, index):
        time.sleep(0.001 * (index % 3))  # others would overtake it
        rng = self.parts["inner"][0]
        return index + (torch.rand(1, generator=rng).item() if isinstance(rng, torch.Generator) else rng.random())


@pytest.mark.parametrize(
    "make", [random.Random, np.random.default_rng, np.random.RandomState, seeded], ids=lambda m: m.__name__
)
def test_a_dataset_with_a_generator_of_its_own_is_loaded_by_one_thread(make):
    settings = {"batch_size": 2, "shuffle": True}
    with pytest.warns(NoEffectWarning, match="loading draws random numbers"):
        ours = epochs(PrefetchLoader, Jittered(make(0)), settings)
    assert ours == epochs(DataLoader, Jittered(make(0)), settings)


def test_a_dataset_that_draws_from_its_second_batch_on_is_loaded_by_one_thread():
    loaders = set()

    def load(index):
        loaders.add(threading.current_thread())
        return index if index < 4 else index + torch.rand(()).item()

    with pytest.warns(NoEffectWarning, match="loading draws random numbers"):
        ours = epochs(PrefetchLoader, Rows(24, load), {"batch_size": 4})
    assert loaders == {threading.main_thread()}
    assert ours == epochs(DataLoader, Rows(24, load), {"batch_size": 4})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("used", [0, 1])
def test_an_iterator_that_is_left_draws_from_a_generator_as_the_plain_one_does(workers, used):
    """Before its first batch too, as Lightning leaves one where it loads several loaders again."""
    orders = []
    for cls in (DataLoader, PrefetchLoader):
        loader = cls(range(15), 2, shuffle=True, generator=seeded(), num_workers=workers)
        take(iter(loader), used)
        orders.append([values(loader), values(loader)])
    assert orders[0] == orders[1]


def noise(index):
    return torch.rand(())


def test_what_draws_is_found_out_for_worker_processes_and_for_this_one():
    assert len(list(PrefetchLoader(Rows(24, noise), 4, num_workers=1))) == 6
    loader = PrefetchLoader(Rows(24, noise), 4)
    with pytest.warns(NoEffectWarning, match="loading draws random numbers"):
        list(loader)


def set_attribute(worker_id):
    dataset = torch.utils.data.get_worker_info().dataset
    dataset.more = 1
    dataset.load = lambda index: 4 + dataset.more


class InOneCall(Rows):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_a_worker_init_fn_finds_the_dataset_itself():
    assert values(PrefetchLoader(Rows(4), 2, threads=2, num_workers=1, worker_init_fn=set_attribute)) == [[5, 5]] * 2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda **more: PrefetchLoader(Stream(), 4, **more), r"an IterableDataset \(Stream\)"),
        (lambda **more: PrefetchLoader.of(Custom("x", batch_size=2), **more), "PrefetchCustom does not load by torch"),
        (
            lambda **more: PrefetchLoader.of(
                StatefulDataLoader(numbers(), 4, sampler=StatefulDistributedSampler(numbers(), 1, 0)), **more
            ),
            "PrefetchStatefulDataLoader does not load by torch",
        ),
        (lambda **more: PrefetchLoader(Rows(6), batch_size=None, **more), "batch_size=None makes no batches"),
        (lambda **more: PrefetchLoader(InOneCall(6), 4, **more), "InOneCall loads a batch in one call"),
    ],
)
def test_threads_that_cannot_be_used_are_told_of_once(make, why):
    loader = make(threads=2)
    with pytest.warns(NoEffectWarning, match=rf"threads=2 has no effect here: .*{why}"):
        first = [flat(batch) for batch in loader]
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        assert [flat(batch) for batch in loader] == first == [flat(batch) for batch in make()]


def test_numbers_of_numpy_are_numbers():
    loader = PrefetchLoader(Rows(6), 2, num_workers=np.int64(1), prefetch_factor=np.int64(2))
    assert values(loader) == values(DataLoader(Rows(6), 2))


def test_it_is_a_dataloader_with_its_constructor():
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (PrefetchLoader, DataLoader))
    added = {"prefetch_batches", "threads", "transfer", "sample_seeds"}
    assert [name for name in ours if name not in added] == list(theirs)
    assert all(ours[name] == theirs[name] for name in theirs)
    loader = PrefetchLoader(numbers(), 4, True, num_workers=0)
    assert isinstance(loader, DataLoader)
    assert (len(loader), loader.batch_size) == (6, 4)
    with pytest.raises(TypeError, match="has no len"):
        len(PrefetchLoader(Stream()))
    assert PrefetchLoader[torch.Tensor].__origin__ is PrefetchLoader  # generic, as DataLoader is


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("make", [
    lambda: PrefetchLoader(Stream(), 4), lambda: PrefetchLoader.of(StatefulDataLoader(Rows(12), 4)),
    lambda: PrefetchLoader(Rows(12), 4, sampler=RandomSampler(Rows(12), replacement=True, generator=seeded(1))),
    lambda: PrefetchLoader(Rows(12), 4, shuffle=True, generator=seeded(1)),
], ids=["stream", "own state", "with replacement", "shuffled"])  # fmt: skip
def test_who_looks_at_batches_in_the_middle_of_an_epoch_takes_none_of_it(make):
    whole, loader = [flat(batch) for batch in make()], make()
    iterator = iter(loader)
    first = flat(next(iterator))
    assert len([flat(batch) for batch in loader]) == len(whole)
    assert [first, *(flat(batch) for batch in iterator)] == whole


def test_persistent_workers_survive_a_break_and_serve_one_pass_at_a_time():
    """A pass beside another has processes of its own, which end with it."""
    loader = PrefetchLoader(range(40), 2, num_workers=1, persistent_workers=True)
    expected = [[n, n + 1] for n in range(0, 40, 2)]
    take(iter(loader), 3)
    workers = set(multiprocessing.active_children())
    first = iter(loader)
    seen = take(first, 3)
    assert set(multiprocessing.active_children()) == workers
    second = iter(loader)
    assert take(second, 3) == expected[:3]
    others = set(multiprocessing.active_children()) - workers
    assert len(others) == 1
    assert seen + values(first) == expected
    second.close()
    assert values(loader) == expected
    assert set(multiprocessing.active_children()) == workers
    loader.close()
    assert not multiprocessing.active_children()


def test_a_loader_in_use_may_be_asked_for_other_passes_and_each_keeps_its_place():
    loader = PrefetchLoader(range(20), 2, shuffle=True, generator=seeded(1))
    iterators = [iter(loader) for _ in range(3)]
    seen = [take(each, count) for each, count in zip(iterators, (4, 2, 3), strict=True)]
    states = [each.state_dict() for each in iterators]
    assert [state["consumed"] for state in states] == [4, 2, 3]
    assert loader.state_dict()["consumed"] == 3  # of the one that was asked last
    for batches, each, state in zip(seen, iterators, states, strict=True):
        rest = values(each)
        assert sorted(number for batch in batches + rest for number in batch) == list(range(20))
        again = PrefetchLoader(range(20), 2, shuffle=True, generator=seeded(9))
        again.load_state_dict(state)
        assert values(again) == rest


def test_passes_that_are_asked_in_turn_each_give_their_own_batches_and_the_state_is_the_last_ones():
    loader = PrefetchLoader(range(12), 2)
    first, second = iter(loader), iter(loader)
    for turn in range(6):
        for each in (first, second):
            assert next(each).tolist() == [2 * turn, 2 * turn + 1]
        assert loader.state_dict()["consumed"] == turn + 1
        if turn == 3:
            assert next(second).tolist() == [8, 9]
            assert loader.state_dict()["consumed"] == 5
            assert next(first).tolist() == [8, 9]
            assert next(first).tolist() == [10, 11]
            assert loader.state_dict()["consumed"] == 6
            iter(loader)  # and dropped
            assert loader.state_dict()["consumed"] == 6
            break


@pytest.mark.parametrize("persistent", [False, True])
def test_a_pass_that_is_in_use_when_a_state_is_loaded_goes_on_and_ends_with_the_loader(persistent):
    loader = PrefetchLoader(range(20), 2, num_workers=1, persistent_workers=persistent)
    expected = [[n, n + 1] for n in range(0, 20, 2)]
    before, other = iter(loader), PrefetchLoader(range(20), 2)
    seen = take(before, 3)
    take(iter(other), 6)
    loader.load_state_dict(other.state_dict())
    after = iter(loader)
    assert take(after, 2) == expected[6:8]
    assert seen + take(before, 4) == expected[:7]  # its processes are its own still
    assert values(after) == expected[8:]
    loader.close()
    assert not multiprocessing.active_children()
    with pytest.raises(RuntimeError, match="its loader was closed"):
        next(before)


def slow_at_first(index):
    time.sleep(3.0 * (index == 4))
    return index


def test_a_batch_that_does_not_come_in_time_is_not_lost():
    loader = PrefetchLoader(Rows(12, slow_at_first), 2, num_workers=1, timeout=1)
    iterator = iter(loader)
    seen, late = take(iterator, 2), 0
    while len(seen) < 6:
        try:
            seen += take(iterator, 1)
        except RuntimeError:
            late += 1
            assert loader.state_dict()["consumed"] == 2
    assert late
    assert seen == [[n, n + 1] for n in range(0, 12, 2)]
    assert list(iterator) == []


class ByPass(Rows):
    def __getitem__(self, index):
        return torch.rand(()).item()


@pytest.mark.parametrize("unused", [0, 1, 3])
def test_epochs_that_were_begun_and_not_used_have_no_number(unused):
    """Sample seeds follow from the number of an epoch, which a pass gets with its first batch."""
    expected = [values(each) for each in itertools.repeat(PrefetchLoader(ByPass(8), 2, sample_seeds=1), 3)]
    assert expected[0] != expected[1]
    loader = PrefetchLoader(ByPass(8), 2, sample_seeds=1)
    for each in expected:
        for _ in range(unused):
            iter(loader)
            assert loader.state_dict()["epoch"] == expected.index(each)
        assert values(loader) == each


def test_a_class_that_loads_at_iter_ends_its_processes_where_nothing_was_taken():
    loader = PrefetchLoader.of(OwnWay(range(8), 2, num_workers=1))
    begun = iter(loader)
    assert multiprocessing.active_children()
    begun.close()
    assert not multiprocessing.active_children()


class OwnWay(DataLoader):
    def __iter__(self):
        return super()._get_iterator()
