"""DevicePrefetcher and PrefetchDataModule on a CUDA device."""

import functools
import gc
import itertools
import multiprocessing
import time
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_turbo import DevicePrefetcher, PrefetchDataModule, PrefetchLoader
from lightning_turbo._lightning import Callback, LightningDataModule, LightningModule
from lightning_turbo.data import DeviceTransfer
from tests.trainers import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(170)]

DEVICE = "cuda:0"


class Numbered(torch.utils.data.Dataset):
    """Samples of 256 KiB, each filled with its index."""

    def __init__(self, length=64, size=65536):
        self.length, self.size = length, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((self.size,), float(index)), index


def busy(matrix, times):
    """Queue work on the current stream."""
    for _ in range(times):
        matrix = matrix @ matrix
        matrix = matrix / matrix.norm()
    return matrix


@pytest.mark.parametrize("min_bytes", [0, 1 << 40])
@pytest.mark.parametrize(("make", "workers"), [
    (DataLoader, 2),
    (PrefetchLoader, 0),
    (functools.partial(PrefetchLoader, threads=3), 0),
])  # fmt: skip
def test_no_batch_is_read_too_early_or_overwritten(make, workers, min_bytes):
    """The device lags behind the host, so that missing synchronization or early reuse of memory is detected."""
    loader = make(Numbered(), batch_size=8, num_workers=workers)
    matrix = torch.rand(2048, 2048, device=DEVICE)
    sums = []
    for data, index in DevicePrefetcher(loader, DEVICE, min_bytes=min_bytes, prefetch_batches=3):
        matrix = busy(matrix, 5)
        assert data.device == torch.device(DEVICE)
        sums.append((data.double().mean(1), index))
        del data, index
        torch.empty(8, 65536, device=DEVICE).fill_(-1)  # reuses the memory of a batch that was freed too early
    got = [(mean.tolist(), index.tolist()) for mean, index in sums]
    assert got == [([float(n) for n in range(k, k + 8)], list(range(k, k + 8))) for k in range(0, 64, 8)]


class Graph:
    """A custom batch class, like that of torch_geometric."""

    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device):
        return Graph(self.nodes.to(device))


def test_objects_are_copied_ahead_whatever_their_size():
    transfer = DeviceTransfer(DEVICE)
    for batch, is_ahead in (
        (torch.ones(4), False),
        (Graph(torch.ones(4)), True),
        ({"a": Graph(torch.ones(4)), "b": torch.ones(4)}, True),
        (torch.ones(1 << 20), True),
        (torch.ones(1 << 20, device=DEVICE), False),
    ):
        moved, event = transfer.send(batch)
        assert (event is not None) == is_ahead
        received = transfer.receive((moved, event))
        for part in received.values() if isinstance(batch, dict) else [received]:
            assert getattr(part, "nodes", part).is_cuda


def test_what_a_transform_keeps_is_ready_for_batches_of_other_sizes():
    class Count:
        def __init__(self):
            self.seen = torch.zeros(1 << 22, device=DEVICE)

        def __call__(self, batch):
            for _ in range(50):
                self.seen.add_(1)
            return batch + self.seen[0]

    batches = [torch.zeros(size) for size in (4, 1 << 18, 1 << 18, 4, 4, 1 << 18, 4)]
    for prefetch_batches in (1, 3):
        prefetcher = DevicePrefetcher(batches, DEVICE, transform=Count(), prefetch_batches=prefetch_batches)
        firsts = [batch[0].clone() for batch in prefetcher]
        assert [first.item() for first in firsts] == [50.0 * n for n in range(1, 8)]


def test_memory_is_steady_over_20_epochs():
    prefetcher = DevicePrefetcher(PrefetchLoader(Numbered(), batch_size=8), DEVICE)
    peaks = []
    for _ in range(20):
        for data, _index in prefetcher:
            data.sum()
        torch.cuda.synchronize()  # memory that the device still reads cannot be reused
        gc.collect()
        peaks.append(torch.cuda.memory_reserved(DEVICE))
    assert peaks[-1] == peaks[3]


@pytest.mark.parametrize("prefetch_batches", [1, 2, 4])
@pytest.mark.parametrize("lets_go", [True, False])
def test_number_of_batches_on_the_device(prefetch_batches, lets_go):
    """While the next batch is requested, a ``for`` loop also holds the previous one, unless its body deletes it."""
    host = [torch.ones(1 << 20) for _ in range(12)]
    matrix = torch.rand(1024, 1024, device=DEVICE)
    busy(matrix, 10)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for batch in DevicePrefetcher(host, DEVICE, prefetch_batches=prefetch_batches):
        torch.sum(batch, 0, out=matrix[0, 0])
        assert (torch.cuda.memory_allocated() - before) / host[0].nbytes <= prefetch_batches + 1
        if lets_go:
            del batch
    assert (torch.cuda.max_memory_allocated() - before) / host[0].nbytes <= prefetch_batches + 2 - lets_go


def test_a_host_that_is_far_ahead_takes_no_more_memory():
    matrix, reserved = torch.rand(2048, 2048, device=DEVICE), []
    for batch in DevicePrefetcher([torch.ones(1 << 20) for _ in range(60)], DEVICE):
        matrix = busy(matrix, 4)
        batch.add_(1)
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[8]


