"""Small tensors on their way from worker processes: equal to the last bit, all else as torch sends it."""

import collections
import gc
import pickle
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import init_reductions
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading import torch_side
from tests.data.batches import differences
from tests.data.samples import Pair, Rows, Scan, values

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16,
)  # fmt: skip
SMALL = torch_side.SMALL // 4  # elements of float32


class Names(dict):
    """A mapping of its own class."""


class Tracked(torch.Tensor):
    """A tensor that knows more than its numbers, as MONAI's and torchvision's do."""


@pytest.fixture
def crossed():
    """A function that sends an object as a worker process does, and returns it and how many bytes crossed."""
    torch_side.SmallTensors(None)(0)

    def send(batch):
        sent = bytes(ForkingPickler.dumps(batch))
        return pickle.loads(sent), len(sent)

    yield send
    init_reductions()  # torch's own way again
    resource_sharer.stop()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4), (1, 2, 3, 4)], ids=str)
def test_every_dtype_and_shape(crossed, dtype, shape):
    before = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 2).to(dtype)
    got, _ = crossed([before, {"again": before}])
    assert not differences(got[:1], [before])
    assert got[1]["again"] is got[0]  # one object stays one


WHOLE = torch.arange(8.0)
BATCHES = {
    "parts of one memory": lambda: [WHOLE[:4], WHOLE[4:]],
    "a part alone": lambda: [torch.arange(9.0)[2:5]],
    "gaps": lambda: [torch.ones(6)[::2], torch.ones(1, 3).expand(2, 3)],
    "another order of the axes": lambda: [
        torch.rand(3, 4).t(), torch.rand(1, 2, 3, 3).contiguous(memory_format=torch.channels_last),
    ],
    "sparse": lambda: [torch.eye(3).to_sparse()],
    "with a gradient": lambda: [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)],
    "a class of its own": lambda: [torch.ones(3).as_subclass(Tracked)],
    "the largest small one and a larger": lambda: [torch.rand(SMALL), torch.rand(SMALL + 1)],
    "containers": lambda: Pair(
        [torch.ones(2), np.arange(3.0), "text", None],
        {"scan": Scan(torch.rand(2, 3)), "names": Names(a=torch.ones(1)), 3: (torch.ones(1), 1j)},
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_a_batch_arrives_as_it_was(crossed, make):
    batch = make()
    got, _ = crossed(batch)
    assert not differences(got, batch)


def test_classes_of_containers_stay(crossed):
    user = collections.UserDict(x=torch.arange(3), y=[torch.ones(2).bfloat16()])
    queue, space = collections.deque([torch.ones(2)]), SimpleNamespace(x=torch.ones(3))
    packed = pack_sequence([torch.arange(4.0), torch.arange(2.0)])
    (got, again, named, sequence), _ = crossed([user, queue, space, packed])
    assert type(got) is collections.UserDict
    assert not differences(got.data, user.data)
    assert type(again) is collections.deque
    assert not differences([*again, named.x], [*queue, space.x])
    assert type(sequence) is PackedSequence
    assert not differences(list(sequence[:2]), list(packed[:2]))


@pytest.mark.parametrize(("batch", "carried"), [
    (torch.ones(SMALL), True), (torch.ones(SMALL + 1), False), (torch.ones(40).bfloat16(), True),
    (WHOLE[:4], False), (torch.ones(6)[::2], False), (torch.ones(9).as_subclass(Tracked), False),
    (torch.ones(9).share_memory_(), True),
], ids=["small", "large", "bfloat16", "a part", "gaps", "own class", "shared"])  # fmt: skip
def test_what_crosses_with_its_data(batch, carried):
    reduced = torch_side._reduce(batch)
    is_torchs = reduced[0].__module__ == "torch.multiprocessing.reductions"
    assert is_torchs != carried


def test_two_tensors_that_share_a_memory_still_do(crossed):
    """As torch sends them: what is written to one is seen in the other."""
    whole = torch.zeros(4)
    (one, other), _ = crossed([whole, whole.view(2, 2)])
    one[0] = 7
    assert other[0, 0] == 7


# ---- Through loaders.


def sample(index):
    generator = torch.Generator().manual_seed(index)
    boxes = torch.rand(index % 5, 4, generator=generator)
    return {
        "image": torch.rand(3, 8, 8, generator=generator), "boxes": boxes, "labels": torch.arange(index % 5),
        "name": f"{index}.png", "scan": Scan(torch.rand(2, 3, generator=generator).T), "array": np.arange(3.0) * index,
    }  # fmt: skip


def large(index):
    return torch.full((150, 150), float(index)), index


class Numbers(IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.tensor([n, n]), "y": torch.tensor(n)} for n in range(12)])


