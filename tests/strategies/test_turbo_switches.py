"""Global settings of torch that the turbo strategies set on CUDA and restore. The tests need no device."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from lightning_turbo import DALILoader, PrefetchLoader, TurboStrategy
from lightning_turbo._trainer import hooks_before_transfer
from lightning_turbo.data import DeviceTransfer
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.strategies import turbo as module


class FakeTrainer:  # of which a loader keeps a weak reference
    datamodule = None


def on_cuda(module=None, **settings):
    """Return a strategy that reports a CUDA device, with this module or one that overrides no hooks."""
    strategy = TurboStrategy(**settings)
    strategy._root_device = torch.device("cuda", 0)
    strategy._lightning_module = LightningModule() if module is None else module
    strategy._lightning_module.trainer = FakeTrainer()
    return strategy


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(module, "rank_zero_info", lines.append)
    return lines


def in_the_run(read=lambda: torch.backends.cudnn.benchmark, **settings):
    """Return a value that is read during a run on CUDA."""
    strategy = on_cuda(**settings)
    strategy._set_switches()
    try:
        return read()
    finally:
        strategy._cleanup.close()


@pytest.mark.parametrize("how", ["algorithms", "warn", "cudnn"])
def test_a_deterministic_run_does_not_enable_cudnn_benchmark(how, said, monkeypatch):
    assert in_the_run() is True
    assert said == []
    if how == "cudnn":
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    else:
        torch.use_deterministic_algorithms(True, warn_only=how == "warn")
    try:
        assert in_the_run() is False
        torch.backends.cudnn.benchmark = True  # as Trainer(deterministic=True, benchmark=True) leaves it
        assert in_the_run() is True
        assert in_the_run(cudnn_benchmark=False) is False
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
    assert said == ["turbo: cudnn_benchmark is off in a deterministic run."] * 2


def test_the_float32_matmul_precision_is_restored():
    torch.set_float32_matmul_precision("medium")
    try:
        assert in_the_run(torch.get_float32_matmul_precision) == "medium"
        assert in_the_run(torch.get_float32_matmul_precision, matmul_precision="high") == "high"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.fixture
def float32_precision():
    """Restores torch's older and newer settings."""
    newer = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends]
    before = [each.fp32_precision for each in newer]
    yield torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")
    for each, value in zip(newer, before, strict=True):
        each.fp32_precision = value


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 has the newer settings")
@pytest.mark.parametrize("asked", ["highest", "high", "medium"])
@pytest.mark.parametrize("older", [None, "medium"])
@pytest.mark.parametrize("newer", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("general", ["none", "tf32", "ieee"])
def test_float32_matmul_precision_is_restored_with_the_newer_settings(asked, older, newer, general, float32_precision):
    if older is not None:
        torch.set_float32_matmul_precision(older)
    torch.backends.fp32_precision = general
    float32_precision.fp32_precision = newer

    def read():
        owners = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends
        return [owner.fp32_precision for owner in owners]

    before = read()
    inside = in_the_run(read, matmul_precision=asked)
    assert inside[0] == ("ieee" if asked == "highest" else "tf32")
    assert read() == before
    if newer == "none":  # it still inherits the setting for all backends
        torch.backends.fp32_precision = "ieee"
        assert read()[0] == "ieee"


def test_cudnn_benchmark_is_not_changed_without_a_request():
    for before in (False, True):
        torch.backends.cudnn.benchmark = before
        assert in_the_run(cudnn_benchmark=None) is before
    torch.backends.cudnn.benchmark = False


def test_a_loader_copies_to_the_device_ahead_only_during_a_run(monkeypatch):
    asked, transfer = [], DeviceTransfer(torch.device("cpu"))
    monkeypatch.setattr(module, "DeviceTransfer", lambda device: asked.append(device) or transfer)
    strategy = on_cuda()
    prefetching = strategy.process_dataloader(DataLoader(torch.arange(8), 2))
    assert type(prefetching) is PrefetchLoader
    assert prefetching.transfer is transfer
    assert asked == [torch.device("cuda", 0)]
    strategy._cleanup.close()
    assert prefetching.transfer is None


@pytest.mark.parametrize("alive", [True, False])
def test_the_users_device_transfer_is_kept_during_and_after_a_run(alive):
    loader, transfer = PrefetchLoader(torch.arange(8), 2), DeviceTransfer(torch.device("cpu"))
    loader.transfer = transfer
    strategy = on_cuda()
    assert strategy.process_dataloader(loader) is loader
    assert loader.transfer is transfer
    gone = weakref.ref(loader)
    if not alive:
        del loader
        gc.collect()
    assert (gone() is not None) is alive
    strategy._cleanup.close()
    assert not alive or loader.transfer is transfer


def test_iterables_that_are_not_dataloaders_warn_and_are_not_wrapped(said):
    batches = [torch.ones(2)]
    assert on_cuda().process_dataloader(batches) is batches
    assert said == ["turbo: device_prefetch has no effect on a list, which is not a DataLoader."]


def test_on_before_batch_transfer_disables_copies_ahead():
    class Overrides(LightningModule):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch

    strategy, loader = on_cuda(Overrides()), DataLoader(torch.arange(8), 2)
    with pytest.warns(NoEffectWarning, match=r"device_prefetch is off, because Overrides\.on_before_batch_transfer is"):
        assert strategy.process_dataloader(loader) is loader


def test_dali_s_loaders_are_not_wrapped():
    loader = DALILoader.__new__(DALILoader)  # DALI need not be installed
    assert on_cuda().process_dataloader(loader) is loader


def test_transfer_hooks_set_on_an_object_see_batches_before_the_copy():
    class Overrides(LightningModule):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch

    assert hooks_before_transfer(LightningModule(), None) == []
    data, network = LightningDataModule(), Overrides()
    network.trainer = SimpleNamespace(datamodule=data)
    network.transfer_batch_to_device = data.transfer_batch_to_device = print
    assert hooks_before_transfer(network, data) == [
        "Overrides.on_before_batch_transfer", "Overrides.transfer_batch_to_device",
        "LightningDataModule.transfer_batch_to_device",
    ]  # fmt: skip
