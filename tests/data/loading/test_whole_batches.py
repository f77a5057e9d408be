"""Batches of arrays in memory are made by one index; order, random numbers, states and bits are a DataLoader's."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from lightning_turbo.data import PackedDataset, PrefetchLoader
from lightning_turbo.data.loading.whole_batches import WholeBatches, has_whole_batches
from lightning_turbo.errors import NoEffectWarning
from tests.data.batches import differences
from tests.data.samples import itself

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
ARRAYS = ("float32", "float64", "float16", "int64", "int16", "uint8", "uint16", "bool", "complex64")


class Noisy:
    """A transform that draws from all generators, and returns another structure."""

    def __init__(self, structure):
        self.structure = structure

    def __call__(self, batch):
        noise = torch.rand(1) + random.random() + np.random.rand()
        first = batch[0] if isinstance(batch, tuple) else next(iter(batch.values()))
        first = first.float() + noise.float()
        if self.structure == "names":
            return {"x": first, "twice": (first, first), "rows": first.reshape(len(first), -1)[:, ::2]}
        return [first, first.numpy()]  # arrays are collated one by one


def a_tensor(rng, n):
    shape = [n, *(rng.randint(0, 4) if rng.random() < 0.1 else rng.randint(1, 4) for _ in range(rng.randint(0, 4)))]
    values = torch.randint(0, 100, shape).to(rng.choice(DTYPES))
    kind = rng.randrange(6)
    if kind == 0 and len(shape) == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if kind == 1 and len(shape) > 2:
        return values.movedim(1, -1)
    if kind == 2:
        return values.repeat_interleave(2, 0)[::2]
    if kind == 3 and len(shape) > 1:
        return values[:, :1].expand(shape)
    return values


def an_array(rng, n):
    shape = [n, *(rng.randint(1, 4) for _ in range(rng.randint(0, 3)))]
    array = np.random.default_rng(rng.randrange(99)).integers(0, 100, shape).astype(rng.choice(ARRAYS))
    return np.asfortranarray(array) if rng.random() < 0.2 else array


def a_dataset(rng, n, depth=0, beside=False):
    kind = rng.randrange(7 if depth < 2 else 5)
    if kind == 0:
        return TensorDataset(*(a_tensor(rng, n) for _ in range(rng.randint(1, 3))))
    if kind == 1:
        return a_tensor(rng, n)
    if kind == 2:
        return an_array(rng, n)
    if kind in (3, 4):
        arrays = {name: an_array(rng, n) for name in "xyz"[: rng.randint(1, 3)]}
        keys = rng.choice([None, list(arrays), {f"the {name}": name for name in arrays}])
        noisy = kind == 4 and not beside and (len(arrays) > 1 or isinstance(keys, dict))
        return PackedDataset(arrays, keys=keys, transform=Noisy(rng.choice(["names", "arrays"])) if noisy else None)
    if kind == 5:
        parts = [a_dataset(rng, n, depth + 1, True) for _ in range(rng.randint(1, 3))]
        return StackDataset(*parts) if rng.random() < 0.5 else StackDataset(**dict(zip("abc", parts, strict=False)))
    whole = a_dataset(rng, n + 5, depth + 1, beside)
    if rng.random() < 0.3:
        return random_split(whole, [n, 5], torch.Generator().manual_seed(1))[0]
    places = rng.choices(range(-n, n + 5), k=n)  # some counted from the end, some twice
    if rng.random() < 0.5:
        places = [place % (n + 5) for place in places]
    return Subset(whole, rng.choice([list, np.array, torch.tensor, tuple])(places))


class Odd(BatchSampler):
    """Indices that are not integers from 0 on."""

    def __iter__(self):
        for batch in super().__iter__():
            yield [index - len(self.sampler) if index % 3 else torch.tensor(index) for index in batch]


def settings_of(rng, dataset):
    generator = rng.choice([None, torch.Generator().manual_seed(3)])
    size, kind = rng.randint(1, 9), rng.randrange(6)
    if kind == 0:
        sampler = WeightedRandomSampler([1.0] * len(dataset), len(dataset), generator=generator)
        return {"batch_size": size, "sampler": sampler, "drop_last": rng.random() < 0.5}
    if kind == 1:
        return {"batch_sampler": BatchSampler(list(np.random.permutation(len(dataset))), size, False)}
    if kind == 2:
        return {"batch_sampler": Odd(range(len(dataset)), size, False)}
    shuffle, drop_last = rng.random() < 0.7, rng.random() < 0.5
    return {"batch_size": size, "shuffle": shuffle, "drop_last": drop_last, "generator": generator}


def seed():
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def states(loader):
    own = [] if loader.generator is None else [loader.generator.get_state()]
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()[1], *own]


def epochs_of(make, left_after):
    """Two epochs and one that is left early, with the generators' states and what a further epoch would begin with."""
    seed()
    loader, seen = make(), []
    for _ in range(2):
        seen += [*loader, len(loader), *states(loader)]
    iterator = iter(loader)
    seen += [batch for batch, _ in zip(iterator, range(left_after), strict=False)]
    del iterator
    if isinstance(loader, PrefetchLoader):
        loader.close()
    return [*seen, *states(loader), torch.rand(1), list(loader)]


