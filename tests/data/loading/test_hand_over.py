"""What worker processes hand over: small tensors in one buffer, equal to the last bit, all else as before."""

import collections
import copy
import dataclasses
import gc
import pickle
import random
import threading
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading import hand_over
from lightning_turbo.data.loading.hand_over import HandOver, PackedBatch, pack, part_at
from lightning_turbo.data.loading.prefetcher import PrefetchIterator
from tests.data.batches import differences
from tests.data.samples import Rows

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


class Pair(NamedTuple):
    image: Any
    boxes: Any


@dataclasses.dataclass
class Scan:
    volume: Any
    name: str = "x"


@dataclasses.dataclass(frozen=True)
class Frozen:
    __slots__ = ("parts",)
    parts: Any

    def __getstate__(self):
        return self.parts

    def __setstate__(self, state):
        object.__setattr__(self, "parts", state)


class Names(dict):
    """A mapping of its own class."""


class Tracked(torch.Tensor):
    """A tensor that knows more than its numbers, as MONAI's and torchvision's do."""


def a_tensor(rng):
    shape = [rng.choice([0, 1, 1, 2, 3, 5, 9]) if rng.random() < 0.9 else 40 for _ in range(rng.randint(0, 4))]
    values = torch.randint(0, 100, shape).to(rng.choice(DTYPES))
    change = rng.randrange(8)
    if change == 0 and values.dim() > 1:
        return values.movedim(0, -1)  # dense, in another order
    if change == 1 and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if change == 2 and values.dim():
        return values[::2]  # gaps
    if change == 3:
        return values.expand(3, *values.shape)
    if change == 4 and values.dim() and len(values) > 1:
        return values[1:]  # a part of a larger storage
    if change == 5 and values.dim() > 1:
        return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype).copy_(values)
    return values


def a_rare_tensor(rng):
    kinds = [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(3).as_subclass(Tracked),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.ones(2, requires_grad=True),
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
        lambda: torch.zeros(200, 100),  # 80 kB: large
    ]
    return rng.choice(kinds)()


def a_leaf(rng, seen):
    kind = rng.randrange(12)
    if kind < 7:
        return a_tensor(rng)
    if kind == 7:
        return a_rare_tensor(rng)
    if kind == 8 and seen:
        return rng.choice(seen)  # the same object again
    if kind == 9:
        return rng.choice([np.arange(6.0).reshape(2, 3), np.float32(2.5), np.array(["a", "b"]), np.int64(3)])
    return rng.choice([None, 3, -2.5, True, "text", b"bytes", 1j, range(3), slice(1, 2), torch.float16])


def a_batch(rng, depth=0, seen=None):
    seen = [] if seen is None else seen
    if depth > 3 or (depth and rng.random() < 0.35):
        leaf = a_leaf(rng, seen)
        seen.append(leaf)
        return leaf
    parts = [a_batch(rng, depth + 1, seen) for _ in range(rng.randint(0, 4))]
    names = dict(zip("abcd", parts, strict=False))
    kinds = [
        lambda: parts,
        lambda: tuple(parts),
        lambda: names,
        lambda: Names(names),
        lambda: collections.OrderedDict(names),
        lambda: collections.deque(parts),
        lambda: Pair(parts, names),
        lambda: Scan(parts, "y"),
        lambda: Frozen(tuple(parts)),
        lambda: SimpleNamespace(**names),
        lambda: [parts, parts],
        lambda: {3: parts, None: 1, ("x", 2): names},
    ]
    return rng.choice(kinds)()


