"""DevicePrefetcher on the CPU, and the walk over batches. The rest is in tests/gpu."""

import dataclasses
import gc
import itertools
import random
import weakref
from collections import UserDict, defaultdict, namedtuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, DistributedSampler

from lightning_turbo._pytree import move_batch
from lightning_turbo.data import DevicePrefetcher, DeviceTransfer, PrefetchLoader
from lightning_turbo.data.loading.prefetcher import PrefetchIterator
from lightning_turbo.errors import NoEffectWarning

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")

META = torch.device("meta")  # a second device that every machine has


Pair = namedtuple("Pair", "x y")
Sample = dataclasses.make_dataclass("Sample", ["image", "name"])


class Movable:
    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return Movable(self.tensor.to(device))


class Encoding(UserDict):
    def to(self, device, *, non_blocking=False):
        self.seen = non_blocking
        return Encoding({key: value.to(device) for key, value in self.data.items()})


def one():
    return torch.ones(2, dtype=torch.float32)


BATCHES = {
    "tensor": one,
    "list": lambda: [one(), "text", 3, None],
    "tuple": lambda: (one(), (one(),)),
    "named tuple": lambda: Pair(one(), [one()]),
    "default dict": lambda: defaultdict(list, {"a": one(), "b": {"c": one()}}),
    "dataclass": lambda: Sample(one(), "n"),
    "object with .to": lambda: Movable(one()),
    "mapping with .to": lambda: Encoding(a=one()),
    "packed sequence": lambda: pack_sequence([one(), one()[:1]]),
    "nothing to move": lambda: {"a": 1, "b": ["x"]},
}


def tensors_in(part):
    """Return the tensors in a batch, also in the attributes of its objects."""
    if isinstance(part, torch.Tensor):
        return [part]
    if isinstance(part, (list, tuple)):
        parts = part
    else:
        items = part.values() if isinstance(part, dict) else ()
        parts = [*items, *getattr(part, "__dict__", {}).values()]
    return [tensor for each in parts for tensor in tensors_in(each)]


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_any_structure_is_moved_and_kept(make):
    batch = make()
    before = list(tensors_in(batch))
    there = move_batch(batch, META)
    assert type(there) is type(batch)
    after = list(tensors_in(there))
    assert len(after) == len(before) > 0 or make is BATCHES["nothing to move"]
    # Packed sequences keep their lengths on the CPU.
    assert all(t.device == META for t in after) or isinstance(batch, PackedSequence)
    assert all(t.device.type == "cpu" for t in before)
    for name in ("default_factory", "name"):
        assert getattr(there, name, None) is getattr(batch, name, None)
    if isinstance(batch, Encoding):  # a copy to the CPU is waited for
        move_batch(batch, torch.device("cpu"))
        assert batch.seen is False
        move_batch(batch, META)
        assert batch.seen is True


# ---- DevicePrefetcher.


def test_on_the_cpu_it_hands_out_the_loaders_batches():
    prefetcher = DevicePrefetcher(PrefetchLoader(range(6), 2), "cpu")
    assert isinstance(iter(prefetcher), PrefetchIterator)
    assert [b.tolist() for b in prefetcher] == [[0, 1], [2, 3], [4, 5]]
    batches = [one(), one()]
    assert [a is b for a, b in zip(DevicePrefetcher(batches, "cpu"), batches, strict=True)] == [True, True]


@pytest.mark.parametrize("make", [DataLoader, PrefetchLoader])
@pytest.mark.parametrize("transform", [None, lambda batch: batch + 1])
def test_each_iter_begins_an_epoch_of_the_loader_that_the_caller_keeps(make, transform):
    loader = make(range(12), 3, sampler=DistributedSampler(range(12), 2, 0))
    prefetcher = DevicePrefetcher(loader, "cpu", transform=transform)
    assert len(prefetcher) == 2
    for epoch in (0, 5):
        loader.sampler.set_epoch(epoch)
        plain = [batch.tolist() for batch in DataLoader(range(12), 3, sampler=loader.sampler)]
        assert [(batch - 1 if transform else batch).tolist() for batch in prefetcher] == plain
    with pytest.raises(TypeError):
        len(DevicePrefetcher(iter([]), "cpu"))


def test_a_state_of_the_loader_counts_what_the_prefetcher_returned():
    loader = PrefetchLoader(range(12), 3)
    ahead = iter(DevicePrefetcher(loader, "cpu", transform=abs))
    next(ahead)
    loader.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in DevicePrefetcher(loader, "cpu")] == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    loader.close()


