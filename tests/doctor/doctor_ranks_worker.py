"""Runs of two ranks, of which one or none is slow."""

import os
import time

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_turbo import Doctor
from lightning_turbo.doctor import callback
from tests.trainers import quiet_trainer

SLOW = os.environ.get("RANK") == "1"
MORE, LATE = 0.04, 2.5  # seconds
USUAL = 0.02  # seconds of a step
STEPS = {"step": MORE, "long step": 8 * MORE}  # the second is also detected while other programs run


class Data(Dataset):
    def __init__(self, case):
        self.case = case

    def __len__(self):
        return 96

    def __getitem__(self, i):
        time.sleep(MORE / 2 if SLOW and self.case == "loading" else 0.001)
        return torch.ones(8)


class Loaders(LightningDataModule):
    def __init__(self, case):
        super().__init__()
        self.case = case

    def setup(self, stage):
        time.sleep(LATE if SLOW and self.case == "setup" else 0)

    def train_dataloader(self):
        return DataLoader(Data(self.case), batch_size=2)

    def val_dataloader(self):
        return DataLoader(Data(""), batch_size=2)


class Model(LightningModule):
    def __init__(self, case):
        super().__init__()
        self.net, self.case = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), case

    def training_step(self, batch, batch_idx):
        time.sleep(STEPS.get(self.case, USUAL) if SLOW else USUAL)
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx):
        time.sleep(LATE / 2 if SLOW and self.case == "validation" else 0)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        time.sleep(MORE if not SLOW and self.case == "hook" else 0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder, *cases):
    """Fit once for each case, with a report in the folder."""
    if cases == ("alone",):
        callback.PATIENCE = 0.5
    for number, case in enumerate(cases):
        doctor = Doctor(warmup=2, watched=0, json=folder / f"{number}.json")
        trainer = quiet_trainer(
            devices=2,
            strategy="ddp" if case == "validation" else "turbo_ddp",
            callbacks=[] if SLOW and case == "alone" else [doctor],
            max_steps=14,
            limit_val_batches=2 * (case == "validation"),
        )
        model, data = Model(case), Loaders(case)
        time.sleep(LATE if SLOW and case == "start" else 0)
        trainer.fit(model, data)
        assert (doctor.report is None) == SLOW
