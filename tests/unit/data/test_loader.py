"""PrefetchLoader: a DataLoader in every respect."""

import copy
import inspect
import multiprocessing
import os
import pickle
import random
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    random_split,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.errors import NoEffectWarning
from tests.leftovers import prefetch_threads

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")]


class Numbers(Dataset):
    def __init__(self, length=23):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index, index * index]), {"name": str(index), "half": index / 2}


class Stream(IterableDataset):
    def __init__(self, length=23):
        self.length = length

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from (torch.tensor(n) for n in range(first, self.length, step))


class Augmented(Dataset):
    """Draws from the generators of its process, as most augmentation does."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(2) + index, random.random(), np.random.rand()


class RandomBatches:
    """A batch sampler that is no BatchSampler and knows its epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from (order[n : n + 3] for n in range(0, 20, 3))

    def __len__(self):
        return 7


def flat(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [flat(part) for part in value]
    return value


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
    end = [*torch.rand(3).tolist(), random.random(), np.random.rand()]
    del loader
    return got, end


SETTINGS = {
    "plain": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "single samples": lambda: {"batch_size": None, "shuffle": True},
    "own generator": lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "with replacement": lambda: {"batch_size": 4, "sampler": RandomSampler(Numbers(), replacement=True)},
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler(list(range(1, 24)), 30)},
    "distributed": lambda: {"batch_size": 4, "sampler": DistributedSampler(Numbers(), 2, 1, shuffle=True)},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(SequentialSampler(Numbers()), 5, False)},
    "own batch sampler": lambda: {"batch_sampler": RandomBatches()},
    "a list as sampler": lambda: {"batch_size": 2, "sampler": [3, 1, 2]},
    "own collate": lambda: {"batch_size": 3, "collate_fn": list},
    "one more than nothing": lambda: {"batch_size": 100},
}


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_batches_and_random_state_equal_the_plain_loaders(settings, several):
    ours = {**settings(), "threads": several}
    assert epochs(PrefetchLoader, Numbers(), ours) == epochs(DataLoader, Numbers(), settings())


@pytest.mark.parametrize("more", [{}, {"persistent_workers": True}, {"threads": 3}], ids=str)
@pytest.mark.parametrize("settings", ["shuffled", "single samples", "own batch sampler"])
def test_batches_equal_the_plain_loaders_with_workers(settings, more):
    persistent = more.get("persistent_workers", False)
    plain = {**SETTINGS[settings](), "num_workers": 1, "persistent_workers": persistent}
    ours = {**SETTINGS[settings](), "num_workers": 1, **more}
    assert epochs(PrefetchLoader, Numbers(), ours, 2) == epochs(DataLoader, Numbers(), plain, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets(workers):
    settings = {"batch_size": 4, "num_workers": workers}
    assert epochs(PrefetchLoader, Stream(), settings, 2) == epochs(DataLoader, Stream(), settings, 2)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods(method):
    settings = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": method}
    expected = [b.tolist() for b in DataLoader(range(10), **settings)]
    for threads in (1, 2):
        assert [b.tolist() for b in PrefetchLoader(range(10), threads=threads, **settings)] == expected


@pytest.mark.parametrize("several", [1, 3])
def test_random_augmentation_without_workers_is_that_of_the_plain_loader(several):
    settings = {"batch_size": 3, "shuffle": True}
    with pytest.warns(NoEffectWarning, match="torch and random and numpy"):
        prefetched = epochs(PrefetchLoader, Augmented(), {**settings, "threads": several})
    assert prefetched == epochs(DataLoader, Augmented(), settings)


@pytest.mark.parametrize("several", [1, 3])
def test_random_augmentation_in_a_worker_is_that_of_the_plain_loader(several, capfd):
    settings = {"batch_size": 3, "shuffle": True, "num_workers": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # the worker inherits it
        warnings.showwarning = lambda message, *_: os.write(2, str(message).encode())
        ours = epochs(PrefetchLoader, Augmented(), {**settings, "threads": several}, 2)
    assert ours == epochs(DataLoader, Augmented(), settings, 2)
    assert ("One thread loads instead of threads=3" in capfd.readouterr().err) == (several == 3)


class Noise:
    """A transform with a generator of its own."""

    def __init__(self, make):
        self.parts = {"inner": [make()]}

    def __call__(self):
        rng = self.parts["inner"][0]
        return torch.rand(1, generator=rng).item() if isinstance(rng, torch.Generator) else float(rng.random())


class Jittered(Numbers):
    def __init__(self, make):
        super().__init__(23)
        self.noise = Noise(make)

    def __getitem__(self, index):
        time.sleep(0.001 * (index % 3))  # others would overtake it
        return index + self.noise()


@pytest.mark.parametrize(
    "make", [random.Random, np.random.default_rng, np.random.RandomState, torch.Generator], ids=lambda m: m.__name__
)
def test_a_dataset_with_a_generator_of_its_own_is_loaded_by_one_thread(make):
    def seeded():
        return make().manual_seed(0) if make is torch.Generator else make(0)

    settings = {"batch_size": 2, "shuffle": True}
    with pytest.warns(NoEffectWarning, match="generator that the dataset holds.*One thread loads instead of threads=3"):
        ours = epochs(PrefetchLoader, Jittered(seeded), {**settings, "threads": 3})
    assert ours == epochs(DataLoader, Jittered(seeded), settings)


class Together(Numbers):
    """Samples of three batches are loaded at once, or the wait is in vain."""

    def __init__(self):
        super().__init__(24)
        self.together = threading.Barrier(3, timeout=20)

    def __getitem__(self, index):
        if index >= 6 and index % 2 == 0:
            self.together.wait()
        return index


def test_threads_load_samples_of_the_next_batches_too():
    loader = PrefetchLoader(Together(), 2, threads=3)  # one sample of each batch waits for two others
    assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 24, 2)]