def flat(value):
    """What ``differences`` knows nothing of, as what it does."""
    if isinstance(value, (SimpleNamespace, Scan)):
        return type(value).__name__, flat(vars(value))
    if isinstance(value, Frozen):
        return "Frozen", flat(value.parts)
    if isinstance(value, dict):
        return type(value).__name__, {key: flat(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value).__name__, [flat(part) for part in value]
    return value


def tensors_in(value):
    """The tensors in what ``flat`` returned."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def crossed(batch):
    """What arrives: the pickle of what is not left to torch, opened."""
    packed = pack(batch)
    if not isinstance(packed, PackedBatch):
        return packed
    wholes = [part for part in packed._parts if not isinstance(part, tuple)]
    places = pickle.loads(ForkingPickler.dumps([part for part in packed._parts if isinstance(part, tuple)]))
    rest = {True: iter(places), False: iter(wholes)}
    packed._parts = [next(rest[isinstance(part, tuple)]) for part in packed._parts]
    return packed.open()


QUANTIZED = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")


def check(trial):
    rng = random.Random(trial)
    batch = a_batch(rng)
    before = flat(copy.copy(batch))
    got = crossed(batch)
    assert not differences(flat(got), before), (trial, differences(flat(got), before)[:3])
    # Where two places have one object they still do, and no others.
    one, other = tensors_in(flat(batch)), tensors_in(flat(got))
    assert [_first(one, tensor) for tensor in one] == [_first(other, tensor) for tensor in other], trial
    for tensor in other:
        if all(tensor is not theirs for theirs in one):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tensor._base is None


def _first(tensors, tensor):
    return next(number for number, each in enumerate(tensors) if each is tensor)


@QUANTIZED
@pytest.mark.parametrize("trial", range(0, 300, 50))
def test_random_structures_arrive_as_they_were(trial):
    for each in range(trial, trial + 50):
        check(each)


@QUANTIZED
@pytest.mark.slow
@pytest.mark.parametrize("trial", range(10_000, 13_000, 300))
def test_thousands_of_random_structures_arrive_as_they_were(trial):
    for each in range(trial, trial + 300):
        check(each)


def packed_number(batch):
    """How many tensors of a batch are in the buffer."""
    packed = pack(batch)
    return sum(isinstance(part, tuple) for part in packed._parts) if isinstance(packed, PackedBatch) else 0


SHARED = torch.arange(8.0)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([torch.ones(3), torch.ones(4)], 2),
        ([torch.ones(1 << 14), torch.ones(1 << 14)], 2),  # 64 KiB
        ([torch.ones((1 << 14) + 1), torch.ones(3)], 1),
        ([torch.ones(200, 200), torch.ones(300, 300)], 0),
        (torch.ones(300, 300), 0),
        ([], 0),
        ("text", 0),
        ([np.ones(4), np.ones(5)], 0),
        ([SHARED[:4], SHARED[4:]], 0),  # one storage
        ([SHARED[:4], torch.ones(2)], 2),
        ([torch.ones(4)[::2], torch.ones(1, 3).expand(2, 3)], 0),  # gaps, and elements in one place
        ([torch.ones(2).as_subclass(Tracked), torch.nn.Parameter(torch.ones(2))], 0),
        ([torch.ones(2, dtype=torch.complex64).conj(), torch.eye(2).to_sparse()], 0),
        (pack_sequence([torch.ones(3), torch.ones(2)]), 2),
    ],
)  # fmt: skip
def test_what_is_packed(batch, expected):
    assert packed_number(batch) == expected


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors_are_left_to_torch():
    assert packed_number([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) for _ in range(2)]) == 0


def test_a_batch_with_nothing_to_pack_stays_itself():
    batch = [torch.ones(300, 300), np.ones(3)]
    assert pack(batch) is batch


def test_a_large_batch_crosses_in_shared_memory_and_a_small_one_does_not(monkeypatch):
    monkeypatch.setattr(hand_over, "PIPE", 1000)
    small, large = pack([torch.ones(9)] * 2), pack([torch.ones(9) * n for n in range(40)])
    assert isinstance(small._buffer, bytes)
    assert large._buffer.is_shared()
    assert not differences(large.open(), [torch.ones(9) * n for n in range(40)])


def test_a_batch_larger_than_the_bound_of_shared_memory_is_packed_in_part(monkeypatch):
    monkeypatch.setattr(hand_over, "LARGEST", 1000)
    batch = [torch.full((60,), float(n)) for n in range(20)]
    packed = pack(batch)
    assert len(packed._buffer) <= 1000
    assert sum(isinstance(part, tuple) for part in packed._parts) == 3
    assert not differences(packed.open(), batch)


def test_a_long_structure_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(hand_over, "LONGEST_STRUCTURE", 500)
    batch = [b"x" * 400, b"y" * 400, torch.ones(3), torch.ones(4)]
    assert pack(batch) is batch
    assert pack(batch, stream_state=5).open() is batch
    assert isinstance(pack(batch[1:]), PackedBatch)


def test_what_a_worker_tells_travels_with_the_batch():
    for batch in ([torch.ones(2), torch.ones(3)], torch.ones(300, 300), "text"):
        packed = pack(batch, stream_state={"position": 7})
        assert packed.stream_state == {"position": 7}
        assert not differences(packed.open(), batch)


def test_a_structure_is_read_by_its_opener_alone():
    with pytest.raises(RuntimeError, match="PackedBatch"):
        part_at(3)


def test_this_process_gets_batches_as_they_are():
    batch = [torch.ones(2), torch.ones(3)]
    assert HandOver(lambda samples: samples)(batch) is batch


# Through loaders.


def sample(index):
    generator = torch.Generator().manual_seed(index)
    boxes = torch.rand(index % 5, 4, generator=generator)
    return {
        "image": torch.rand(3, 8, 8, generator=generator), "boxes": boxes, "labels": torch.arange(index % 5),
        "name": f"{index}.png", "scan": Scan(torch.rand(2, 3, generator=generator).T), "array": np.arange(3.0) * index,
    }  # fmt: skip


def large(index):
    return torch.full((150, 150), float(index)), index


def mixed(samples):
    return Pair(
        [each["image"] for each in samples], {"rest": tuple(samples), "stacked": torch.stack([torch.ones(200, 200)])}
    )


class Numbers(IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.tensor([n, n]), "y": torch.tensor(n)} for n in range(12)])


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (lambda: Rows(20, sample), {"batch_size": 4, "collate_fn": list}),
        (lambda: Rows(20, sample), {"batch_size": 4, "collate_fn": mixed, "num_workers": 2}),
        (lambda: Rows(20, sample), {"batch_size": None}),
        (lambda: Rows(20, large), {"batch_size": 4, "num_workers": 2, "persistent_workers": True}),
        (Numbers, {"batch_size": 5}),
        pytest.param(
            lambda: Rows(20, sample), {"batch_size": 4, "collate_fn": list, "multiprocessing_context": "forkserver"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lists", "own structure", "single samples", "large", "stream", "forkserver"],
)  # fmt: skip
def test_batches_of_worker_processes_are_a_data_loaders(data, settings):
    settings = {"num_workers": 1, **settings}
    torch.manual_seed(0)
    plain = [flat(batch) for batch in DataLoader(data(), **settings)]
    torch.manual_seed(0)
    loader = PrefetchLoader(data(), **settings)
    for _ in range(1 + settings.get("persistent_workers", False)):
        assert not differences([flat(batch) for batch in loader], plain)
    loader.close()


@pytest.mark.usefixtures("every_loader_has_a_thread")
def test_batches_are_opened_in_the_background(monkeypatch):
    opened = []
    own = PackedBatch.open

    def recording(self):
        opened.append(threading.current_thread() is threading.main_thread())
        return own(self)

    monkeypatch.setattr(PackedBatch, "open", recording)
    assert len(list(PrefetchLoader(Rows(40, sample), batch_size=4, num_workers=1, collate_fn=list))) == 10
    assert len(opened) == 10
    assert opened[:1] == [True]  # the first ones show whether there is a thread
    assert not any(opened[5:])


def test_the_stream_state_becomes_the_state_of_the_position():
    def batches():
        for number in range(4):
            yield pack([torch.ones(2) * number], stream_state=number)

    iterator = PrefetchIterator(batches())
    for number in range(4):
        assert next(iterator)[0][0] == number
        assert iterator.position.states[-1] == (number + 1, number)
    iterator.close()


class Unpicklable:
    def __reduce__(self):
        raise TypeError("of this process alone")


def _collate_unpicklable(samples):
    return [torch.ones(2), torch.ones(3), Unpicklable()]


def test_what_cannot_be_pickled_is_an_error_of_its_batch():
    with pytest.raises(TypeError, match="of this process alone"):
        next(iter(PrefetchLoader(Rows(8), batch_size=2, num_workers=1, collate_fn=_collate_unpicklable)))


def test_a_class_that_makes_batches_of_its_own_sees_no_packed_ones():
    class Own(DataLoader):
        def __iter__(self):
            return ({"count": len(batch), "batch": batch} for batch in super().__iter__())

    loader = PrefetchLoader.of(Own(Rows(8, sample), batch_size=4, num_workers=1, collate_fn=list))
    assert [batch["count"] for batch in loader] == [4, 4]


def test_an_epoch_goes_on_from_a_state():
    def make():
        return PrefetchLoader(Rows(24, sample), batch_size=4, num_workers=2, collate_fn=list, shuffle=True)

    torch.manual_seed(3)
    loader = make()
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), list(batches)
    again = make()
    again.load_state_dict(state)
    assert not differences([flat(batch) for batch in again], [flat(batch) for batch in rest])


def test_a_kept_tensor_keeps_nothing_else():
    kept = [
        batch[0]["boxes"] for batch in PrefetchLoader(Rows(12, sample), batch_size=2, num_workers=1, collate_fn=list)
    ]
    gc.collect()
    assert [tensor.untyped_storage().nbytes() for tensor in kept] == [tensor.nbytes for tensor in kept]
    assert not any(tensor.is_shared() for tensor in kept)


def test_a_packed_sequence_stays_one():
    batch = pack_sequence([torch.arange(4.0), torch.arange(2.0)])
    got = crossed(batch)
    assert type(got) is PackedSequence
    assert not differences(list(got[:2]), list(batch[:2]))


def test_a_pinned_batch_is_the_same_in_the_buffer_as_a_whole(monkeypatch):
    """Page-locked memory, which needs a device, is pretended."""
    batch = {"rows": torch.arange(6.0).view(2, 3).t(), "none": torch.zeros(0, 3), "half": torch.ones(5).half()}
    packed = pack([batch, torch.tensor(3), "a", torch.ones(hand_over.SMALL)])
    pinned = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **settings: empty(*size, **settings))
    monkeypatch.setattr(hand_over, "pin_batch", lambda part: pinned.append(part) or part)
    twin = packed.pin_memory()
    assert (twin.is_pinned, packed.is_pinned) == (True, False)
    assert twin.pin_memory() is twin
    got, wanted = twin.open(), packed.open()
    assert differences(wanted, got) == []
    assert got[0]["rows"].untyped_storage().data_ptr() == twin._buffer.untyped_storage().data_ptr()
    assert [part.numel() for part in pinned if isinstance(part, torch.Tensor)] == [hand_over.SMALL]
