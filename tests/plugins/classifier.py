"""A small classifier written for float32, and the Trainer of the tests of the plugin."""

import math

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.trainers import quiet_trainer

LEVELS = ("O0", "O1", "O2", "O3")
HALVES = (torch.bfloat16, torch.float16)


class Net(pl.LightningModule):
    """Has a batch norm, a frozen and an unused layer, and a loss and a metric as children."""

    def __init__(self, optimizer=None, poison=()):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.1, 1.2, 1.3]))
        self.make_optimizer = optimizer or (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
        self.poison = set(poison)
        self.losses, self.seen = [], {}

    def forward(self, x):
        return self.frozen(self.head(self.net(x)))

    def training_step(self, batch, index):
        x, y = batch
        out = self(x)
        loss = self.criterion(out, y)
        self.losses.append(float(loss.detach()))
        self.seen.update(out=out.dtype, loss=loss.dtype, x=x.dtype)
        if index in self.poison:
            loss = loss * math.inf
        return loss

    def validation_step(self, batch, index):
        self.seen["val_out"] = self(batch[0]).dtype

    test_step = validation_step

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        return self.make_optimizer(list(self.parameters()))


def batches(n=128, size=16):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, 6, 6, generator=g)
    y = (x.mean((1, 2, 3)) > 0).long() + 2 * (x[:, 0, 0, 0] > 0).long()
    return DataLoader(TensorDataset(x, y), batch_size=size)


def trainer(*plugins, **flags):
    return quiet_trainer(plugins=list(plugins), **{"max_epochs": 1, **flags})
