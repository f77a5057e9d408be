"""The process's switches that the turbo strategies set on CUDA, and put back. No device is needed for them."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_turbo import DALILoader, TurboStrategy
from lightning_turbo._trainer import hooks_before_transfer
from lightning_turbo.strategies import turbo as module


class FakeTrainer:  # of which a loader keeps a weak reference
    datamodule = None


def on_cuda(**settings):
    """A strategy that takes itself to be on a CUDA device."""
    strategy = TurboStrategy(**settings)
    strategy._root_device = torch.device("cuda", 0)
    strategy._lightning_module = SimpleNamespace(trainer=FakeTrainer())
    return strategy


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(module, "rank_zero_info", lines.append)
    return lines


def in_the_run(read=lambda: torch.backends.cudnn.benchmark, **settings):
    """What is read during a run on CUDA."""
    strategy = on_cuda(**settings)
    strategy._set_switches()
    try:
        return read()
    finally:
        strategy._cleanup.close()


@pytest.mark.parametrize("how", ["algorithms", "warn", "cudnn"])
def test_a_deterministic_run_chooses_no_algorithm_by_the_clock(how, said, monkeypatch):
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


def test_the_precision_of_matrix_products_is_put_back():
    torch.set_float32_matmul_precision("medium")
    try:
        assert in_the_run(torch.get_float32_matmul_precision) == "medium"
        assert in_the_run(torch.get_float32_matmul_precision, matmul_precision="high") == "high"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.fixture
def float32_precision():
    """Puts torch's older and newer settings back."""
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
def test_it_is_put_back_beside_the_newer_settings(asked, older, newer, general, float32_precision):
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
    if newer == "none":  # it still follows the setting for all backends
        torch.backends.fp32_precision = "ieee"
        assert read()[0] == "ieee"


def test_dali_s_loaders_are_not_wrapped():
    loader = DALILoader.__new__(DALILoader)  # DALI need not be there
    assert on_cuda().process_dataloader(loader) is loader


def test_hooks_on_an_object_see_batches_before_their_copy_as_those_of_a_class_do():
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
