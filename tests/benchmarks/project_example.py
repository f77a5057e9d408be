"""Stands for a public project: ``python -m tests.benchmarks.project_example EPOCHS`` trains on shuffled data."""

import sys

import torch
from torch.utils.data import DataLoader

from lightning_turbo._lightning import LightningModule, Trainer


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return (self.layer(batch).sum(1) - batch.prod(1)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    data = list(torch.randn(24, 4))
    trainer = Trainer(
        max_epochs=int(sys.argv[1]), accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=12))
    trainer.validate(trainer.lightning_module, DataLoader(data, batch_size=12), verbose=False)
