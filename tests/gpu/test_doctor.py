"""The Doctor on a CUDA device: it names synchronizations, measures device time, and restores settings."""

import warnings
from pathlib import Path

import numpy as np
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


class Uploads(Model):
    """Copies small values to the device in each step. The comments are the names that the Doctor reports."""

    def training_step(self, batch, batch_idx):
        x, device = batch[0], self.device
        torch.tensor([1.0, 2.0], device=device)  # torch.tensor(..., device=...)
        torch.tensor(0.5, device=device)  # torch.tensor(..., device=...)
        torch.as_tensor([1.0, 2.0], device=device)  # torch.as_tensor(..., device=...)
        x.new_tensor([1.0])  # .new_tensor(...)
        x[[0, 2]]  # a list as an index
        torch.zeros(3).to(device)  # .to(...)
        x.new_zeros(3).copy_(torch.zeros(3))  # .copy_(...)
        torch.tensor(np.ones(3))  # torch.tensor(array)
        return super().training_step(batch, batch_idx)


class Harmless(Model):
    """Creates tensors on the device, and copies from pinned memory asynchronously."""

    def training_step(self, batch, batch_idx):
        x = batch[0]
        torch.full((2,), 0.5, device=self.device)
        torch.zeros(3).pin_memory().to(self.device, non_blocking=True)
        torch.as_tensor(np.ones(3))
        torch.where(x > 0, x, 0.0).masked_fill(x > 1, 1.0)[x.long().flatten()[:2].clamp(0, 1)]
        return super().training_step(batch, batch_idx)


class Grouped(Model):
    """Synchronizes in a hook of the backward pass."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda grad: grad if grad.item() else None)
        return loss


def trained(model, doctor=None, **more):
    torch.manual_seed(0)
    module = model()
    quiet_trainer(max_epochs=1, accelerator="gpu", callbacks=[doctor] if doctor else [], **more).fit(module)
    return module


def test_waits_are_named():
    doctor = Doctor(**SHORT)
    trained(Sick, doctor)
    calls = {call.name: call for call in doctor.report.facts.seen.calls}
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
    assert [call for call in doctor.report.facts.seen.calls if call.kind == "sync"] == []
    assert "host-sync" not in {finding.rule for finding in doctor.report.findings}


def lines_of(doctor, kinds):
    """Return the lines of this file that were reported, with the reported names."""
    source = Path(__file__).read_text().splitlines()
    calls = [call for call in doctor.report.facts.seen.calls if call.kind in kinds]
    return [(source[call.site.line - 1].partition("#")[2].strip(), call.name) for call in calls]


def test_what_is_copied_to_the_device_is_named_at_its_line():
    doctor = Doctor(**SHORT)
    trained(Uploads, doctor)
    source = Path(__file__).read_text()
    body = source[source.index("class Uploads") : source.index("class Harmless")]
    expected = [line.partition("# ")[2] for line in body.splitlines() if "# " in line]
    named = lines_of(doctor, {"moved", "copied"})
    assert sorted(named) == sorted((name, name) for name in expected)
    assert {call.count for call in doctor.report.facts.seen.calls} == {3}
    found = {finding.rule: finding.level for finding in doctor.report.findings}
    assert found["made-on-host"] == "warning"
    assert "host-sync" not in found


def test_asynchronous_operations_are_not_named():
    doctor = Doctor(**SHORT)
    trained(Harmless, doctor)
    assert doctor.report.facts.seen.calls == ()


def test_a_wait_in_a_hook_of_the_backward_pass_is_named():
    doctor = Doctor(**SHORT)
    trained(Grouped, doctor)
    (call,) = doctor.report.facts.seen.calls
    assert (call.kind, call.count, Path(call.site.file).name) == ("sync", 3, Path(__file__).name)


@pytest.mark.parametrize("mode", ["default", "warn"])
def test_the_mode_and_the_filters_are_restored(mode):
    class Fails(Sick):
        def training_step(self, batch, batch_idx):
            if batch_idx == 6:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
        before = torch.cuda.get_sync_debug_mode(), warnings.showwarning, list(warnings.filters)
        try:
            trained(Sick, Doctor(**SHORT))
            with pytest.raises(ZeroDivisionError):
                trained(Fails, Doctor(**SHORT))
            after = torch.cuda.get_sync_debug_mode(), warnings.showwarning, list(warnings.filters)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert after == before


def test_a_compiled_model_is_watched_for_waits():
    class Compiled(Sick):
        def configure_model(self):
            self.net.compile(backend="eager")

    doctor = Doctor(**SHORT)
    try:
        trained(Compiled, doctor)
    finally:
        torch._dynamo.reset()
    assert "the model is compiled" in "".join(doctor.report.facts.notes)
    source = Path(__file__).read_text().splitlines()
    lines = {source[call.site.line - 1].strip() for call in doctor.report.facts.seen.calls if call.kind == "sync"}
    assert "self.number = loss.item()" in lines


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
    # Kernels are queued in microseconds and run for milliseconds, so only events on the device measure the time.
    assert phases["forward"] > 0.5 * sum(phases.values())
