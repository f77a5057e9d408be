"""Synchronization of the side stream: nothing is read before it is written, or freed while it is read.

A simulated ``torch.cuda`` has a vector clock for each stream (Mattern, 1989). A tensor records the stream and the time
of its creation; reading it on a stream that has not synchronized with that time is an error. Its memory is freed on the
stream that created it, and reusing that memory before synchronizing with its readers is an error.
"""

import contextlib
import itertools
import time
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_turbo._pytree import move_batch
from lightning_turbo.data import DevicePrefetcher, DeviceTransfer, PrefetchLoader
from lightning_turbo.data.loading import device
from tests.data.samples import Lazy, seeded

pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
]

DEVICE = torch.device("cuda", 0)


class Stream:
    def __init__(self, device=None):
        self.clock = Counter()

    def now(self):
        self.clock[self] += 1
        return self.clock[self]

    def record_event(self):
        self.now()
        return self.clock.copy()

    def wait_event(self, event):
        self.clock |= event

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Cuda:
    """What the module under test asks of torch.cuda, and the faults that were seen."""

    def __init__(self):
        self.stream = self.main = Stream()
        self.side = []
        self.faults = []
        self.free = []  # of each piece of memory that was given back, its home and who read it when

    def new(self, device):
        self.side.append(Stream())
        return self.side[-1]

    @contextlib.contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        yield
        self.stream = before


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    OnDevice.cuda = made
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "Stream": made.new,
        "stream": made.on, "current_stream": lambda device=None: made.stream,
        "get_rng_state": lambda device: torch.zeros(1),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    device._side_stream.cache_clear()
    yield made
    device._side_stream.cache_clear()


class OnDevice(torch.Tensor):
    """A tensor of the device. Its values are on the host; its history is what is looked at."""

    cuda = None
    is_cuda = True
    device = DEVICE

    @classmethod
    def make(cls, values):
        self = values.as_subclass(cls)
        self.stream = cls.cuda.stream
        self.time, self.readers = self.stream.now(), {}
        for home, readers in cls.cuda.free:
            if home is self.stream and any(home.clock[reader] < time for reader, time in readers.items()):
                cls.cuda.faults.append("taken while a stream may read it")
        cls.cuda.free = [(home, readers) for home, readers in cls.cuda.free if home is not self.stream]
        return self

    def to(self, device, non_blocking=False):
        return self

    def read(self):
        """A kernel on the current stream that reads this tensor."""
        reader = self.cuda.stream
        if reader.clock[self.stream] < self.time:
            self.cuda.faults.append("read before it was written")
        self.readers[reader] = reader.now()
        return self.as_subclass(torch.Tensor)

    def __del__(self):
        if readers := getattr(self, "readers", {}):
            self.cuda.free.append((self.stream, readers))


class OnHost(torch.Tensor):
    pinned = False

    def is_pinned(self):
        return self.pinned

    def pin_memory(self):
        twin = self.clone().as_subclass(OnHost)
        twin.pinned = True
        return twin

    def to(self, device, non_blocking=False):
        assert self.pinned, "only copies from pinned memory run beside the step"
        assert non_blocking
        return OnDevice.make(self.as_subclass(torch.Tensor).clone())


def host(count=6):
    return [torch.full((4,), float(n)).as_subclass(OnHost) for n in range(count)]


class Born:
    """A loader that makes its batches on the device."""

    def __iter__(self):
        return (OnDevice.make(torch.full((4,), float(n))) for n in range(6))


def double(batch):
    return OnDevice.make(batch.read() * 2)


def noisy(batch):
    return OnDevice.make(batch.read() * 2 + 0 * torch.rand(1))


class Hidden:
    """A tensor inside an object that knows how to move."""

    __slots__ = ("inner",)

    def __init__(self, tensor):
        self.inner = [tensor]

    def pin_memory(self):
        return type(self)(self.tensor().pin_memory())

    def to(self, device, non_blocking=False):
        return type(self)(self.tensor().to(device, non_blocking))

    def tensor(self):
        return self.inner[0]

    def read(self):
        return self.tensor().read()