class Rendezvous(Dataset):
    def __len__(self):
        return 18

    def __getitem__(self, index):
        barrier = vars(type(self)).get("barrier") or threading.Barrier(3, timeout=20)
        type(self).barrier = barrier
        if index >= 3:  # the first batch is loaded alone
            barrier.wait()
        return index


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_threads_load_in_a_worker_process():
    loader = PrefetchLoader(Rendezvous(), 3, threads=3, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[n, n + 1, n + 2] for n in range(0, 18, 3)]
    assert "barrier" not in vars(Rendezvous)  # it was in the worker


class Whole(Numbers):
    def __getitems__(self, indices):
        asked.append(threading.current_thread().name)
        return [torch.tensor(index) for index in indices]


asked = []


def test_threads_ask_a_dataset_for_whole_batches_if_it_loads_those():
    asked.clear()
    assert [batch.tolist() for batch in PrefetchLoader(Whole(12), 3, threads=2)] == [
        [n, n + 1, n + 2] for n in range(0, 12, 3)
    ]
    assert len(asked) == 4
    assert "lightning_turbo-prefetch" in asked[-1]


def set_attribute(worker_id):
    dataset = torch.utils.data.get_worker_info().dataset
    dataset._more = 1
    dataset.length = 4 + dataset._more


class Told(Numbers):
    def __getitem__(self, index):
        return self.length


def test_a_worker_init_fn_finds_the_dataset_itself():
    loader = PrefetchLoader(Told(4), 2, threads=2, num_workers=1, worker_init_fn=set_attribute)
    assert [batch.tolist() for batch in loader] == [[5, 5], [5, 5]]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda **more: PrefetchLoader(Stream(), 4, **more), r"an IterableDataset \(Stream\)"),
        (lambda **more: PrefetchLoader.of(Custom("x", batch_size=2), **more), "PrefetchCustom does not load by torch"),
        (
            lambda **more: PrefetchLoader.of(
                StatefulDataLoader(Numbers(), 4, sampler=StatefulDistributedSampler(Numbers(), 1, 0)), **more
            ),
            "PrefetchStatefulDataLoader does not load by torch",
        ),
    ],
)
def test_threads_that_cannot_be_used_are_told_of_once(make, why):
    loader = make(threads=2)
    with pytest.warns(NoEffectWarning, match=rf"threads=2 has no effect here: .*{why}"):
        first = [flat(batch) for batch in loader]
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        assert [flat(batch) for batch in loader] == first == [flat(batch) for batch in make()]
    loader.close()


def test_it_is_a_dataloader_with_its_constructor():
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (PrefetchLoader, DataLoader))
    added = {"prefetch_batches", "threads", "transfer", "sample_seeds"}
    assert [name for name in ours if name not in added] == list(theirs)
    assert all(ours[name] == theirs[name] for name in theirs)
    loader = PrefetchLoader(Numbers(), 4, True, num_workers=0)
    assert isinstance(loader, DataLoader)
    assert (len(loader), loader.batch_size) == (6, 4)
    with pytest.raises(TypeError, match="has no len"):
        len(PrefetchLoader(Stream()))
    assert PrefetchLoader[torch.Tensor].__origin__ is PrefetchLoader  # generic, as DataLoader is


REFUSED = [
    (
        lambda: PrefetchLoader(Numbers(), prefetch_batches=0),
        ValueError,
        "prefetch_batches: expected an integer",
    ),
    (lambda: PrefetchLoader(Numbers(), threads=-1), ValueError, "threads: expected an integer of 1 or more, got -1"),
    (
        lambda: PrefetchLoader.of(DataLoader(Numbers()), threads="2"),
        TypeError,
        "an integer of 1 or more, got '2'",
    ),
    (lambda: PrefetchLoader.of([1]), TypeError, r"PrefetchLoader.of expected a torch.utils.data.DataLoader, got \[1\]"),
    (lambda: PrefetchLoader(DataLoader(Numbers())), TypeError, r"got the loader .*PrefetchLoader.of\(loader\)"),
    (lambda: PrefetchLoader(PrefetchLoader(Stream())), TypeError, r"expected a dataset, got the loader"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_two_iterators_of_one_loader_both_see_everything():
    loader = PrefetchLoader(range(12), 2)
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [
        ([n, n + 1], [n, n + 1]) for n in range(0, 12, 2)
    ]
    first = iter(PrefetchLoader(range(1000), 2))
    got = [next(first).tolist() for _ in range(3)]
    assert len(prefetch_threads()) == 1
    del first
    loader = PrefetchLoader(range(1000), 2)
    first = iter(loader)
    [next(first) for _ in range(3)]
    second = iter(loader)
    assert not prefetch_threads()  # a second iter() ends the thread of the first
    assert [next(second).tolist() for _ in range(3)] == got
    assert next(first).tolist() == [6, 7]
    loader.close()
    first.close()


def test_persistent_workers_survive_a_break_and_serve_the_newest_iterator():
    loader = PrefetchLoader(range(40), 2, num_workers=1, persistent_workers=True)
    first = iter(loader)
    next(first), next(first), next(first)
    worker = multiprocessing.active_children()
    assert [b.tolist() for b in loader] == [[n, n + 1] for n in range(0, 40, 2)]
    with pytest.raises(RuntimeError, match=r"serve a newer iterator of the same loader \(persistent_workers=True\)"):
        next(first)
    assert multiprocessing.active_children() == worker
    loader.close()
    assert not multiprocessing.active_children()


class Custom(DataLoader):
    """A loader class with an argument of its own and an iterator of its own."""

    def __init__(self, path, scale=1, **kwargs):
        self.path, self.scale = path, scale
        super().__init__(range(6), **kwargs)

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * self.scale


def test_other_classes_of_loader_can_be_converted():
    loader = Custom("here", scale=10, batch_size=2)
    twin = PrefetchLoader.of(loader, prefetch_batches=3)
    assert isinstance(twin, PrefetchLoader)
    assert isinstance(twin, Custom)
    assert (twin.prefetch_batches, twin.threads, twin.path) == (3, 1, "here")
    assert [b.tolist() for b in twin] == [[0, 10], [20, 30], [40, 50]]
    assert type(loader) is Custom
    assert type(PrefetchLoader.of(loader)) is type(twin)
    assert list(inspect.signature(type(twin).__init__).parameters) == [
        "self", "path", "scale", "prefetch_batches", "threads", "transfer", "sample_seeds", "kwargs",
    ]  # fmt: skip
    again = type(twin)(path="there", batch_size=3, prefetch_batches=2)
    assert [b.tolist() for b in again] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_and_pickles(convert, through):
    loader = PrefetchLoader.of(Custom("x", batch_size=2)) if convert else PrefetchLoader(range(6), 2)
    iterator = iter(loader)
    next(iterator), next(iterator)
    twin = through(loader)
    assert type(twin) is type(loader)
    assert [b.tolist() for b in twin] == [[0, 1], [2, 3], [4, 5]]
    assert next(iterator).tolist() == [4, 5]


def test_a_pickled_loader_tells_where_it_is_before_its_first_batch():
    loader = PrefetchLoader(range(6), 2, shuffle=True, generator=torch.Generator().manual_seed(1))
    twin = pickle.loads(pickle.dumps(loader))
    iterators = [iter(loader), iter(twin)]
    states = [each.state_dict() for each in (loader, twin)]
    assert [len(state["own"]) for state in states] == [1, 1]
    assert torch.equal(states[0]["own"][0], states[1]["own"][0])
    assert [batch.tolist() for batch in iterators[0]] == [batch.tolist() for batch in iterators[1]]


def test_a_sampler_that_draws_from_shared_generators_is_named():
    class Drawing(Sampler):
        def __len__(self):
            return 20

        def __iter__(self):
            return (random.randrange(20) for _ in range(20))

    loader = PrefetchLoader(range(20), batch_size=2, sampler=Drawing(), num_workers=1)
    with pytest.warns(NoEffectWarning, match="the indices .* (generator|RNG) of random.*Give the sampler"):
        assert len(list(loader)) == 10


class OneAtATime(Dataset):
    """As a file that is opened once: two threads must not be inside at the same time."""

    def __init__(self):
        self.inside = 0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.inside += 1
        assert self.inside == 1, "two threads read at once"
        time.sleep(0.002)
        self.inside -= 1
        return index


SHARED = {
    "itself": lambda data: (data, data),
    "halves": lambda data: random_split(data, [10, 10]),
    "a half of a half": lambda data: (data, Subset(Subset(data, range(10)), range(5))),
    "a half beside a whole": lambda data: (Subset(data, range(10)), data),
}


@pytest.mark.parametrize("split", SHARED.values(), ids=SHARED)
def test_loaders_that_share_a_dataset_load_in_turns(split):
    one, other = (PrefetchLoader(part, 1, prefetch_batches=4) for part in split(OneAtATime()))
    first = iter(one)
    next(first), next(first)
    assert len(list(other)) == len(other)  # while the thread of the first is at work
    assert len(list(first)) == len(one) - 2


def test_other_datasets_are_loaded_at_the_same_time():
    together = threading.Barrier(2, timeout=20)

    class Meets(Numbers):
        def __getitem__(self, index):
            if index == 3:  # in the threads
                together.wait()
            return index

    loaders = [PrefetchLoader(ConcatDataset([Meets(6)]), 1) for _ in range(2)]
    assert len(list(zip(*loaders, strict=True))) == 6
