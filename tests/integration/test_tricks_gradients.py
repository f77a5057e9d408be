"""GradToNone under a real Trainer: the same numbers, and memory that is free during the forward pass."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_turbo import ApexAMP, GradToNone
from lightning_turbo.callbacks import grad_to_none
from lightning_turbo.errors import NoEffectWarning
from tests.trainers import quiet_trainer


class Net(LightningModule):
    """Records before each forward pass which parameters hold a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Parameter(torch.ones(1))
        self.held = []

    def look(self):
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        self.held.append(any(p.grad is not None for group in groups for p in group["params"]))

    def training_step(self, batch, batch_idx):
        self.look()
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([*self.net.parameters(), self.unused], lr=0.1, momentum=0.9)


class TwoOptimizers(Net):
    """Manual optimization in one of the orders that loops use."""

    def __init__(self, order="clear first"):
        super().__init__()
        self.automatic_optimization = False
        self.order = order

    def training_step(self, batch, batch_idx):
        self.look()
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.net(batch).square().mean()
            if self.order in ("clear first", "to zero"):
                optimizer.zero_grad(set_to_none=self.order == "clear first")
            self.manual_backward(loss)
            optimizer.step()
            if self.order == "clear last":
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]


def fit(model, callbacks, **flags):
    trainer = quiet_trainer(max_epochs=flags.pop("max_epochs", 2), **flags, callbacks=callbacks)
    data = torch.randn(18, 4, generator=torch.Generator().manual_seed(3))
    trainer.fit(model, DataLoader(data, batch_size=3))
    return model


def same(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


CASES = {
    "accumulation": (Net, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}),
    "two optimizers": (TwoOptimizers, {}),
    "O1": (Net, {"plugins": lambda: [ApexAMP("O1", loss_scale="dynamic")]}),
    "O2": (Net, {"plugins": lambda: [ApexAMP("O2", loss_scale="dynamic")], "accumulate_grad_batches": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_stay_and_the_gradients_go(case):
    make, flags = CASES[case]

    def run(callbacks):
        given = {key: value() if callable(value) else value for key, value in flags.items()}
        return fit(make(), callbacks, **given)

    plain, released = run([]), run([GradToNone()])
    same(plain, released)
    window = flags.get("accumulate_grad_batches", 1)
    first_of_third_window = 2 * window
    assert plain.held[first_of_third_window]
    assert not released.held[first_of_third_window]
    if window == 2:
        assert released.held[first_of_third_window + 1]  # in mid-window they have to stay


@pytest.mark.parametrize(("order", "level", "message"), [
    ("clear last", None, "the training loop clears the gradients before the next batch"),
    ("to zero", None, "keeps the same gradients from one step"),
    ("never clear", "O2", "keeps the same gradients from one step"),
])  # fmt: skip
def test_without_an_effect_it_warns(order, level, message):
    def run(callbacks):
        plugins = [] if level is None else [ApexAMP(level, loss_scale="dynamic")]
        return fit(TwoOptimizers(order), callbacks, plugins=plugins)

    plain = run([])
    with pytest.warns(NoEffectWarning, match=message):
        same(plain, run([GradToNone()]))


def test_the_last_step_of_weight_averaging_has_its_gradients():
    class Normed(Net):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def run(callbacks, **flags):
        torch.manual_seed(0)
        averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1)
        return fit(Normed(), [averaging, *callbacks], max_epochs=3, gradient_clip_val=0.5, **flags)

    plain = run([])
    with pytest.warns(NoEffectWarning, match="StochasticWeightAveraging makes one more step with the last gradients"):
        same(plain, run([GradToNone()]))
    same(plain, run([], strategy="turbo"))


def test_what_it_refuses_and_bucket_views_of_ddp():
    class Trainerlike:
        class strategy:
            handles_gradient_accumulation = True

        class model:
            gradient_as_bucket_view = True

    with pytest.raises(grad_to_none.MisconfigurationException, match="keeps and clears gradients itself"):
        GradToNone().setup(Trainerlike, Net(), "fit")
    with pytest.warns(NoEffectWarning, match="gradients are views of DDP's buckets"):
        GradToNone().on_train_start(Trainerlike, Net())
