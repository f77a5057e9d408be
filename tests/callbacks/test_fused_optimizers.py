"""Optimizers that the callback makes fused equal optimizers that are constructed with ``fused=True``."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_turbo import FusedOptimizers
from lightning_turbo.callbacks.fused_optimizers import can_fuse, fuse
from lightning_turbo.errors import NoEffectWarning, TurboWarning
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")


class Module(LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 2)
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.net.parameters())

    def train_dataloader(self):
        torch.manual_seed(1)
        return DataLoader(torch.arange(32.0).reshape(8, 4), 2, shuffle=True)


def adam(parameters, **options):
    return torch.optim.Adam(parameters, lr=0.1, **options)


def fit(module, *callbacks, times=1):
    trainer = quiet_trainer(max_epochs=2, callbacks=list(callbacks))
    for _ in range(times):
        trainer.fit(module)
    return module


@pytest.mark.parametrize("times", [1, 2])
def test_a_fused_step_equals_that_of_the_fused_constructor(times):
    made = fit(Module(adam), FusedOptimizers(), times=times)
    asked = fit(Module(lambda parameters: adam(parameters, fused=True)), times=times)
    assert torch.equal(made.net.weight, asked.net.weight)


@pytest.mark.parametrize("make", [
    adam, torch.optim.AdamW, lambda parameters, **options: torch.optim.SGD(parameters, 0.1, momentum=0.9, **options),
    lambda parameters, **options: torch.optim.Adagrad(parameters, 0.1, **options),
], ids=["Adam", "AdamW", "SGD", "Adagrad"])  # fmt: skip
def test_a_fused_optimizer_keeps_its_state(make):
    """As after loading a checkpoint."""
    ends = []
    for options in ({}, {"fused": True}):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4))
        optimizer = make([weight], **options)
        for number in range(4):
            if number == 2 and can_fuse(optimizer):
                fuse(optimizer)
            weight.grad = weight.detach() * (number + 1)
            optimizer.step()
        assert optimizer.param_groups[0]["fused"] is True
        ends.append(weight.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-7)


def test_an_optimizer_that_cannot_be_fused_warns():
    with pytest.warns(NoEffectWarning, match="no optimizer is torch's Adam, AdamW, SGD or Adagrad with"):
        fit(Module(torch.optim.RMSprop), FusedOptimizers())


class Complex(Module):
    """Has a complex parameter in the optimizer, for which torch has no fused step."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.net.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def training_step(self, batch, batch_idx):
        return (self.net(batch) * self.net.phase).abs().square().mean()


def test_an_optimizer_with_complex_parameters_is_not_fused():
    plain = fit(Complex(adam))
    with pytest.warns(NoEffectWarning, match="torch.s Adam, .*with real parameters"):
        asked = fit(Complex(adam), FusedOptimizers())
    assert torch.equal(plain.net.phase, asked.net.phase)


class Sparse(Module):
    """Has an embedding with sparse gradients, for which torch has no fused step."""

    def __init__(self, groups):
        super().__init__(None)
        self.table = torch.nn.Embedding(8, 4, sparse=True)
        self.groups = groups

    def training_step(self, batch, batch_idx):
        return self.net(self.table(batch.long()[:, 0] % 8)).square().mean()

    def configure_optimizers(self):
        embedding, others = list(self.table.parameters()), list(self.net.parameters())
        groups = [embedding, others] if self.groups == 2 else [embedding + others]
        return torch.optim.SGD([{"params": each} for each in groups], lr=0.1)


@pytest.mark.parametrize(("groups", "fused"), [(1, [None]), (2, [None, True])])
def test_a_group_with_sparse_gradients_keeps_its_step(groups, fused):
    plain = fit(Sparse(groups))
    with pytest.warns(TurboWarning, match=r"leaves the parameter groups \[0\] of SGD as they are.*group of their own"):
        asked = fit(Sparse(groups), FusedOptimizers())
    assert [group["fused"] for group in asked.optimizers().param_groups] == fused
    torch.testing.assert_close(asked.table.weight, plain.table.weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(asked.net.weight, plain.net.weight, rtol=1e-6, atol=1e-7)


def test_an_optimizer_without_a_fused_step_on_its_device_is_not_fused(monkeypatch):
    """As Adagrad on CUDA before torch 2.10: torch raises an error in the step."""

    def step(self, closure=None):
        raise RuntimeError("`fused=True` requires all the params to be floating point Tensors of supported devices")

    class OnOthers(torch.optim.Adagrad):
        pass

    OnOthers.step = step
    monkeypatch.setattr("lightning_turbo.callbacks.fused_optimizers.FUSED", (OnOthers,))
    assert not can_fuse(OnOthers([torch.nn.Parameter(torch.ones(2))]))
