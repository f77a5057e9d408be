"""The copies ahead of the turbo strategies on CUDA. The tests need no device."""

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
