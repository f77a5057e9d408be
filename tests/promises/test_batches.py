"""Batches of any structure, from this process and from worker processes, equal to those of a DataLoader."""

import threading
import time
from collections import UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, StackDataset, Subset, TensorDataset

from lightning_turbo import PrefetchLoader
from tests.data.batches import differences
from tests.data.samples import Pair, Rows, Scan, itself, saved
from tests.promises.runs import LENGTH, Slow, flat, generators, seed, stock, stopped, turbo

pytestmark = [pytest.mark.usefixtures("all_ends", "every_loader_has_a_thread"), pytest.mark.timeout(60)]


def floats(indices, *shape):
    """Return float32 numbers of the shape [len(indices), *shape]."""
    return torch.stack([torch.full(shape, float(index)) for index in indices])


def a_dict(indices):
    return {"x": floats(indices, 3), "y": torch.tensor(indices), "nested": [floats(indices), {"z": floats(indices, 2)}]}


def a_namedtuple(indices):
    return Pair(floats(indices, 3, 4, 4), [floats(range(count + 1), 4) for count in indices])


def a_dataclass(indices):
    return Scan(floats(indices, 2, 2), f"{indices}")


def a_user_dict(indices):
    return UserDict(x=floats(indices, 3), name="name")


def dtypes(indices):
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8, torch.int16, torch.complex64)
    return [floats(indices, 3).to(kind) for kind in kinds]


def one_storage(indices):
    whole = floats(indices, 6)
    return [whole, whole[1:], whole.view(-1), whole]


def strides(indices):
    whole = floats(indices, 3, 4, 4)
    return [
        whole.transpose(1, 2),
        whole[:, ::2],
        whole[:, :1].expand(-1, 3, -1, -1),
        whole.contiguous(memory_format=torch.channels_last),
    ]


def empty_and_scalar(indices):
    return floats(indices, 3)[:0], floats(indices, 0), torch.tensor(indices[0]), [], {}


def strings_and_objects(indices):
    return {"names": [str(index) for index in indices], "none": None, 3: 2.5, "bytes": b"12", "range": range(3)}


def arrays(indices):
    return np.array(indices, dtype=np.float32), np.array(["a", "b"]), np.int64(3), {"x": np.empty((0, 2))}


def large(indices):
    return {"x": floats(indices, 200, 100), "y": torch.tensor(indices)}


COLLATES = (
    *(a_dict, a_namedtuple, a_dataclass, a_user_dict, dtypes, one_storage, strides, empty_and_scalar),
    *(strings_and_objects, arrays, large),
)


def assert_same(one, two):
    """Check structure, types, dtypes, strides and bits."""
    assert type(one) is type(two)
    parts = (one.data, two.data) if isinstance(one, UserDict) else (one, two)
    assert differences(*parts) == []


def assert_same_batches(dataset, **settings):
    """Check the batches of an epoch and the random states after it. The plain loader has no worker processes."""
    found = []
    plain = {**settings, "num_workers": 0, "multiprocessing_context": None}
    for kind, given in ((PrefetchLoader, settings), (DataLoader, plain)):
        seed(0)
        found.append([*kind(dataset, **given), generators()])
    for one, two in zip(*found, strict=True):
        assert_same(one, two)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", COLLATES)
def test_a_batch_of_any_structure(collate, workers):
    assert_same_batches(Rows(16), batch_size=4, collate_fn=collate, num_workers=workers)


def a_sample(index):
    return {"array": np.full((2, 3), index), "name": str(index), "pair": Pair(float(index), index), "x": torch.ones(2)}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [4, 1, None])
def test_samples_by_default_collation(batch_size, workers):
    """The last batch is not full. With ``None`` the samples are not made into batches."""
    assert_same_batches(Rows(14, a_sample), batch_size=batch_size, shuffle=True, num_workers=workers)


def every_structure(indices):
    return [collate(indices) for collate in COLLATES if collate is not a_user_dict]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_batch_of_a_process_that_is_not_forked(method):
    settings = {"num_workers": 1, "multiprocessing_context": method, "collate_fn": every_structure}
    assert_same_batches(Rows(8), batch_size=4, **settings)


