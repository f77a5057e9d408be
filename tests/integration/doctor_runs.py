"""Networks to train and a quiet Trainer for the tests of the Doctor."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import ApexAMP
from tests.trainers import quiet_trainer

QUIET = [pytest.mark.filterwarnings("ignore:You have turned on .*detect_anomaly.*")]
SHORT = {"warmup": 1, "timed": 2, "watched": 3}


def images(count, *shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, *(shape or (1, 6, 6)), generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (count,), generator=generator))


class Base(LightningModule):
    """A network without any bad habit."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(images(40, 8), batch_size=4)


class ManualBase(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Noisy(LightningModule):
    """Dropout, batch norm, Adam and a few bad habits, so that any effect of the Doctor on training shows."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 4)
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x + torch.randn_like(x)), y)
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        if loss > 100:
            return None
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(images(48), batch_size=4, shuffle=True)


def trainer(*callbacks, **more):
    settings = {"max_epochs": 1, "num_sanity_val_steps": 0, **more}
    return quiet_trainer(callbacks=list(callbacks), **settings)


def trained(*callbacks, model=Noisy, data=None, level=None, **more):
    torch.manual_seed(7)
    module = model()
    plugins = [ApexAMP(level, dtype=torch.bfloat16)] if level else None
    trainer(*callbacks, plugins=plugins, **more).fit(module, datamodule=data and data())
    return module


def rules(doctor):
    return {finding.rule for finding in doctor.report.findings}


def equal(a, b):
    return a.losses == b.losses and all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )
