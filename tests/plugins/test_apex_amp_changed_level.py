"""A run is resumed at another level, with another half dtype or loss scale: the loss scale is that of the new run."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_turbo import ApexAMP, PrefetchLoader
from tests.integration.recording import Save
from tests.trainers import quiet_trainer

HALF, BRAIN = torch.float16, torch.bfloat16
RUNS = [("O0", BRAIN), ("O1", HALF), ("O1", BRAIN), ("O2", HALF), ("O2", BRAIN), ("O3", BRAIN)]


class Net(pl.LightningModule):
    def __init__(self, automatic=True, window=1):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.automatic_optimization = automatic
        self.window = window
        self.losses = []

    def training_step(self, batch, index):
        # The loss is so small that no gradient overflows at a scale of 65536.
        loss = 0.02 * (self.net(batch[0]).float() - batch[0].sum(1, True)).square().mean()
        self.losses.append(float(loss.detach()))
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / self.window)
        if (index + 1) % self.window == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.5)


@pytest.mark.parametrize(("first", "automatic", "window"), [
    (first, number < 3, number % 2 + 1) for number, first in enumerate(RUNS)
])  # fmt: skip
def test_training_resumed_at_another_level_continues_as_in_float32(first, automatic, window, tmp_path):
    def train(plugins, *saves, ckpt_path=None):
        net, flags = Net(automatic, window), {"accumulate_grad_batches": window if automatic else 1}
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        trainer = quiet_trainer(max_epochs=1, plugins=plugins, callbacks=[*saves], **flags)
        trainer.fit(net, PrefetchLoader(TensorDataset(inputs), batch_size=8), ckpt_path=ckpt_path)
        return net

    wanted = train([]).losses[4:]
    (level, dtype), path = first, tmp_path / "first.ckpt"
    train([ApexAMP(level, dtype=dtype, loss_scale="dynamic" if dtype is HALF else None)], Save(path, 4))
    for level, dtype in RUNS:
        plugin = ApexAMP(level, dtype=dtype)
        net = train([plugin], ckpt_path=path)
        assert net.losses == pytest.approx(wanted, rel=0.05, abs=4e-4), (first, level, dtype)
        assert plugin.loss_scale == (65536.0 if dtype is HALF else 1.0)


@pytest.mark.parametrize(("first", "state", "then", "scale"), [
    ({}, {"loss_scale": 1.0, "unskipped": 0}, {}, 1.0),  # it has just fallen to one
    ({}, {"loss_scale": 4.0, "unskipped": 3}, {}, 4.0),
    ({}, {"loss_scale": 4.0, "unskipped": 3}, {"loss_scale": 16.0}, 16.0),  # was asked for
    ({"dtype": BRAIN}, None, {}, 2.0**16),
])  # fmt: skip
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_loss_scale_after_a_resume_at_another_level(level, first, state, then, scale):
    before, after = (
        ApexAMP(level, **{"dtype": HALF, **first}),
        ApexAMP(level, dtype=HALF, **then),
    )
    if state:
        before.load_state_dict({"loss_scaler0": state})
    after.load_state_dict(before.state_dict())
    assert after.loss_scale == scale
