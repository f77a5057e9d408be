"""A run goes on at another level, in another half dtype or with another loss scale: the scale is the new run's."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_turbo import ApexAMP, ExactAccumulation, PrefetchLoader, amp

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
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
        # So small that no gradient overflows at a scale of 65536.
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


class SaveAfter(pl.Callback):
    def __init__(self, batches, path):
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)


def fit(plugin, ckpt_path=None, automatic=True, window=1, callbacks=()):
    net = Net(automatic, window)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, plugins=plugin, callbacks=list(callbacks),
        accumulate_grad_batches=window if automatic else 1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, PrefetchLoader(TensorDataset(inputs), batch_size=8), ckpt_path=ckpt_path)
    return net


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("first", RUNS)
def test_training_goes_on_as_in_float32(first, window, automatic, tmp_path):
    wanted = fit([], automatic=automatic, window=window).losses[5:]  # 5 batches: in mid-window where there is one
    level, dtype = first
    path = tmp_path / "first.ckpt"
    fit([ApexAMP(level, dtype=dtype, loss_scale="dynamic" if dtype is HALF else None)],
        automatic=automatic, window=window, callbacks=[SaveAfter(5, path)])  # fmt: skip
    for level, dtype in RUNS:
        plugin = ApexAMP(level, dtype=dtype)
        net = fit([plugin], path, automatic, window)
        assert net.losses == pytest.approx(wanted, rel=0.05, abs=4e-4), (first, level, dtype)
        assert plugin.loss_scale == (65536.0 if dtype is HALF else 1.0)


def test_exact_accumulation_beside_another_scale(tmp_path):
    path = tmp_path / "first.ckpt"
    fit([ApexAMP("O1", dtype=HALF)], window=3, callbacks=[ExactAccumulation(), SaveAfter(5, path)])
    net = fit([ApexAMP("O1", dtype=BRAIN)], path, window=3, callbacks=[ExactAccumulation()])
    assert net.losses == pytest.approx(
        fit([], window=3, callbacks=[ExactAccumulation()]).losses[5:], rel=0.05, abs=4e-4
    )


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scale_that_was_asked_for_stays(level, tmp_path):
    path = tmp_path / "first.ckpt"
    fit([ApexAMP(level, dtype=HALF)], callbacks=[SaveAfter(5, path)])
    plugin = ApexAMP(level, dtype=HALF, loss_scale=16.0)
    fit([plugin], path)
    assert plugin.loss_scale == 16.0


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_apexs_ways_to_choose_a_dtype_work_inside_of_a_module(dtype):
    seen = {}

    @amp.half_function
    def in_half(tensor):
        return tensor.dtype

    @amp.float_function
    def in_float(tensor):
        return tensor.dtype

    class Choosing(Net):
        def training_step(self, batch, index):
            made = self.net(batch[0])
            with amp.disable_casts():
                seen["disable_casts"] = (batch[0] @ self.net.weight.T).dtype
            seen["half_function"], seen["float_function"] = in_half(batch[0]), in_float(made)
            seen["float list"] = torch.mm(batch[0], self.net.weight.T).dtype
            seen["half list"] = torch.exp(batch[0]).dtype
            return super().training_step(batch, index)

    amp.register_float_function(torch, "mm")
    amp.register_half_function(torch, "exp")
    try:
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=1, plugins=[ApexAMP("O1", dtype=dtype)], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Choosing(), PrefetchLoader(TensorDataset(torch.randn(8, 4)), batch_size=8))
    finally:
        amp.registration._registered.clear()
    wide, half = torch.float32, dtype
    assert seen == {
        "disable_casts": wide, "half_function": half, "float_function": wide, "float list": wide, "half list": half,
    }  # fmt: skip
    assert in_half(torch.ones(1)) is torch.float32  # when the run is over


def test_a_dynamic_scale_that_has_just_fallen_to_one_stays(tmp_path):
    first = ApexAMP("O1", dtype=HALF, min_loss_scale=1.0)
    for scale, unskipped, goes_on_at in ((1.0, 0, 1.0), (4.0, 3, 4.0)):
        first.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": unskipped, "dynamic": True}})
        then = ApexAMP("O1", dtype=HALF)
        then.load_state_dict(first.state_dict())
        assert then.loss_scale == goes_on_at
    then = ApexAMP("O1", dtype=HALF)
    then.load_state_dict(ApexAMP("O1", dtype=BRAIN).state_dict())
    assert then.loss_scale == 2.0**16
