"""PrefetchLoader: a DataLoader in every respect."""

import copy
import inspect
import multiprocessing
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
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.errors import NoEffectWarning

pytestmark = pytest.mark.timeout(120)


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


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_equal_the_plain_loaders_with_workers(persistent):
    for settings in ("shuffled", "own batch sampler"):
        chosen = {**SETTINGS[settings](), "num_workers": 2, "persistent_workers": persistent}
        plain = epochs(DataLoader, Numbers(), chosen)
        assert epochs(PrefetchLoader, Numbers(), {**SETTINGS[settings](), **chosen}) == plain


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets(workers):
    settings = {"batch_size": 4, "num_workers": workers}
    assert epochs(PrefetchLoader, Stream(), settings) == epochs(DataLoader, Stream(), settings)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods(method):
    settings = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": method}
    loader = PrefetchLoader(range(10), **settings)
    assert [b.tolist() for b in loader] == [b.tolist() for b in DataLoader(range(10), **settings)]


@pytest.mark.parametrize("several", [1, 3])
def test_random_augmentation_without_workers_is_that_of_the_plain_loader(several):
    settings = {"batch_size": 3, "shuffle": True, "threads": several}
    with pytest.warns(NoEffectWarning, match="torch and random and numpy"):
        prefetched = epochs(PrefetchLoader, Augmented(), settings)
    assert prefetched == epochs(DataLoader, Augmented(), {"batch_size": 3, "shuffle": True})


def test_random_augmentation_with_workers_is_that_of_the_plain_loader():
    settings = {"batch_size": 3, "shuffle": True, "num_workers": 2}
    # 3 epochs of two workers each; every worker's stream follows from the seed drawn at iter().
    assert epochs(PrefetchLoader, Augmented(), settings, 2) == epochs(DataLoader, Augmented(), settings, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_twenty_runs_with_one_seed_give_one_result(workers):
    """Random augmentation, dropout in the model, and an early break: the loss is the same to the last bit."""

    def run():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)
            loader = PrefetchLoader(Augmented(), 2, shuffle=True, num_workers=workers)
            for _ in range(2):
                for number, (batch, a, b) in enumerate(loader):
                    loss = (model(batch).squeeze(1) + a + b).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    if number == 3:
                        break
        loader.close()
        return loss.item()

    assert len({run() for _ in range(20)}) == 1


class Jittered(Numbers):
    """Draws from a generator of its own; loading takes now long, now not."""

    def __init__(self, length=23):
        super().__init__(length)
        self.noise = np.random.default_rng(0)

    def __getitem__(self, index):
        time.sleep(0.001 * (index % 3))
        return index + self.noise.random()


def test_a_dataset_with_a_generator_of_its_own_is_loaded_by_one_thread():
    settings = {"batch_size": 2, "shuffle": True}
    with pytest.warns(
        NoEffectWarning, match=r"generator that the dataset holds.*One thread loads instead of prefetch_"
    ):
        ours = epochs(PrefetchLoader, Jittered(), {**settings, "threads": 3})
    assert ours == epochs(DataLoader, Jittered(), settings)


class Inside(Numbers):
    """Waits until as many threads as possible are inside."""

    def __init__(self, several):
        super().__init__(42)
        self.together = threading.Barrier(several, timeout=10)

    def __getitems__(self, indices):
        if indices[0] >= 12:
            self.together.wait()
        return indices


def test_several_threads_load_at_the_same_time_and_batches_keep_their_order():
    loader = PrefetchLoader(Inside(3), 2, threads=3)
    assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 42, 2)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda **more: PrefetchLoader(Numbers(), 4, num_workers=1, **more), r"num_workers=1 processes load"),
        (lambda **more: PrefetchLoader(Stream(), 4, **more), r"an IterableDataset \(Stream\)"),
        (
            lambda **more: PrefetchLoader.of(Custom("x", batch_size=2), **more),
            "PrefetchCustom does not load by torch's",
        ),
        (lambda **more: stateful(**more), "does not load by torch's own iterator"),
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