@pytest.mark.parametrize("drawing", [lambda b: b + torch.rand(1), lambda b: b + random.random()])
def test_a_transform_that_draws_does_so_between_the_steps(drawing):
    def run(batches):
        torch.manual_seed(0)
        random.seed(0)
        return [(batch.tolist(), torch.rand(1).item()) for batch in batches]

    def plain():
        for batch in DataLoader(range(12), 2):
            yield drawing(batch)

    assert run(DevicePrefetcher(PrefetchLoader(range(12), 2), "cpu", transform=drawing)) == run(plain())


class Lane(DeviceTransfer):
    """A transfer whose side stream is pretended, to see what it does ahead."""

    def __init__(self, depth):
        super().__init__("cpu", prefetch_batches=depth)
        self.sent = []

    def stream(self):
        return self

    def send(self, batch):
        self.sent.append(batch)
        return batch, None


def on_lane(source, lane):
    epoch = PrefetchIterator(iter(source))
    epoch.use(lane)
    return epoch


def test_so_many_batches_are_ahead_and_the_state_counts_those_handed_out():
    lane = Lane(3)
    iterator = on_lane(range(20), lane)
    for n in range(20):
        assert next(iterator) == n
        assert iterator.progress.consumed == n + 1
        assert len(lane.sent) <= n + 1 + 3
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    assert lane.sent == list(range(20))


def test_the_last_batch_leaves_no_reference_cycle_behind():
    """A Trainer counts the batches of a loader with a length and never asks for its end."""
    iterator = on_lane(range(4), Lane(3))
    gc.collect()
    gc.disable()
    try:
        assert list(itertools.islice(iterator, 4)) == [0, 1, 2, 3]
        seen = weakref.ref(iterator)
        del iterator
        assert seen() is None
    finally:
        gc.enable()


def test_an_error_comes_at_its_batch():
    def broken():
        yield from range(6)
        raise ValueError("late")

    got = []
    with pytest.raises(ValueError, match="late"):
        got.extend(item for item in on_lane(broken(), Lane(4)) if got.append(item))
    assert got == list(range(6))


@pytest.mark.parametrize("broken", ["send", "receive"])
def test_an_error_on_the_way_to_the_device_comes_at_its_batch_and_later_ones_follow(broken):
    class Fails(Lane):
        def _fail(self, batch, at):
            if batch.tolist() == [6, 7] and broken == at:
                raise ValueError(f"{at} failed")
            return batch

        def send(self, batch):
            return super().send(self._fail(batch, "send"))

        def receive(self, sent):
            return self._fail(sent[0], "receive")

    loader = PrefetchLoader(range(20), 2)
    iterator, seen = iter(loader), []
    iterator.use(Fails(3))
    with pytest.raises(ValueError, match=f"{broken} failed"):
        seen.extend(batch for batch in iterator if seen.append(batch.tolist()))
    assert seen == [[0, 1], [2, 3], [4, 5]]
    assert loader.state_dict()["consumed"] == 4  # as with any batch that raises
    assert [batch.tolist() for batch in iterator] == [[n, n + 1] for n in range(8, 20, 2)]


def test_the_order_of_batches_that_wait_on_the_device_is_still_checked():
    """Up to so many batches are drawn and not used: the digest of the used ones is known all the same."""
    lane = Lane(24)
    lane.transform = abs
    loader = PrefetchLoader(range(200), 2, shuffle=True, prefetch_batches=1, transfer=lane)
    iterator = iter(loader)
    for used in range(1, 60):
        next(iterator)
        assert loader.state_dict()["digest"] is not None, used


def test_an_interrupt_while_a_batch_is_sent_ahead_comes_at_once():
    class Interrupted(Lane):
        def send(self, batch):
            if batch == 5:
                raise KeyboardInterrupt
            return super().send(batch)

    iterator, got = on_lane(range(20), Interrupted(3)), []
    with pytest.raises(KeyboardInterrupt):
        got.extend(item for item in iterator if got.append(item))
    assert iterator.progress.consumed == len(got) <= 5
    with pytest.raises(RuntimeError, match="a KeyboardInterrupt stopped it"):
        next(iterator)


def test_batches_that_cannot_move_are_said_once():
    transfer = DeviceTransfer("cpu")
    transfer.device = META
    with pytest.warns(NoEffectWarning, match="Batches of dict hold no tensor and no object with .to, so nothing moves"):
        sent = transfer.send({"a": 1, "b": ["x"]})
    assert transfer.receive(sent) == {"a": 1, "b": ["x"]}
    transfer.send(["x"])  # a second warning would be an error