def check(trial, workers=0):
    rng = random.Random(trial)
    n = rng.randint(1, 40)
    seed()
    dataset = a_dataset(rng, n)
    settings = settings_of(rng, dataset)
    left_after = rng.randint(1, 5)

    def make(kind):
        return kind(copy.deepcopy(dataset), num_workers=workers, **copy.deepcopy(settings))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an array that must not be written to, and of loading that draws
        got = [epochs_of(lambda kind=kind: make(kind), left_after) for kind in (DataLoader, PrefetchLoader)]
    assert has_whole_batches(DataLoader(dataset)), trial
    assert not differences(*got), (trial, differences(*got)[:3])


@pytest.mark.parametrize("trial", range(0, 60, 12))
def test_random_arrays_are_loaded_as_by_a_data_loader(trial):
    for each in range(trial, trial + 12):
        check(each)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(1000, 1600, 50))
def test_many_random_arrays_are_loaded_as_by_a_data_loader(trial):
    for each in range(trial, trial + 50):
        check(each)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(10))
def test_random_arrays_are_loaded_by_worker_processes_as_by_a_data_loader(trial):
    check(trial, workers=2)


def tensors(n=20):
    return TensorDataset(torch.arange(3.0 * n).view(n, 3), torch.arange(n))


def test_each_tensor_of_a_batch_owns_its_memory():
    x, y = next(iter(PrefetchLoader(tensors(), batch_size=4)))
    for part in (x, y):
        assert part.untyped_storage().nbytes() == part.nbytes
        assert part.is_contiguous()
        assert part._base is None


def test_samples_are_not_asked_for_one_by_one(monkeypatch):
    asked = []
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: asked.append(index))
    loader = PrefetchLoader(Subset(tensors(), range(3, 15)), batch_size=4)
    assert [batch[1].tolist() for batch in loader] == [[3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14]]
    assert asked == []


def test_an_epoch_goes_on_from_a_state():
    for stop in range(1, 5):
        loader = PrefetchLoader(tensors(), batch_size=4, shuffle=True)
        torch.manual_seed(1)
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator)
        state = loader.state_dict()
        rest = list(iterator)
        again = PrefetchLoader(tensors(), batch_size=4, shuffle=True)
        again.load_state_dict(state)
        torch.manual_seed(9)
        got = list(again)
        assert not differences(got, rest)


def test_what_is_written_into_the_arrays_is_seen():
    data = tensors(8)
    subset = Subset(data, [0, 1, 2, 3])
    batches = iter(PrefetchLoader(subset, batch_size=2))
    assert next(batches)[1].tolist() == [0, 1]
    data.tensors[1][2], subset.indices[3] = 50, 7
    assert next(batches)[1].tolist() == [50, 7]


class Squared(TensorDataset):
    def __getitem__(self, index):
        return tuple(part**2 for part in super().__getitem__(index))


class Halved(PackedDataset):
    def _finish(self, index, sample):
        return super()._finish(index, sample) / 2


class Known(torch.Tensor):
    pass


