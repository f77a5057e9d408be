"""A dataset and a model that record which samples were used, and a callback that saves checkpoints at given batches."""

import itertools
import multiprocessing

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import Dataset

from lightning_turbo import PrefetchDataModule
from tests.leftovers import nothing_is_left, prefetch_threads
from tests.trainers import quiet_trainer
from tests.versions import unpickling

EACH_STRATEGY = pytest.mark.parametrize("strategy", ["auto", "turbo"])


def matrix(names, *axes, times=2):
    """Parametrize by all combinations. In the short form, each value occurs at least ``times`` times."""
    sizes = [len(axis) for axis in axes]
    most = max(sizes)
    short = {tuple((k + k // most * n) % size for n, size in enumerate(sizes)) for k in range(times * most)}
    cases = []
    for places in itertools.product(*map(range, sizes)):
        parts = [axis[place] for axis, place in zip(axes, places, strict=True)]
        parts = [part if hasattr(part, "marks") else pytest.param(part, id=str(part)) for part in parts]
        marks = [mark for part in parts for mark in part.marks] + [pytest.mark.slow] * (places not in short)
        name = "-".join(part.id for part in parts)
        cases.append(pytest.param(*(part.values[0] for part in parts), marks=marks, id=name))
    return pytest.mark.parametrize(names, cases)


class Numbers(Dataset):
    """A dataset of numbered rows that records which ones were read."""

    def __init__(self, length=24):
        self.data = torch.randn(length, 4, generator=torch.Generator().manual_seed(0))
        self.asked = []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.data[index], index


def gives(loaders, base=PrefetchDataModule, **settings):
    """Return a DataModule whose train_dataloader returns these loaders."""
    return type("Data", (base,), {"train_dataloader": lambda _: loaders})(**settings)


class RecordingModel(LightningModule):
    """Records its batches. Its dropout draws from the generator that shuffles the samples."""

    def __init__(self, dropout=0.5):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        self.seen, self.losses, self.others = [], [], []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.seen.append(batch[1].tolist())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.net(batch[0]).square().mean()
        self.others.append(("val", dataloader_idx, batch[1].tolist(), loss.item()))
        self.log("val", loss, batch_size=4)

    def test_step(self, batch, batch_idx):
        self.others.append(("test", batch[1].tolist()))

    def predict_step(self, batch, batch_idx):
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Save(Callback):
    """Saves a checkpoint in a training hook after a given number of batches."""

    def __init__(self, path, batches, hook="on_train_batch_end"):
        def save(trainer, *_):
            if trainer.fit_loop.epoch_loop.batch_progress.total.processed == batches and not trainer.sanity_checking:
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


def fit(data, *callbacks, model=RecordingModel, seed=0, validation=None, ckpt_path=None, **settings):
    """Train a new model on a DataModule or on loaders, check that nothing is left behind, and return the model."""
    torch.manual_seed(seed)
    model = model()
    trainer = quiet_trainer(callbacks=list(callbacks), **{"max_epochs": 2, **settings})
    trainer.fit(model, data, validation, ckpt_path=ckpt_path, **unpickling(True if ckpt_path else None))
    if multiprocessing.active_children() or prefetch_threads():
        nothing_is_left()
    return model