FLOATS, NUMBERS = torch.randn(18, 3, generator=torch.Generator().manual_seed(0)), torch.arange(18)
IN_MEMORY = {
    "TensorDataset": lambda: TensorDataset(FLOATS, NUMBERS, FLOATS.bfloat16()),
    "tensor": lambda: FLOATS.clone(),
    "array": lambda: FLOATS.numpy().copy(),
    "StackDataset": lambda: StackDataset(x=TensorDataset(FLOATS), y=NUMBERS.numpy()),
    "Subset": lambda: Subset(TensorDataset(FLOATS.double(), NUMBERS), [3, 1, 4, 1, 5, 9, 2, 6, 12]),
}


@pytest.mark.parametrize("settings", [{}, {"shuffle": True, "drop_last": True}, {"shuffle": True, "num_workers": 1}])
@pytest.mark.parametrize("make", IN_MEMORY.values(), ids=IN_MEMORY)
def test_arrays_in_memory(make, settings):
    assert_same_batches(make(), batch_size=4, **settings)


def as_it_is(index):
    return torch.full((3,), float(index))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [lambda: Rows(16, as_it_is), lambda: TensorDataset(torch.arange(16.0))])
def test_a_batch_can_be_written_to_and_changes_nothing_else(make, workers):
    def values(loader):
        seen = []
        for batch in loader:
            batch = batch[0] if isinstance(batch, list) else batch
            seen.append(batch.tolist())
            batch.add_(100)
        return seen

    loader = PrefetchLoader(make(), batch_size=4, num_workers=workers)
    expected = values(DataLoader(make(), batch_size=4))
    assert [values(loader), values(loader)] == [expected] * 2


# ---- Batches that the dataset loads in one call.


class Windows(Slow):
    """Windows of 4 values of a long series; a batch of them is one index into it."""

    def __init__(self):
        super().__init__()
        self.series = torch.arange(100.0).square()
        self.threads = set()

    def __getitems__(self, indices):
        self.threads.add(threading.get_ident())
        time.sleep(self.seconds)
        starts = torch.tensor(indices)[:, None]
        return {"x": self.series[starts + torch.arange(4)], "index": starts, "asked": indices}

    def __getitem__(self, index):
        raise AssertionError(f"expected a call for a whole batch, got one for the sample {index}")


class Cells(Windows):
    """The same for loaders that pass a list of indices to ``__getitem__``."""

    __getitem__ = Windows.__getitems__
    __getitems__ = None


def windows(kind, workers=0, size=4, **settings):
    data = Windows()
    return kind(data, batch_size=size, shuffle=True, num_workers=workers, collate_fn=itself, **settings)


def cells(kind, workers=0, size=4, **settings):
    data = Cells()
    order = BatchSampler(RandomSampler(data), size, drop_last=False)
    return kind(data, batch_size=None, sampler=order, num_workers=workers, **settings)


IN_ONE_CALL = pytest.mark.parametrize("make", [windows, cells])


@IN_ONE_CALL
@pytest.mark.parametrize(("workers", "size"), [(0, 4), (0, 5), (2, 5)])
def test_a_batch_that_the_dataset_loads_in_one_call(make, workers, size):
    """Of five samples the last batch is not full."""
    found = []
    for kind, number in ((PrefetchLoader, workers), (DataLoader, 0)):
        seed(0)
        loader = make(kind, number, size)
        found.append([*loader, *loader, generators()])
    for one, two in zip(*found, strict=True):
        assert_same(one, two)
    assert {len(batch["asked"]) for batch in found[0][:-1]} == {size, LENGTH % size or size}


@IN_ONE_CALL
def test_a_batch_that_the_dataset_loads_in_one_call_is_loaded_ahead(make):
    loader = make(PrefetchLoader)
    list(loader)
    assert {threading.get_ident()} < loader.dataset.threads


@IN_ONE_CALL
def test_the_rest_of_an_epoch_in_batches_of_another_size(make):
    loader = make(PrefetchLoader, size=4)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state, rest = saved(loader.state_dict()), flat(batch["asked"] for batch in batches)
    again = make(PrefetchLoader, size=8)
    again.load_state_dict(state)
    asked = [batch["asked"] for batch in again]
    assert flat(asked) == rest
    assert [len(each) for each in asked] == [8, 8, 4]


@IN_ONE_CALL
@pytest.mark.parametrize(("workers", "stops"), [(0, []), (0, [3, 11]), (1, [3, 11])])
def test_a_run_whose_dataset_loads_a_batch_in_one_call(make, workers, stops, tmp_path):
    """Beside stock Lightning; also where it is stopped in the first epoch and in the second."""
    seen = stopped(turbo, lambda: make(DataLoader, workers), stops, tmp_path)
    assert seen == stock(make(DataLoader, workers))
