"""A checkpoint while gradients wait for their step: what goes on from it ends as if it had not stopped."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_turbo import ApexAMP, ExactAccumulation, PrefetchLoader
from lightning_turbo.errors import TurboWarning
from tests.integration.noting import Save
from tests.trainers import quiet_trainer

HALF, BRAIN = torch.float16, torch.bfloat16


class Manual(pl.LightningModule):
    """Accumulates over two batches in one network, and steps at every batch in another."""

    def __init__(self, order=("two", "one"), poison=()):
        super().__init__()
        torch.manual_seed(0)
        self.two, self.one = nn.Linear(4, 1), nn.Linear(4, 1)
        self.order, self.poison, self.toggles = order, poison, False
        self.automatic_optimization = False
        self.scales = []

    def training_step(self, batch, index):
        for name, optimizer in zip(("two", "one"), self.optimizers(), strict=True):
            optimizer.name = name
        for optimizer in sorted(self.optimizers(), key=lambda o: self.order.index(o.name)):
            window = 2 if optimizer.name == "two" else 1
            loss = getattr(self, optimizer.name)(batch[0]).square().mean() * 0.02
            if self.toggles:
                self.toggle_optimizer(optimizer)
            if index % window == 0:
                optimizer.zero_grad()
            ids = {"loss_id": self.order.index(optimizer.name)}
            self.manual_backward(loss * (torch.inf if (optimizer.name, index) in self.poison else 1.0), **ids)
            if (index + 1) % window == 0:
                optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def on_train_batch_end(self, *_):
        self.scales.append(
            [state["loss_scale"] for state in self.trainer.precision_plugin._engine.state_dict().values()]
        )

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.5) for net in (self.two, self.one)]


def fit(module, plugin, ckpt_path=None, callbacks=(), **flags):
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(max_epochs=1, plugins=plugin, callbacks=list(callbacks), **flags)
    trainer.fit(module, PrefetchLoader(TensorDataset(inputs), batch_size=4), ckpt_path=ckpt_path)
    return module


POISON = {"finite": (), "first": (("two", 2),), "second": (("one", 2), ("two", 3))}
CASES = [(level, dtype, "finite") for level in ("O0", "O1", "O2", "O3") for dtype in (HALF, BRAIN)]
CASES += [(level, HALF, poison) for level in ("O1", "O2") for poison in ("first", "second")]  # with skipped steps


@pytest.mark.parametrize(("level", "dtype", "poison"), CASES)
@pytest.mark.parametrize("order", [("two", "one"), ("one", "two")])
def test_manual_optimization_goes_on_with_what_waits(level, dtype, poison, order, tmp_path):
    def plugin():
        return ApexAMP(level, dtype=dtype, num_losses=2)

    path = tmp_path / "waits.ckpt"
    whole = fit(Manual(order, POISON[poison]), plugin(), callbacks=[Save(path, 3)])
    resumed = fit(Manual(order, POISON[poison]), plugin(), ckpt_path=path)
    assert resumed.scales == whole.scales[3:]
    for name, value in whole.state_dict().items():
        assert torch.isfinite(value).all()
        assert torch.equal(resumed.state_dict()[name], value), name


@pytest.mark.parametrize("toggles", [False, True])
def test_gradients_that_wait_are_saved_and_no_others_of_toggled_optimizers(toggles, tmp_path):
    module = Manual(("one", "two"))
    module.toggles = toggles
    saves = [Save(tmp_path / "open", 3), Save(tmp_path / "done", 4)]
    fit(module, ApexAMP("O2", num_losses=2), callbacks=saves)
    waiting, stepped = torch.load(tmp_path / "open", weights_only=False)["ApexAMP"]["accumulated_gradients"][0]
    assert len(waiting) == 2
    assert len(stepped) == (0 if toggles else 2)
    if toggles:
        assert "accumulated_gradients" not in torch.load(tmp_path / "done", weights_only=False)["ApexAMP"]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("level", [None, "O1", "O2", "O3"])
def test_a_window_of_other_ranks_is_lost_and_said_so(level, exact, tmp_path):
    path, flags = tmp_path / "window.ckpt", {"accumulate_grad_batches": 4}
    ours = [ExactAccumulation()] if exact or level is None else []
    plugin = level and ApexAMP(level)
    fit(Automatic(), plugin, callbacks=[*ours, Save(path, 2)], **flags)
    saved = torch.load(path, weights_only=False)
    for owner in (saved.get("ApexAMP", {}), saved):  # as two ranks write it
        for key in ("accumulated_gradients", "noted", "lightning_turbo.ExactAccumulation"):
            if key in owner:
                owner[key] *= 2
    torch.save(saved, path)
    with pytest.warns(TurboWarning, match=r"by a run of 2 rank\(s\); this run has 1.*that window are lost"):
        resumed = fit(Automatic(), plugin and ApexAMP(level), ckpt_path=path, callbacks=ours, **flags)
    assert all(p.isfinite().all() for p in resumed.parameters())


class Automatic(pl.LightningModule):
    def __init__(self, poison=(), empty=()):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.poison, self.empty = poison, empty
        self.rates = []

    def training_step(self, batch, index):
        if index in self.empty:
            return None
        loss = self.net(batch[0]).float().square().mean() * 0.02
        return loss * torch.inf if index in self.poison else loss

    def on_train_batch_end(self, *_):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("second", ["O1", "O2", "O3"])
@pytest.mark.parametrize("first", ["O1", "O2", "O3"])
def test_an_exact_window_has_its_gradients_once_and_goes_on_at_another_level(first, second, tmp_path):
    path = tmp_path / "window.ckpt"
    flags = {"accumulate_grad_batches": 4}
    whole = fit(Automatic(), ApexAMP(first), callbacks=[ExactAccumulation(), Save(path, 2)], **flags)
    saved = torch.load(path, weights_only=False)
    assert "gradients" not in saved["lightning_turbo.ExactAccumulation"][0]
    assert len(saved["ApexAMP"]["accumulated_gradients"][0][0]) == 2
    resumed = fit(Automatic(), ApexAMP(second), ckpt_path=path, callbacks=[ExactAccumulation()], **flags)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_a_loss_after_a_skipped_step_is_no_skipped_step(tmp_path):
    module = fit(Automatic(poison=[1], empty=[2]), ApexAMP("O2", dtype=HALF), callbacks=[Save(tmp_path / "c", 2)])
    resumed = fit(Automatic(poison=[1], empty=[2]), ApexAMP("O2", dtype=HALF), ckpt_path=tmp_path / "c")
    assert module.rates == [0.5, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert resumed.rates == module.rates[2:]
