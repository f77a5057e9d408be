"""The Doctor on a CUDA device: waits are named, times are the device's, and nothing left behind."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import Doctor
from lightning_turbo._lightning import LightningModule
from tests.trainers import quiet_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*Tensor Cores.*"),
]
SHORT = {"warmup": 2, "timed": 3, "watched": 3}


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(64, 1, 8, 8, generator=generator), torch.randint(0, 4, (64,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=4, pin_memory=True)


class Sick(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.number = loss.item()
        self.picked = batch[0][batch[0] > 0]
        self.there = loss.detach().cpu()
        self.noise = torch.randn(64, 64).cuda()
        self.host = torch.rand(3).sum().item()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.log("loss", loss, prog_bar=True)
        return loss


def trained(model, doctor=None, **more):
    torch.manual_seed(0)
    module = model()
    quiet_trainer(max_epochs=1, accelerator="gpu", callbacks=[doctor] if doctor else [], **more).fit(module)
    return module


def test_waits_are_named():
    doctor = Doctor(**SHORT)
    trained(Sick, doctor)
    calls = {call.name: call for call in doctor.report.facts.calls}
    for name in (".item()", "tensor[mask]", ".cpu()"):
        assert calls[name].count == 3, f"{name}: what is on the host anyway does not count"
        assert calls[name].seconds > 0
    found = {(finding.rule, finding.level) for finding in doctor.report.findings}
    assert ("float32" in {rule for rule, _ in found}) == (torch.cuda.get_device_capability() >= (7, 0))
    assert ("host-sync", "warning") in found
    assert ("progress-bar-sync", "info") in found
    assert ("made-on-host", "warning") in found
    assert [f.what for f in doctor.report.findings if f.rule == "housekeeping"] != []


def test_a_clean_step_has_no_wait():
    doctor = Doctor(**SHORT)
    trained(Model, doctor)
    assert [call for call in doctor.report.facts.calls if call.kind == "sync"] == []
    assert "host-sync" not in {finding.rule for finding in doctor.report.findings}


def test_the_time_line_is_the_devices():
    class Heavy(Model):
        def training_step(self, batch, batch_idx):
            wide = torch.ones(4096, 4096, device=self.device)
            for _ in range(20):
                wide = wide @ wide * 0
            return super().training_step(batch, batch_idx) + wide.sum()

    doctor = Doctor(**SHORT)
    trained(Heavy, doctor)
    phases = doctor.report.facts.phases
    # Queued in microseconds, computed in milliseconds: only events on the device see where the time goes.
    assert phases["forward"] > 0.5 * sum(phases.values())
