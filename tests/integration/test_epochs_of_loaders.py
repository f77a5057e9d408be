"""Epochs that a Trainer breaks off, and those that it goes on with: the orders of plain loaders, bit for bit."""

import copy
import gc
import pickle
import shutil
import time

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, RandomSampler

from lightning_turbo import PrefetchDataModule
from tests.integration.noting import EACH_STRATEGY, Noting, Numbers, Save, fit, gives
from tests.leftovers import wait_until

pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


class Drawing(Numbers):
    """Draws while it loads."""

    def __getitem__(self, index):
        row, number = super().__getitem__(index)
        return row + torch.rand(()), number


LOADERS = {
    "shuffled": lambda own, workers: DataLoader(Numbers(22), 4, shuffle=True, generator=own, **workers),
    "lazy": lambda own, workers: DataLoader(
        Numbers(22), 4, sampler=RandomSampler(Numbers(22), True, 200, own), **workers
    ),
    "drawing": lambda own, workers: DataLoader(Drawing(40) if workers else Numbers(40), 4, generator=own, **workers),
}


STAYING = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize(("loader", "workers"), [
    ("shuffled", {}), ("lazy", {}), ("drawing", {}), ("drawing", STAYING),
    pytest.param("shuffled", STAYING, marks=pytest.mark.slow), pytest.param("lazy", STAYING, marks=pytest.mark.slow),
])  # fmt: skip
def test_epochs_that_are_broken_off(loader, workers):
    loader = LOADERS[loader]

    def run(base, pause):
        class Data(base):
            def __init__(self):
                super().__init__()
                self.own = [torch.Generator().manual_seed(seed) for seed in range(2)]

            def train_dataloader(self):
                return loader(self.own[0], workers)

            def val_dataloader(self):
                return [loader(self.own[1], workers), DataLoader(Numbers(6))]

        class Pauses(Noting):
            def on_before_zero_grad(self, optimizer):
                time.sleep(pause)

            def on_validation_batch_end(self, *_):
                time.sleep(pause)

        limits = {"limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": 1}
        model = fit(Data(), model=Pauses, max_epochs=3, **limits)
        return model.seen, model.losses, model.others, torch.rand(())

    want = run(LightningDataModule, 0.0)
    assert run(PrefetchDataModule, 0.0) == want
    assert run(PrefetchDataModule, 0.02) == want


def test_a_loader_that_outlives_its_trainer_is_loaded_ahead_to_its_end():
    data = gives(DataLoader(Numbers(64), 4))
    fit(data, max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    loader = data.trainer.train_dataloader
    iterator = iter(loader)
    first = [next(iterator) for _ in range(2)]
    wait_until(iterator.ready)
    assert len(first + list(iterator)) == 16
    for copied in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert len(list(copied)) == 16
    data.trainer = None
    del data
    gc.collect()
    assert len(list(loader)) == 16


def test_the_best_checkpoint_of_a_validation_goes_on_with_the_next_epoch(tmp_path):
    class Data(PrefetchDataModule):
        def train_dataloader(self):
            return DataLoader(Numbers(8), 2, shuffle=True, generator=torch.Generator().manual_seed(0))

        def val_dataloader(self):
            return DataLoader(Numbers(4), 2)

    def run(folder, path=None):
        best = ModelCheckpoint(folder, monitor="val", save_top_k=-1, filename="{step}")
        settings = {"max_epochs": 3, "val_check_interval": 0.5, "enable_checkpointing": True}
        return fit(Data(), best, ckpt_path=path, **settings)

    whole = run(tmp_path / "runs")
    path = (tmp_path / "runs" / "step=4.ckpt").rename(tmp_path / "epoch.ckpt")
    shutil.rmtree(tmp_path / "runs")
    assert run(tmp_path / "runs", path).seen == whole.seen[4:]


@pytest.mark.parametrize("every", [1, 2])
@EACH_STRATEGY
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_loaders_that_are_made_anew_reset_epochs(every, hook, strategy, tmp_path):
    class Anew(PrefetchDataModule):
        def train_dataloader(self):
            own = torch.Generator().manual_seed(0)
            return DataLoader(Numbers(8), 2, sampler=RandomSampler(range(8), generator=own))

    path = tmp_path / "one.ckpt"
    settings = {"max_epochs": 3, "strategy": strategy, "reload_dataloaders_every_n_epochs": every}
    whole = fit(Anew(), Save(path, 4, hook), **settings)
    rest = fit(Anew(), ckpt_path=path, **settings)
    assert rest.seen[:4] == whole.seen[4:8]
    assert (whole.seen[:4] == whole.seen[4:8]) == (every == 1)


@pytest.mark.parametrize(("batches", "hook", "workers", "every", "strategy"), [
    pytest.param(*stop, *way, marks=[pytest.mark.slow] * (way[0] and stop[0] != 6))
    for stop in (
        (4, "on_train_batch_end"), (4, "on_train_epoch_end"), (6, "on_train_batch_end"), (8, "on_train_epoch_end"),
    )
    for way in ((0, 1, "auto"), (1, 1, "turbo"), (0, 2, "turbo"))
])  # fmt: skip
def test_loaders_that_are_made_anew_with_the_generator_of_the_old_ones_go_on_with_it(
    batches, hook, workers, every, strategy, tmp_path
):
    class Keeps(PrefetchDataModule):
        def __init__(self):
            super().__init__()
            self.own = torch.Generator().manual_seed(0)

        def train_dataloader(self):
            return DataLoader(Numbers(8), 2, shuffle=True, generator=self.own, num_workers=workers)

    path = tmp_path / "one.ckpt"
    settings = {"max_epochs": 4, "strategy": strategy, "reload_dataloaders_every_n_epochs": every}
    whole = fit(Keeps(), Save(path, batches, hook), **settings)
    assert fit(Keeps(), ckpt_path=path, **settings).seen == whole.seen[batches:]


@pytest.mark.parametrize(("epoch", "validates"), [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3)])
def test_loaders_of_the_validation_are_made_anew_in_the_same_epochs(epoch, validates, tmp_path):
    class Anew(PrefetchDataModule):
        def __init__(self):
            super().__init__()
            self.asked = []

        def train_dataloader(self):
            return DataLoader(Numbers(4), 2)

        def val_dataloader(self):
            self.asked.append(self.trainer.current_epoch)
            return DataLoader(Numbers(4), 2)

    path, asked = tmp_path / "c", []
    for ckpt in (None, path):
        data = Anew()
        saves = [] if ckpt else [Save(path, 2 * epoch, "on_train_epoch_end")]
        fit(
            data, *saves, ckpt_path=ckpt, strategy="turbo", max_epochs=8, reload_dataloaders_every_n_epochs=2,
            check_val_every_n_epoch=validates, num_sanity_val_steps=0,
        )  # fmt: skip
        asked.append([each for each in data.asked if each > epoch])
    assert asked[0] == asked[1] != []
