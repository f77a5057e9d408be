"""One of two ranks on two CUDA devices, under NCCL; run by test_ranks.py."""

import os
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import ApexAMP, ExactAccumulation, GradToNone, PrefetchDataModule, TurboDDPStrategy
from lightning_turbo._lightning import LightningModule, MisconfigurationException
from tests.trainers import quiet_trainer

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


def main():
    warnings.simplefilter("ignore")
    # The strategies choose cuDNN's algorithms in different ways, which may differ by the order of sums and no more.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    for level in LEVELS:
        for name, strategy in SETTINGS.items():
            windows = {"accumulate_grad_batches": 3, "callbacks": [GradToNone(), ExactAccumulation(weight=length)]}
            model, trainer = fit(strategy(), level, **(windows if name == "windows" else {}))
            end = {
                "weights": {key: value.detach().cpu() for key, value in model.named_parameters()},
                "loss": trainer.callback_metrics["loss"].item(),
            }
            torch.save(end, folder / f"{name}.{level}.{rank}")
    try:
        fit(TurboDDPStrategy(bucket_cap_mb=25 + rank), "O1")
    except MisconfigurationException as error:
        (folder / f"refused.{rank}").write_text(str(error))


if __name__ == "__main__":
    main()
