"""A small regression that is trained with and without ApexAMP, and the distance between two results."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from tests.trainers import quiet_trainer

LEVELS = ("O0", "O1", "O2", "O3")


def batches():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs @ torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + 0.3), batch_size=8)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = layers()
        self.losses, self.validated = [], []

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.validated.append(self.loss(batch).item())

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.02, momentum=0.9)


def fit(module, plugin=None, max_epochs=3, ckpt_path=None, **flags):
    plugins = [] if plugin is None else [plugin]
    trainer = quiet_trainer(max_epochs=max_epochs, plugins=plugins, num_sanity_val_steps=0, **flags)
    trainer.fit(module, batches(), batches(), ckpt_path=ckpt_path)
    return module


def flat(module):
    """Return the state of a module as one vector."""
    return torch.cat([value.detach().float().flatten() for _, value in sorted(module.state_dict().items())])


def apart(module, other, start):
    """Return the distance of two modules divided by the distance of the second one from the start."""
    return float((flat(module) - flat(other)).norm() / (flat(other) - flat(start)).norm())