def test_throughput_is_that_of_data_on_the_device():
    """At least 0.95 times that of data on the device, because the copy is shorter than the step."""
    matrix = torch.rand(4096, 4096, device=DEVICE)
    host = [torch.ones(1 << 22).pin_memory() for _ in range(20)]  # 16 MiB per batch
    there = [batch.to(DEVICE) for batch in host]

    def seconds(batches):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for batch in batches:
            busy(matrix, 10)
            batch.sum()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    prefetcher = DevicePrefetcher(host, DEVICE)
    seconds(there), seconds(prefetcher)
    synthetic = min(seconds(there) for _ in range(5))
    ours = min(seconds(prefetcher) for _ in range(5))
    assert synthetic / ours >= 0.95


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_plain_loader_that_is_left_and_resumed_gives_the_orders_that_it_gives_without(workers, kept):
    """Batches that were only prefetched do not count as drawn."""

    def loader():
        generator = torch.Generator().manual_seed(3)
        return DataLoader(Numbered(size=4), batch_size=8, shuffle=True, num_workers=workers, generator=generator)

    def orders(loader, counts):
        found, left = [], []
        for count in counts:
            iterator = iter(loader)  # the previous iterator may still exist
            found.append([index.tolist() for _, index in itertools.islice(iterator, count)])
            left.append(iterator if kept else None)
            del iterator
        return found

    plain, ahead = loader(), DevicePrefetcher(loader(), DEVICE, prefetch_batches=3, min_bytes=0)
    counts = (2, 8, 5, 9, 1, 8)
    assert orders(ahead, counts) == orders(plain, counts)
    plain, ahead = loader(), DevicePrefetcher(loader(), DEVICE, prefetch_batches=3, min_bytes=0)
    iterator = iter(ahead)
    next(iterator), next(iterator), next(iterator)
    again = DevicePrefetcher(loader(), DEVICE, prefetch_batches=3, min_bytes=0)
    again.loader.load_state_dict(ahead.loader.state_dict())
    expected = orders(plain, (5, 4))
    assert orders(again, (2,)) == [expected[0][3:]]
    assert again.loader.state_dict()["consumed"] == 5
    assert orders(again, (4,)) == expected[1:]
    assert again.loader.state_dict()["consumed"] == 4


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(65536, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        assert batch[0].is_cuda
        self.seen.append(batch[1].tolist())
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class Data(PrefetchDataModule):
    def train_dataloader(self):
        return DataLoader(Numbered(), batch_size=8)


def test_the_datamodule_copies_ahead_under_a_trainer():
    class Hooked(Module):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert batch[0].is_cuda
            return batch

    model = Hooked()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(accelerator="gpu", max_epochs=2)
        trainer.fit(model, datamodule=Data())
    assert isinstance(trainer.train_dataloader.transfer, DeviceTransfer)
    assert iter(trainer.train_dataloader).transfer is trainer.train_dataloader.transfer
    trainer.train_dataloader.close()
    assert model.seen == [list(range(k, k + 8)) for k in range(0, 64, 8)] * 2


@pytest.mark.parametrize(("base", "strategy"), [(PrefetchDataModule, "auto"), (LightningDataModule, "turbo")])
def test_the_loaders_of_a_run_share_one_side_stream(base, strategy):
    class Reloaded(base):
        def train_dataloader(self):
            return DataLoader(Numbered(), batch_size=8)

        val_dataloader = train_dataloader

    class Validates(Module):
        def validation_step(self, batch, batch_idx):
            assert batch[0].is_cuda

    class Streams(Callback):
        def __init__(self):
            self.seen = []

        def on_train_epoch_end(self, trainer, module):
            loaders = (trainer.train_dataloader, trainer.val_dataloaders)
            self.seen += [loader.transfer.stream().stream_id for loader in loaders]

    streams = Streams()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(
            accelerator="gpu", devices=1, strategy=strategy, max_epochs=4, reload_dataloaders_every_n_epochs=1,
            callbacks=[streams],
        ).fit(Validates(), datamodule=Reloaded())  # fmt: skip
    assert len(streams.seen) == 8
    assert len(set(streams.seen)) == 1


@pytest.mark.parametrize(("base", "strategy"), [(PrefetchDataModule, "auto"), (LightningDataModule, "turbo")])
def test_worker_processes_end_with_the_loader_that_they_served(base, strategy):
    class Reloaded(base):
        def train_dataloader(self):
            return DataLoader(Numbered(), batch_size=8, num_workers=2, persistent_workers=True, pin_memory=True)

    class Count(Callback):
        def __init__(self):
            self.processes = []

        def on_train_epoch_end(self, trainer, module):
            self.processes.append(len(multiprocessing.active_children()))

    count = Count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(
            accelerator="gpu", strategy=strategy, max_epochs=4, reload_dataloaders_every_n_epochs=1, callbacks=[count]
        ).fit(Module(), datamodule=Reloaded())
    assert count.processes == [2] * 4
