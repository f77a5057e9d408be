"""O0-O3 on a CUDA device: float16 by default, no host reads with fused optimizers, memory."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import ApexAMP, ApexGradScaler, amp
from lightning_turbo._lightning import Callback, LightningModule
from tests.trainers import quiet_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*Tensor Cores.*"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),  # once per process
]
LEVELS = ("O0", "O1", "O2", "O3")


class Net(LightningModule):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.GELU())
        self.head = nn.Linear(width, 10)
        self.losses = []

    def forward(self, x):
        return self.head(self.second(self.first(x)).mean((2, 3)))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def loader(n=128, size=16, pixels=16):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, pixels, pixels, generator=g)
    return DataLoader(TensorDataset(x, (x[:, 0].mean((1, 2)) > 0).long()), batch_size=size, pin_memory=True)


def fit(model, data=None, **kwargs):
    trainer = quiet_trainer(**{"accelerator": "cuda", "max_epochs": 2, **kwargs})
    trainer.fit(model, data or loader())
    return trainer


@pytest.mark.parametrize("level", LEVELS)
def test_half_is_float16_and_the_loss_falls(level):
    model, plugin = Net(), ApexAMP(level)
    fit(model, plugins=[plugin])
    assert plugin.half_dtype is torch.float16
    scale = {"O0": 1.0, "O1": 65536.0, "O2": 65536.0, "O3": 1.0}[level]
    assert plugin.loss_scale == scale or plugin.scaler.skipped_steps
    losses = torch.stack(model.losses)
    assert losses.isfinite().all() or level == "O3"  # Adam's eps vanishes in float16, as in apex
    if level != "O3":
        assert losses[-4:].mean() < losses[:4].mean()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
def test_a_module_trains_again_at_another_level(level):
    """The Trainer moves the module to the device and back, which creates new buffers."""
    model = Net()
    model.register_buffer("scale", torch.ones(1))
    fit(model, plugins=[ApexAMP(level)], max_epochs=1)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}
    fit(model, plugins=[ApexAMP("O1")], max_epochs=1)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_fused_step_does_not_synchronize(level):
    """torch's debug mode raises an error if a call synchronizes the host with the device."""

    class Strict(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index >= 2:
                torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, *_):
            torch.cuda.set_sync_debug_mode("default")

        on_exception = on_train_batch_end

    plugin = ApexAMP(level, scaler=ApexGradScaler(max_scale=128.0))  # without gradient overflow
    fit(Net(), plugins=[plugin], callbacks=[Strict()], gradient_clip_val=1.0)


def test_o2_needs_less_memory_where_activations_dominate():
    peaks = {}
    for level in ("O0", "O2"):
        fit(Net(), plugins=[ApexAMP(level)], max_epochs=1)  # libraries allocate memory on first use and keep it
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fit(Net(width=64), loader(64, 64, 64), plugins=[ApexAMP(level)], max_epochs=1)  # 64 MiB per float32 activation
        peaks[level] = torch.cuda.max_memory_allocated() - before
    assert peaks["O2"] < 0.75 * peaks["O0"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_plain_apex_loop(level):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    try:
        x, y = torch.randn(16, 3, 8, 8, device="cuda"), torch.randint(0, 4, (16,), device="cuda")
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0]
        assert amp.state_dict()["loss_scaler0"].keys() == {"loss_scale", "unskipped"}
    finally:
        amp.shutdown()
