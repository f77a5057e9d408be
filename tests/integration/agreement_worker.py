"""One of two ranks, started with settings that differ from the other's; run by test_agreement.py."""

import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import ApexAMP, TurboDDPStrategy


class Net(pl.LightningModule):
    def __init__(self, width=3):
        super().__init__()
        self.layer = torch.nn.Linear(4, width)
        self.steps = 0

    def training_step(self, batch, index):
        self.steps += 1
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank, level="O1", scale=None, width=3, ckpt=None, strategy=None, **settings):
    model = Net(width)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=TurboDDPStrategy(**(strategy or {})), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[ApexAMP(level, dtype=torch.bfloat16, loss_scale=scale)], **{"max_epochs": 1, **settings},
    )  # fmt: skip
    try:
        trainer.fit(model, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2), ckpt_path=ckpt)
    except MisconfigurationException as error:
        return str(error), model.steps
    trainer.save_checkpoint("one.ckpt")
    return "", model.steps


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    os.chdir(folder.parent)
    assert fit(rank) == ("", 2)  # ranks that agree train
    cases = {
        "level": {"level": ("O1", "O2")[rank]},
        "scale": {"scale": (128.0, 256.0)[rank]},
        "trainer": {"accumulate_grad_batches": 1 + rank, "max_epochs": 1 + rank},
        "strategy": {"strategy": ({}, {"grad_compression": "fp16", "bucket_cap_mb": 50})[rank]},
        "network": {"width": 3 + rank},
        "checkpoint": {"ckpt": ("one.ckpt", None)[rank]},
    }
    for case, settings in cases.items():
        text, steps = fit(rank, **settings)
        (folder / f"{case}.{rank}.{steps}").write_text(text)


if __name__ == "__main__":
    main()