@pytest.mark.parametrize(("data", "settings"), [
    (lambda: Rows(20, sample), {"batch_size": 4, "collate_fn": list}),
    (lambda: Rows(20, sample), {"batch_size": 4, "collate_fn": list, "num_workers": 2}),
    (lambda: Rows(20, sample), {"batch_size": None}),
    (lambda: Rows(20, large), {"batch_size": 4, "num_workers": 2, "persistent_workers": True}),
    (Numbers, {"batch_size": 5}),
    *(
        pytest.param(
            lambda: Rows(20, sample), {"batch_size": 4, "collate_fn": list, "multiprocessing_context": method},
            marks=pytest.mark.slow,
        )
        for method in ("spawn", "forkserver")
    ),
], ids=["lists", "two workers", "single samples", "large", "stream", "spawn", "forkserver"])  # fmt: skip
def test_batches_of_worker_processes_are_a_data_loaders(data, settings):
    settings = {"num_workers": 1, **settings}
    torch.manual_seed(0)
    plain = list(DataLoader(data(), **settings))
    torch.manual_seed(0)
    loader = PrefetchLoader(data(), **settings)
    for _ in range(1 + settings.get("persistent_workers", False)):
        assert not differences(list(loader), plain)
    loader.close()


def test_a_kept_tensor_keeps_nothing_else():
    loader = PrefetchLoader(Rows(12, sample), batch_size=2, num_workers=1, collate_fn=list)
    kept = [batch[0]["boxes"] for batch in loader]
    gc.collect()
    assert [tensor.untyped_storage().nbytes() for tensor in kept] == [tensor.nbytes for tensor in kept]
    assert not any(tensor.is_shared() for tensor in kept if tensor.numel())
    for tensor in kept:
        tensor.add_(1)  # it may be written to; a warning would be an error


def test_a_class_that_makes_batches_of_its_own_sees_plain_ones():
    class Own(DataLoader):
        def __iter__(self):
            return ({"count": len(batch), "batch": batch} for batch in super().__iter__())

    loader = PrefetchLoader.of(Own(Rows(8, sample), batch_size=4, num_workers=1, collate_fn=list))
    assert [batch["count"] for batch in loader] == [4, 4]


def set_attribute(worker_id):
    dataset = get_worker_info().dataset
    dataset.more = 10 + worker_id
    dataset.load = lambda index: index + dataset.more


def test_the_loaders_own_worker_init_fn_is_called():
    loader = PrefetchLoader(Rows(4), 2, num_workers=1, worker_init_fn=set_attribute)
    assert values(loader) == [[10, 11], [12, 13]]
    assert loader.worker_init_fn is set_attribute


def test_a_server_of_processes_imports_torch_once_and_what_it_was_told(monkeypatch):
    from multiprocessing import forkserver

    told = []
    loader = DataLoader(Rows(4), num_workers=1, multiprocessing_context="forkserver")
    monkeypatch.setattr("multiprocessing.set_forkserver_preload", told.append)
    for known, expected in ((["numpy"], ["numpy", "torch"]), ([], ["__main__", "torch"]), (["torch"], None)):
        monkeypatch.setattr(forkserver._forkserver, "_preload_modules", known)
        told.clear()
        torch_side.preload(loader)
        assert told == ([] if expected is None else [expected])
    torch_side.preload(DataLoader(Rows(4), num_workers=1, multiprocessing_context="spawn"))
    assert not told
