"""Epochs that a Trainer breaks off, and those that it goes on with: the orders of plain loaders, bit for bit."""

import copy
import gc
import pickle
import shutil
import time

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lightning_turbo import PrefetchDataModule
from lightning_turbo.data import prefetcher
from tests.versions import unpickling

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling"),
]


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(prefetcher, "WORTH", 0.0)  # the thread begins, fast as the loaders are


class Numbers(Dataset):
    def __init__(self, length, draws=False):
        self.length = length
        self.draws = draws

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index + (torch.rand(()).item() if self.draws else 0.0)


class Model(LightningModule):
    def __init__(self, pause=0.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.pause = pause
        self.seen, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.tolist())
        time.sleep(self.pause)
        return self.weight.square()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.validated.append(batch.tolist())
        time.sleep(self.pause)
        self.log("loss", float(batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model, data, ckpt_path=None, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    resume = {} if ckpt_path is None else {"ckpt_path": ckpt_path, **unpickling(False)}
    Trainer(**{**quiet, "enable_checkpointing": False, **settings}).fit(model, datamodule=data, **resume)
    return model


LOADERS = {
    "shuffled": lambda own, workers: DataLoader(Numbers(22), 4, shuffle=True, generator=own, **workers),
    "lazy": lambda own, workers: DataLoader(
        Numbers(22), 4, sampler=RandomSampler(Numbers(22), True, 200, own), **workers
    ),
    "drawing": lambda own, workers: DataLoader(Numbers(40, draws=bool(workers)), 4, generator=own, **workers),
}


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["threads", "workers"])
@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_epochs_that_are_broken_off(loader, workers):
    def run(base, pause):
        class Data(base):
            def __init__(self):
                super().__init__()
                self.own = [torch.Generator().manual_seed(seed) for seed in range(2)]

            def train_dataloader(self):
                return loader(self.own[0], workers)

            def val_dataloader(self):
                return [loader(self.own[1], workers), DataLoader(Numbers(6))]

        torch.manual_seed(0)
        data, model = Data(), Model(pause)
        limits = {"limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": 1}
        fit(model, data, max_epochs=3, **limits)
        return model.seen, model.validated, torch.rand(())

    want = run(LightningDataModule, 0.0)
    assert run(PrefetchDataModule, 0.0) == want
    assert run(PrefetchDataModule, 0.02) == want


def test_a_loader_that_outlives_its_trainer_is_loaded_ahead_to_its_end():
    class Kept(PrefetchDataModule):
        def train_dataloader(self):
            self.loader = DataLoader(Numbers(64), 4)
            return self.loader

    data = Kept()
    fit(Model(), data, max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    for loader in (data.train_dataloader(), data.trainer.train_dataloader):
        iterator = iter(loader)
        first = [next(iterator).tolist() for _ in range(2)]
        deadline = time.monotonic() + 10
        while not iterator.ready():
            assert time.monotonic() < deadline
        assert len(first + list(iterator)) == 16
        for copied in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
            assert len(list(copied)) == 16
    loader = data.train_dataloader()
    del data.trainer, data
    gc.collect()
    assert len(list(loader)) == 16


class Data(PrefetchDataModule):
    def __init__(self, workers=0):
        super().__init__()
        self.workers = workers

    def train_dataloader(self):
        own = torch.Generator().manual_seed(0)
        return DataLoader(Numbers(8), 2, shuffle=True, generator=own, num_workers=self.workers)

    def val_dataloader(self):
        return DataLoader(Numbers(4), 2)


class Saves(Callback):
    def __init__(self, hook, path):
        def save(trainer, *_):
            if trainer.current_epoch == 0 and not trainer.sanity_checking:
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


def test_the_best_checkpoint_of_a_validation_goes_on_with_the_next_epoch(tmp_path):
    def run(folder, path=None):
        best = ModelCheckpoint(folder, monitor="loss", save_top_k=-1, filename="{step}")
        settings = {"max_epochs": 3, "val_check_interval": 0.5, "enable_checkpointing": True}
        return fit(Model(), Data(), path, callbacks=[best], **settings)

    whole = run(tmp_path / "runs")
    path = (tmp_path / "runs" / "step=4.ckpt").rename(tmp_path / "epoch.ckpt")
    shutil.rmtree(tmp_path / "runs")
    assert run(tmp_path / "runs", path).seen == whole.seen[4:]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("strategy", ["auto", "turbo"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_loaders_that_are_made_anew_begin_anew(every, hook, strategy, tmp_path):
    class Anew(PrefetchDataModule):
        def train_dataloader(self):
            own = torch.Generator().manual_seed(0)
            return DataLoader(Numbers(8), 2, sampler=RandomSampler(range(8), generator=own))

    path = tmp_path / "one.ckpt"
    settings = {"max_epochs": 3, "strategy": strategy, "reload_dataloaders_every_n_epochs": every}
    whole = fit(Model(), Anew(), callbacks=[Saves(hook, path)], limit_val_batches=0, **settings)
    rest = fit(Model(), Anew(), path, limit_val_batches=0, **settings)
    assert rest.seen[:4] == whole.seen[4:8]
    assert (whole.seen[:4] == whole.seen[4:8]) == (every == 1)
