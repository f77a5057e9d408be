"""A small convolutional network for tests of callbacks and schedules under a Trainer."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.trainers import quiet_trainer


class Net(LightningModule):
    """A small convolutional network that regresses the mean of noise, and records learning rates and losses."""

    def __init__(self, schedule=None, lr=0.1, batch_size=4, n=40):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1))
        self.schedule, self.lr, self.batch_size, self.n = schedule, lr, batch_size, n
        self.rates, self.losses = [], []

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def train_dataloader(self):
        x = torch.randn(self.n, 1, 6, 6, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.mean((1, 2, 3))[:, None]), batch_size=self.batch_size)

    test_dataloader = train_dataloader

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer, self.trainer)}


def fit(model, *callbacks, path=None, **flags):
    trainer = quiet_trainer(**{"max_epochs": 3, "callbacks": list(callbacks), **flags})
    trainer.fit(model, ckpt_path=path)
    return trainer
