"""What the small modules of the corpus share, all of it clean."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def loader(*, count=28, batch_size=4, features=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, features, generator=generator)
    y = torch.randint(0, 4, (count,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def image_loader(*, count=28, batch_size=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, 6, 6, generator=generator)
    y = torch.randint(0, 4, (count,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


class Base(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return loader()


class ManualBase(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
