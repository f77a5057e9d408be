"""Steps that are right where a stock Trainer's are not: schedulers, fused optimizers, casts, host reads."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import ApexAMP
from lightning_turbo.amp.autocast import cache_survives_no_grad
from tests.trainers import quiet_trainer


class Net(pl.LightningModule):
    def __init__(self, optimizer, poison=(), scheduler=False, uses=1):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.make, self.poison, self.scheduler, self.uses = optimizer, poison, scheduler, uses
        self.rates = []

    def training_step(self, batch, index):
        x, y = batch
        h = self.first(x).relu()
        with torch.no_grad():
            self.again(h)  # the cast made here must not be the one that the lines below differentiate
        for _ in range(self.uses):
            h = self.again(h).relu()
        loss = nn.functional.cross_entropy(self.last(h), y)
        return loss * 1e38 * 10 if index in self.poison else loss

    def on_train_batch_end(self, *_):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

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


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_skipped_step_does_not_step_a_per_step_scheduler(level, fused):
    # The very first step overflows: torch would warn of a scheduler that steps before its optimizer.
    model = Net(lambda ps: torch.optim.SGD(ps, lr=1.0, fused=fused), poison=[0, 2], scheduler=True)
    fit(model, ApexAMP(level, dtype=torch.float16))
    assert model.rates == [1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fused_optimizers_with_clipping_equal_plain_ones(level, half):
    ends, poison = [], [1] if half is torch.float16 else []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Net(lambda ps, fused=fused: torch.optim.AdamW(ps, lr=1e-2, fused=fused), poison)
        trainer = fit(model, ApexAMP(level, dtype=half), gradient_clip_val=0.1)
        assert {float(s["step"]) for s in trainer.optimizers[0].state.values()} == {4.0 - len(poison)}
        ends.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


class TwoLosses(Net):
    """Two passes a step with a scale each; the second overflows in the first step. Nothing is learned."""

    def __init__(self):
        super().__init__(lambda ps: torch.optim.SGD(ps, lr=0.0))
        self.automatic_optimization = False
        self.seen = []

    def training_step(self, batch, index):
        for loss_id in (0, 1):
            self.poison = [0] * loss_id
            self.manual_backward(super().training_step(batch, index), loss_id=loss_id)
            self.seen.append(self.last.weight.grad.clone())
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_loss_is_scaled_and_unscaled_by_its_own_scale(level):
    plugin = ApexAMP(level, dtype=torch.float16, num_losses=2)
    fit(model := TwoLosses(), plugin)
    scales = [plugin.state_dict()[f"loss_scaler{n}"]["loss_scale"] for n in (0, 1)]
    assert scales[0] == 2 * scales[1]
    torch.testing.assert_close(model.seen[4], model.seen[5], rtol=1e-2, atol=1e-6)


class Watch(TorchDispatchMode):
    """Counts the operations that matter."""

    def __init__(self):
        super().__init__()
        self.host_reads = 0
        self.weight_casts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.host_reads += 1
        if func is torch.ops.aten._to_copy.default and args[0].shape == (8, 8) and args[0].is_leaf:
            self.weight_casts += args[0].requires_grad
        return func(*args, **(kwargs or {}))


class Watching(pl.Callback):
    """Watches everything from a batch's start to its end, from the second batch on."""

    def __init__(self, learns=True):
        self.mode, self.learns = Watch(), learns

    def on_train_batch_start(self, trainer, module, batch, index):
        if index:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index:
            self.mode.__exit__(None, None, None)
        # The cast under no_grad has not taken the gradient away.
        assert not self.learns or module.again.weight.grad.any()


@pytest.mark.parametrize("make", [
    lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
], ids=["adamw", "sgd"])  # fmt: skip
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_step_of_a_fused_optimizer_takes_no_value_to_the_host(level, make):
    watching, plugin = Watching(), ApexAMP(level, dtype=torch.float16, loss_scale="dynamic")
    trainer = fit(Net(make), plugin, callbacks=[watching], gradient_clip_val=0.5)
    assert trainer.global_step == 4
    assert watching.mode.host_reads == 0


def test_the_count_of_host_reads_sees_one():
    """The counter itself works: a plain optimizer's step reads the overflow flag, once a step."""
    watching = Watching()
    fit(Net(sgd), ApexAMP("O1", dtype=torch.float16), callbacks=[watching])
    assert watching.mode.host_reads == 3


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_with_a_cache_weights_are_cast_once_a_step_where_stock_mixed_precision_casts_at_every_use(half):
    # Lightning 2.5.0 trusts the cache as it is: the cast in the no_grad block serves all four, and the weight learns
    # nothing.
    cached = pl.plugins.MixedPrecision("bf16-mixed", "cpu").autocast_context_manager()._cache_enabled
    ours, stock = Watching(), Watching(learns=not cached or cache_survives_no_grad())
    fit(Net(sgd, uses=3), ApexAMP("O1", dtype=half, cast_cache=True), callbacks=[ours])
    fit(Net(sgd, uses=3), callbacks=[stock], precision="bf16-mixed")
    steps = 3
    # One cast in the no_grad block and one for the three uses, where torch's cache may be trusted.
    assert ours.mode.weight_casts <= (2 if cache_survives_no_grad() else 4) * steps
    assert stock.mode.weight_casts == (1 if cached else 4) * steps