class Graph(Hidden):
    """Keeps its tensor where Python does not see it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = lambda: tensor


def hidden():
    return [Hidden(batch) for batch in host()]


def graphs():
    return [Graph(batch) for batch in host()]


CASES = [*itertools.product([host, hidden, Born], [None, double, noisy], [0, 1 << 20]), (graphs, None, 0)]


@pytest.mark.parametrize(("loader", "transform", "min_bytes"), CASES)
def test_streams_wait_for_one_another_and_memory_for_both(cuda, loader, transform, min_bytes):
    prefetcher = DevicePrefetcher(loader(), DEVICE, min_bytes=min_bytes, transform=transform)
    for _ in range(2):
        got = []
        for batch in prefetcher:
            got.append(batch.read().tolist()[0])
            del batch
        assert got == [n * (1.0 if transform is None else 2.0) for n in range(6)]
    assert cuda.faults == []
    assert len(cuda.side) == 1


@pytest.mark.parametrize("step", [1, 3])
def test_a_batch_may_be_used_again_and_let_go_of_steps_later(cuda, step):
    """Whatever is read, and let go of, between two batches, is over before memory is taken for another."""
    kept = []
    for batch in DevicePrefetcher(host(20), DEVICE, min_bytes=0, prefetch_batches=step):
        kept.append(batch)
        del batch
        kept[0].read()
        del kept[: len(kept) - step]
    assert cuda.faults == []


class Hasty(DeviceTransfer):
    """Waits for nothing."""

    def receive(self, sent):
        return sent[0]

    def send(self, batch):
        with torch.cuda.stream(self.stream()):
            return move_batch(batch, self.device), None


def test_what_is_looked_for_is_found(cuda):
    """Without the waits both faults are seen."""
    prefetcher = DevicePrefetcher(host(), DEVICE, min_bytes=0)
    prefetcher.transfer = Hasty(DEVICE, min_bytes=0)
    for batch in prefetcher:
        batch.read()
        del batch
    assert set(cuda.faults) == {"read before it was written", "taken while a stream may read it"}


def on_host(items):
    return torch.tensor(items, dtype=torch.float32).as_subclass(OnHost)


SAMPLERS = {
    "shuffled": lambda: {"shuffle": True, "generator": seeded(3)},
    "one by one": lambda: {"sampler": Lazy(21)},
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("sampler", "used"), [("shuffled", 5), ("shuffled", 7), ("one by one", 7)])
@pytest.mark.parametrize("make", [DataLoader, PrefetchLoader])
def test_the_orders_of_epochs_are_those_of_a_plain_loader(cuda, make, sampler, used, kept):
    """Broken off after 5 of 7 batches, or not asked for their end, as by a Trainer."""
    plain = DataLoader(range(21), batch_size=3, **SAMPLERS[sampler]())
    loader = make(range(21), batch_size=3, collate_fn=on_host, **SAMPLERS[sampler]())
    prefetcher = DevicePrefetcher(loader, DEVICE, min_bytes=0)
    iterators = []
    for _ in range(3):
        ours, theirs = iter(prefetcher), iter(plain)
        for _ in range(used):
            assert next(ours).read().tolist() == next(theirs).tolist()
            time.sleep(0.005)
        iterators += [ours] * kept
        del ours
    prefetcher.loader.close()
    assert cuda.faults == []


def test_a_loader_that_copies_by_itself_keeps_its_transfer(cuda):
    own = DeviceTransfer(DEVICE, min_bytes=0, transform=double)
    loader = PrefetchLoader(range(6), batch_size=3, collate_fn=on_host, transfer=own)
    for _ in range(2):
        got = [batch.read().tolist() for batch in DevicePrefetcher(loader, DEVICE)]
        assert got == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    loader.close()
    assert cuda.faults == []


def test_all_loaders_of_a_device_share_one_side_stream(cuda):
    """As with a reload in each epoch, a loader for validation, and a plain loop beside them."""
    for _ in range(3):
        transfer = DeviceTransfer(DEVICE, min_bytes=0)
        for _ in range(2):
            with_transfer = PrefetchLoader(range(6), batch_size=3, collate_fn=on_host, transfer=transfer)
            assert [batch.read().tolist() for batch in with_transfer] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
            with_transfer.close()
        assert len([batch.read() for batch in DevicePrefetcher(host(), DEVICE, min_bytes=0)]) == 6
    assert len(cuda.side) == 1
    assert cuda.faults == []
