"""What ``Doctor(fix=True)`` mends, and that all of it is undone."""

import time

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset

from lightning_turbo import Doctor
from tests.integration.doctor_runs import QUIET, SHORT, Noisy, trained, trainer

pytestmark = QUIET


class Slow(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        time.sleep(0.005)
        return torch.ones(1, 6, 6), i % 4


class Sick(Noisy):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def train_dataloader(self):
        return DataLoader(Slow(), batch_size=4)


class Settings(Callback):
    """What can be mended, before each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        grads = any(parameter.grad is not None for parameter in pl_module.parameters())
        self.seen.append((torch.is_anomaly_enabled(), trainer.train_dataloader.num_workers, grads))


def test_what_is_safe_is_mended_and_undone(monkeypatch):
    monkeypatch.setattr("lightning_turbo.doctor.inspection.cores", lambda: 2)
    doctor, settings = Doctor(fix=True, **SHORT), Settings()
    torch.manual_seed(7)
    module = Sick()
    each = trainer(settings, doctor, detect_anomaly=True, max_epochs=2)
    each.fit(module)
    mended = {finding.rule: finding.mended for finding in doctor.report.findings if finding.mended}
    assert "off for the rest" in mended["anomaly-mode"]
    assert "num_workers=1 from the next epoch" in mended["workers"]
    assert "gradients-kept" not in mended
    assert settings.seen[5] == (True, 0, True)
    assert settings.seen[8] == (False, 1, True), "the second epoch"
    assert (each.train_dataloader.num_workers, each.train_dataloader.prefetch_factor) == (0, None)
    assert not torch.is_anomaly_enabled()
    assert all(not optimizer._optimizer_step_post_hooks for optimizer in each.optimizers)
    assert each.callbacks == [settings]


def test_a_run_that_ends_before_the_report_is_not_mended():
    doctor = Doctor(fix=True, **SHORT)
    trained(doctor, model=Sick, detect_anomaly=True, limit_train_batches=5)
    assert doctor.report.short
    assert "anomaly-mode" in {finding.rule for finding in doctor.report.findings}
    assert {finding.mended for finding in doctor.report.findings} == {""}


def test_nothing_is_mended_unasked():
    doctor, settings = Doctor(**SHORT), Settings()
    trained(settings, doctor, model=Sick, detect_anomaly=True, max_epochs=2, limit_train_batches=7)
    assert {finding.mended for finding in doctor.report.findings} == {""}
    assert settings.seen[-1] == (True, 0, True)


def test_what_was_mended_is_undone_after_an_error():
    class Fails(Sick):
        def training_step(self, batch, batch_idx):
            if batch_idx == 7:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    doctor = Doctor(fix=True, **SHORT)
    torch.manual_seed(7)
    each = trainer(doctor, detect_anomaly=True, max_epochs=2)
    with pytest.raises(ZeroDivisionError):
        each.fit(Fails())
    assert each.train_dataloader.num_workers == 0
    assert not torch.is_anomaly_enabled()
