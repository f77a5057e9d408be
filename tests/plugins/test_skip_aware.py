"""The number of values that a step copies to the host. ``tests/amp/test_overflow.py`` tests skipped steps."""

import sys
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import ApexAMP
from lightning_turbo._lightning import LRSchedulerConfig
from lightning_turbo.plugins.skip_aware import wrap_scheduler
from tests.trainers import quiet_trainer


class Net(pl.LightningModule):
    def __init__(self, optimizer, scheduler=False):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.make, self.scheduler = optimizer, scheduler

    def training_step(self, batch, index):
        x, y = batch
        h = self.first(x).relu()
        with torch.no_grad():
            self.again(h)  # the cast in this no_grad block must not be reused by the lines below
        return nn.functional.cross_entropy(self.last(self.again(h).relu()), y)

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        if not self.scheduler:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(model, *plugins, **flags):
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 6, generator=g), torch.randint(0, 3, (32,), generator=g))
    trainer = quiet_trainer(max_epochs=1, plugins=list(plugins), **flags)
    trainer.fit(model, DataLoader(data, batch_size=8))
    return trainer


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


class HostReads(TorchDispatchMode):
    """Counts the values that are copied to the host."""

    def __init__(self):
        super().__init__()
        self.host_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.host_reads += 1
        return func(*args, **(kwargs or {}))


class Watching(pl.Callback):
    """Watches everything from a batch's start to its end, from the second batch on."""

    def __init__(self):
        self.mode = HostReads()

    def on_train_batch_start(self, trainer, module, batch, index):
        if index:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index:
            self.mode.__exit__(None, None, None)
        # The cast under no_grad did not remove the gradient.
        assert module.again.weight.grad.any()


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def fused_sgd(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True)


@pytest.mark.parametrize(("level", "make"), [
    ("O1", adamw), ("O2", adamw), ("O3", adamw), ("O1", fused_sgd), ("O2", fused_sgd),
])  # fmt: skip
def test_a_step_of_a_fused_optimizer_copies_no_value_to_the_host(level, make):
    watching, plugin = Watching(), ApexAMP(level, dtype=torch.float16, loss_scale="dynamic")
    trainer = fit(Net(make), plugin, callbacks=[watching], gradient_clip_val=0.5)
    assert trainer.global_step == 4
    assert watching.mode.host_reads == 0


def test_a_scheduler_frequency_counts_only_steps_that_are_not_skipped():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    skipped = []
    scaler = SimpleNamespace(was_skipped=lambda given: given is optimizer and bool(skipped))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = wrap_scheduler(LRSchedulerConfig(scheduler, interval="step", frequency=2), scaler)
    assert config.frequency == 2
    config.frequency = 3
    assert config.frequency == 3
    skipped.append(1)
    assert config.frequency == sys.maxsize


@pytest.mark.parametrize("scheduler", [False, True])
def test_a_step_of_another_optimizer_copies_one_value_to_the_host_as_in_lightning(scheduler):
    """The value is whether the step overflowed. A scheduler that waits for skipped steps copies no second value."""
    watching = Watching()
    fit(Net(sgd, scheduler=scheduler), ApexAMP("O1", dtype=torch.float16), callbacks=[watching])
    assert watching.mode.host_reads == 3
