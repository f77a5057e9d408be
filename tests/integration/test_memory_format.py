"""MemoryFormat measures what will be trained: on the Trainer's device, in the precision of its steps."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_turbo import ApexAMP, MemoryFormat, TurboStrategy
from tests.trainers import quiet_trainer


class Noting(nn.Conv2d):
    """Notes, over all copies of it, in which dtype it computes."""

    seen: list[torch.dtype] = []  # noqa: RUF012

    def forward(self, x):
        result = super().forward(x)
        self.seen.append(result.dtype)
        return result


class Net(LightningModule):
    example_input_array = torch.zeros(2, 1, 8, 8)

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Noting(1, 2, 3), nn.BatchNorm2d(2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.measured = set(Noting.seen)
        Noting.seen.clear()
        loss = self(batch).float().square().mean()
        self.trained = set(Noting.seen)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("settings", [
    {}, {"precision": "bf16-mixed"}, {"precision": "bf16-true"},
    {"level": "O0", "cuda": False}, {"level": "O1", "cuda": True}, {"level": "O3", "cuda": False},
    {"level": "O2", "cuda": True, "dtype": torch.float16},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("way", ["callback", "strategy"])
def test_it_measures_in_the_precision_that_trains(settings, way, monkeypatch):
    settings = dict(settings)
    if "level" in settings:
        with monkeypatch.context() as patch:  # a machine with CUDA or without; the Trainer is on its CPU
            cuda = settings.pop("cuda")
            patch.setattr(torch.cuda, "is_available", lambda: cuda)
            settings["plugins"] = [ApexAMP(settings.pop("level"), dtype=settings.pop("dtype", None))]
    if way == "callback":
        settings["callbacks"] = [MemoryFormat("measure", rounds=1)]
    else:
        settings["strategy"] = TurboStrategy(memory_format="measure")
    Noting.seen.clear()
    trainer = quiet_trainer(max_steps=1, **settings)
    trainer.fit(model := Net(), DataLoader(torch.randn(2, 1, 8, 8), batch_size=2))
    assert model.measured == model.trained
    assert len(model.trained) == 1