def own_collate(samples):
    return default_collate(samples)


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (Squared(torch.arange(4.0)), default_collate),
        (Subset(Squared(torch.arange(4.0)), [1, 2]), default_collate),
        (StackDataset(torch.arange(4.0), [1, 2, 3, 4]), default_collate),
        (StackDataset(PackedDataset(np.ones((4, 2)), transform=torch.neg)), default_collate),
        (TensorDataset(torch.arange(4.0, requires_grad=True)), default_collate),
        (TensorDataset(torch.eye(4).to_sparse()), default_collate),
        (TensorDataset(torch.eye(4).as_subclass(Known)), default_collate),
        (TensorDataset(torch.ones(4, dtype=torch.complex64).conj()), default_collate),
        *((TensorDataset(torch.arange(4).to(kind)), default_collate) for kind in UNSIGNED),
        (np.ones(4, ">f4"), default_collate),
        (np.array(["a", "b"]), default_collate),
        (np.ones(4, "uint64"), default_collate),
        ([1.0, 2.0], default_collate),
        (PackedDataset(np.ones((4, 2)), sample_transform=torch.neg), default_collate),
        (Halved(np.ones((4, 2))), default_collate),
        (tensors(), own_collate),
        (tensors(), PackedDataset.collate),
    ],
)  # fmt: skip
def test_other_datasets_are_not_guessed_at(dataset, collate):
    assert not has_whole_batches(DataLoader(dataset, collate_fn=collate))


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("make", [TensorDataset, StackDataset, itself])
def test_unsigned_numbers_are_loaded_as_by_a_data_loader(dtype, make):
    for shape in ((6,), (6, 2)):
        values = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        assert not differences(*[list(kind(make(values), batch_size=4)) for kind in (DataLoader, PrefetchLoader)])


def test_an_own_getitems_of_an_object_is_called():
    data = tensors()
    data.__getitems__ = lambda indices: [(torch.zeros(1), torch.zeros(1)) for _ in indices]
    assert not has_whole_batches(DataLoader(data))
    assert next(iter(PrefetchLoader(data, batch_size=4)))[0].sum() == 0


def test_a_collate_table_that_somebody_changed_counts(monkeypatch):
    table = default_collate.__globals__["default_collate_fn_map"]
    monkeypatch.setitem(table, torch.Tensor, lambda batch, collate_fn_map: len(batch))
    assert next(iter(PrefetchLoader(tensors(), batch_size=4))) == [4, 4]


@pytest.mark.parametrize("index", [20, -21, 1.5, "a"])
def test_errors_are_those_of_a_data_loader(index):
    errors = []
    for kind in (DataLoader, PrefetchLoader):
        with pytest.raises((IndexError, TypeError)) as caught:
            next(iter(kind(tensors(), batch_sampler=[[0, index]])))
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("make", [tensors, lambda: PackedDataset(np.ones((4, 2)))])
def test_a_batch_of_no_samples_is_the_error_of_a_data_loader(make):
    errors = []
    for kind in (DataLoader, PrefetchLoader):
        with pytest.raises((IndexError, TypeError)) as caught:
            next(iter(kind(make(), batch_sampler=[[]])))
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_batches_of_one_sample_without_a_size_stay_samples():
    assert not differences(*[list(kind(tensors(3), batch_size=None)) for kind in (DataLoader, PrefetchLoader)])


def test_several_threads_have_nothing_to_load():
    loader = PrefetchLoader(tensors(), batch_size=4, threads=2)
    with pytest.warns(NoEffectWarning, match="batches of a TensorDataset are made by one index"):
        assert len(list(loader)) == 5


def test_the_loader_keeps_its_dataset():
    data = tensors()
    loader = PrefetchLoader(data, batch_size=4)
    iterator = iter(loader)
    next(iterator)
    assert loader.dataset is data
    assert loader.collate_fn is default_collate


def _double(worker):
    info = torch.utils.data.get_worker_info()
    info.dataset.tensors = tuple(part * 2 for part in info.dataset.tensors)
    info.dataset.worker = worker


def test_a_worker_init_fn_reaches_the_dataset():
    got = [
        list(kind(tensors(), batch_size=4, num_workers=1, worker_init_fn=_double))
        for kind in (DataLoader, PrefetchLoader)
    ]
    assert not differences(*got)
    assert got[0][0][1].tolist() == [0, 2, 4, 6]


def test_attributes_of_the_dataset_are_read_and_set():
    data = tensors()
    stand_in = WholeBatches(data)
    stand_in.name = "x"
    assert (data.name, stand_in.name, len(stand_in)) == ("x", "x", 20)
    assert not hasattr(copy.copy(stand_in), "missing")
    assert not differences(stand_in[3], data[3])