def stateful(**more):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return PrefetchLoader.of(torchdata.StatefulDataLoader(Numbers(), 4), **more)


def test_it_is_a_dataloader_with_its_constructor():
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (PrefetchLoader, DataLoader))
    assert [name for name in ours if name not in ("prefetch_batches", "prefetch_threads", "transfer")] == list(theirs)
    assert all(ours[name] == theirs[name] for name in theirs)
    loader = PrefetchLoader(Numbers(), 4, True, num_workers=0)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 6
    assert loader.batch_size == 4
    with pytest.raises(TypeError, match="has no len"):
        len(PrefetchLoader(Stream()))


@pytest.mark.parametrize("value", [0, -1])
def test_bad_depth(value):
    with pytest.raises(ValueError, match=rf"prefetch_batches={value} is out of range"):
        PrefetchLoader(Numbers(), prefetch_batches=value)
    with pytest.raises(ValueError, match=rf"threads={value} is out of range; pass the number of threads"):
        PrefetchLoader(Numbers(), threads=value)
    with pytest.raises(TypeError, match=r"threads='2' is no integer"):
        PrefetchLoader.of(DataLoader(Numbers()), threads="2")


def test_two_iterators_of_one_loader_both_see_everything():
    loader = PrefetchLoader(range(12), 2)
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [
        ([n, n + 1], [n, n + 1]) for n in range(0, 12, 2)
    ]
    got = []
    for outer in loader:
        for inner in loader:
            got.append((outer.tolist(), inner.tolist()))
    assert got == [([n, n + 1], [m, m + 1]) for n in range(0, 12, 2) for m in range(0, 12, 2)]


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name.startswith("lightning_turbo-prefetch")]


def test_a_second_iter_ends_the_thread_of_the_first():
    loader = PrefetchLoader(range(1000), 2)
    first = iter(loader)
    got = [next(first).tolist() for _ in range(3)]
    assert len(prefetch_threads()) == 1
    second = iter(loader)
    assert not prefetch_threads()
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
    assert [b.tolist() for b in loader][-1] == [38, 39]
    loader.close()


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
    assert twin.prefetch_threads == 1
    assert isinstance(twin, PrefetchLoader)
    assert isinstance(twin, Custom)
    assert (twin.prefetch_batches, twin.path) == (3, "here")
    assert [b.tolist() for b in twin] == [[0, 10], [20, 30], [40, 50]]
    assert type(loader) is Custom
    assert type(PrefetchLoader.of(loader)) is type(twin)
    assert list(inspect.signature(type(twin).__init__).parameters) == [
        "self", "path", "scale", "prefetch_batches", "prefetch_threads", "transfer", "kwargs",
    ]  # fmt: skip
    again = type(twin)(path="there", batch_size=3, prefetch_batches=2)
    assert [b.tolist() for b in again] == [[0, 1, 2], [3, 4, 5]]


def test_only_loaders_can_be_converted():
    with pytest.raises(TypeError, match=r"PrefetchLoader.of got \[1\]; it takes a torch.utils.data.DataLoader"):
        PrefetchLoader.of([1])


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


def test_set_epoch_changes_the_order():
    sampler = DistributedSampler(range(20), 2, 0, shuffle=True)
    loader = PrefetchLoader(range(20), 5, sampler=sampler)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append([b.tolist() for b in loader])
    assert orders[0] != orders[1]


def test_a_sampler_that_draws_from_shared_generators_is_named():
    class Drawing(Sampler):
        def __len__(self):
            return 20

        def __iter__(self):
            return (random.randrange(20) for _ in range(20))

    loader = PrefetchLoader(range(20), batch_size=2, sampler=Drawing(), num_workers=1)
    with pytest.warns(NoEffectWarning, match="the indices .* generator of random.*Give the sampler"):
        assert len(list(loader)) == 10
