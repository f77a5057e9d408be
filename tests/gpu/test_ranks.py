"""Two ranks on two CUDA devices: turbo_ddp and its parts with NCCL, which only supports device tensors."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import ApexAMP, ExactAccumulation, GradToNone, PrefetchDataModule, TurboDDPStrategy
from lightning_turbo._lightning import LightningModule
from tests.ranks import run_ranks
from tests.trainers import quiet_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
LEVELS = ("O0", "O1", "O2")
SETTINGS = {
    "stock": lambda: "ddp",
    "turbo": lambda: "turbo_ddp",
    "bf16": lambda: TurboDDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook),
    "fp16": lambda: TurboDDPStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook, static_graph=True),
    "windows": lambda: "turbo_ddp",
}


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]).float(), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Data(PrefetchDataModule):
    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(80, 1, 8, 8, generator=generator)
        return DataLoader(TensorDataset(images, (images.mean((1, 2, 3)) > 0).long()), batch_size=8)


def length(batch):
    return torch.tensor(float(len(batch[0])), device=batch[0].device)


def fit(strategy, level, **settings):
    model = Net()
    trainer = quiet_trainer(
        accelerator="gpu", devices=2, strategy=strategy, max_epochs=2, plugins=[ApexAMP(level)], **settings
    )
    trainer.fit(model, datamodule=Data())
    return model, trainer


def train(folder):
    # The strategies select algorithms of cuDNN differently, which may only change the order of sums.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    rank = os.environ["RANK"]
    for level in LEVELS:
        for name, strategy in SETTINGS.items():
            windows = {"accumulate_grad_batches": 3, "callbacks": [GradToNone(), ExactAccumulation(weight=length)]}
            model, trainer = fit(strategy(), level, **(windows if name == "windows" else {}))
            end = {
                "weights": {key: value.detach().cpu() for key, value in model.named_parameters()},
                "loss": trainer.callback_metrics["loss"].item(),
            }
            torch.save(end, folder / f"{name}.{level}.{rank}")


def test_ranks_agree_with_each_other_and_with_stock_ddp(tmp_path):
    root, given = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    run_ranks(
        train, tmp_path, timeout=570, CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0,1"),
        PYTHONPATH=os.pathsep.join(filter(None, (given, root))),
    )  # fmt: skip
    for level in LEVELS:
        ends = {
            name: [torch.load(tmp_path / f"{name}.{level}.{rank}", weights_only=True) for rank in (0, 1)]
            for name in SETTINGS
        }
        for name, (first, second) in ends.items():
            for key, weight in first["weights"].items():
                assert weight.dtype is torch.float32
                assert torch.equal(weight, second["weights"][key]), (level, name, key)
            assert first["loss"] == second["loss"]
        # In float32, the order of sums differs; otherwise, half gradients are in other buckets or rounded for transfer.
        limits = {"turbo": 1e-5 if level == "O0" else 1e-2, "bf16": 2e-2, "fp16": 1e-2}
        for name, limit in limits.items():
            for key, weight in ends[name][0]["weights"].items():
                torch.testing.assert_close(weight, ends["stock"][0]["weights"][key], rtol=limit, atol=limit)
