"""A checkpoint in the middle of an accumulation window holds no gradients of it, and the run that goes on says so."""

from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

from lightning_turbo import ApexAMP, ExactAccumulation, ExactResume, PrefetchLoader
from lightning_turbo.errors import TurboWarning
from tests.integration.noting import Save
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")

HALF = torch.float16


class Net(pl.LightningModule):
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


def fit(module, plugin, ckpt_path=None, callbacks=(), **flags):
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(max_epochs=1, plugins=plugin, callbacks=list(callbacks), **flags)
    trainer.fit(module, PrefetchLoader(TensorDataset(inputs), batch_size=4), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize(("level", "exact"), [
    (None, True), ("O1", True), ("O1", False), ("O2", False), ("O3", False),
])  # fmt: skip
def test_the_window_begins_again_with_the_batches_that_are_left(level, exact, tmp_path):
    path, flags = tmp_path / "window.ckpt", {"accumulate_grad_batches": 4}
    ours = [ExactAccumulation()] if exact else []
    plugin = level and ApexAMP(level)
    fit(Net(), plugin, callbacks=[*ours, Save(path, 2)], **flags)
    with pytest.warns(TurboWarning, match=r"saved after 2 of 4 batches of an accumulation window.*begins again"):
        resumed = fit(Net(), level and ApexAMP(level), ckpt_path=path, callbacks=ours, **flags)
    assert all(p.isfinite().all() for p in resumed.parameters())
    assert not torch.equal(resumed.net.weight, torch.load(path, weights_only=True)["state_dict"]["net.weight"])


class Saves(ModelCheckpoint):
    """Notes after how many batches it saves."""

    def __init__(self, folder):
        super().__init__(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        self.batches = []

    def _save_checkpoint(self, trainer, filepath):
        self.batches.append(trainer.fit_loop.epoch_loop.batch_progress.current.processed)
        super()._save_checkpoint(trainer, filepath)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_that_goes_on_saves_as_one_that_was_not_stopped(tmp_path):
    flags = {"accumulate_grad_batches": 2, "enable_checkpointing": True}
    whole, rest = Saves(tmp_path / "whole"), Saves(tmp_path / "rest")
    fit(Net(), None, callbacks=[ExactResume(), whole], **flags)
    assert whole.batches == [2, 4, 6]
    fit(Net(), None, tmp_path / "whole" / "step=1.ckpt", [ExactResume(), rest], **flags)
    assert rest.batches == [4, 6]


@pytest.mark.parametrize(("saved", "batches", "now", "said"), [(4, 2, 2, "2 of 4"), (2, 2, 4, None)])
def test_a_window_is_counted_by_the_length_that_it_had(saved, batches, now, said, tmp_path):
    fit(Net(), None, callbacks=[ExactResume(), Save(tmp_path / "c", batches)], accumulate_grad_batches=saved)
    with pytest.warns(TurboWarning, match=f"saved after {said} batches") if said else nullcontext():
        fit(Net(), ApexAMP("O1"), tmp_path / "c", [ExactResume()], accumulate_grad_batches=now)


@pytest.mark.parametrize(("callbacks", "level"), [
    ([ExactResume], None), ([ExactResume, ExactAccumulation], None), ([ExactResume, ExactAccumulation], "O1"),
])  # fmt: skip
def test_it_is_said_once(callbacks, level, tmp_path, recwarn):
    for path in (None, tmp_path / "c"):
        saves = [] if path else [Save(tmp_path / "c", 2)]
        ours = [kind() for kind in callbacks] + saves
        fit(Net(), level and ApexAMP(level), path, ours, accumulate_grad_batches=4)
    assert sum("2 of 4 batches of an accumulation window" in str(each.message) for each in recwarn) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_checkpoint_of_a_finished_step_goes_on_exactly(level, tmp_path):
    path, flags = tmp_path / "step.ckpt", {"accumulate_grad_batches": 2}
    whole = fit(Net(poison=[1]), ApexAMP(level, dtype=HALF), callbacks=[Save(path, 4)], **flags)
    resumed = fit(Net(poison=[1]), ApexAMP(level, dtype=HALF), ckpt_path=path, **flags)
    assert torch.equal(resumed.net.weight, whole.net.weight)
    assert resumed.rates == whole.rates[4:]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_a_loss_after_a_skipped_step_is_no_skipped_step(tmp_path):
    module = fit(Net(poison=[1], empty=[2]), ApexAMP("O2", dtype=HALF), callbacks=[Save(tmp_path / "c", 2)])
    resumed = fit(Net(poison=[1], empty=[2]), ApexAMP("O2", dtype=HALF), ckpt_path=tmp_path / "c")
    assert module.rates == [0.5, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert resumed.rates == module.rates[2:]
