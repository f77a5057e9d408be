"""Stop, save, load, go on equals never having stopped, with random numbers in the step and in the order too."""

import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_turbo import ExactResume, PrefetchDataModule, PrefetchLoader, PrefetchNextEpoch
from lightning_turbo.callbacks.exact_resume import KEY
from tests.versions import unpickling

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*"),
    pytest.mark.filterwarnings("ignore:.*no `val_dataloader`.*"),
    pytest.mark.filterwarnings("ignore:Loading a batch draws:lightning_turbo.errors.NoEffectWarning"),
]
BATCHES, EPOCHS = 6, 3


class Numbers(Dataset):
    """Samples that an augmentation of torch, NumPy and Python alters."""

    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.rand(4) + np.random.rand() + random.random()


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.losses, self.batch_size, self.lr = [], 2, 0.01

    def training_step(self, batch, index):
        loss = self.net(batch + np.random.rand() + random.random()).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.net(batch + torch.rand(4))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr / 100, momentum=0.9)


class Save(pl.Callback):
    def __init__(self, path, at):
        self.path, self.at = path, at

    def save(self, trainer, hook):
        if (hook, trainer.global_step) == self.at:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, "batch end")

    def on_train_epoch_end(self, trainer, *_):
        self.save(trainer, "epoch end")

    def on_train_epoch_start(self, trainer, *_):
        self.save(trainer, "epoch start")

    def on_validation_end(self, trainer, *_):
        self.save(trainer, "validation end")


def trainer(strategy, *callbacks, **settings):
    settings = {"max_epochs": EPOCHS, **settings}
    return pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, callbacks=list(callbacks),
        **settings,
    )  # fmt: skip


def loaders(kind):
    """The keywords of ``fit``, the strategy and the callbacks that make a run exact."""
    make = PrefetchLoader if "prefetch loader" in kind else DataLoader

    class Data(PrefetchDataModule):
        def train_dataloader(self):
            return make(Numbers(), batch_size=2, shuffle=True)

        def val_dataloader(self):
            return DataLoader(Numbers(), batch_size=4)

    plain = {
        "train_dataloaders": Data.train_dataloader.__wrapped__(None),
        "val_dataloaders": Data.val_dataloader.__wrapped__(None),
    }
    return {
        "datamodule": (lambda: {"datamodule": Data()}, "auto", ()),
        "datamodule, turbo": (lambda: {"datamodule": Data()}, "turbo", ()),
        "datamodule, next epoch early": (lambda: {"datamodule": Data()}, "auto", (PrefetchNextEpoch(),)),
        "prefetch loader, turbo": (lambda: plain, "turbo", ()),
        "prefetch loader, callback": (lambda: plain, "auto", (ExactResume(),)),
        "plain loader, turbo": (lambda: plain, "turbo", ()),
        "plain loader, callback": (lambda: plain, "auto", (ExactResume(),)),
    }[kind]


@pytest.mark.parametrize("at", [
    ("epoch end", 6), ("epoch end", 12), ("validation end", 6), ("batch end", 6), ("epoch start", 0),
    ("epoch start", 6), ("batch end", 8),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", [
    "datamodule", "datamodule, turbo", "datamodule, next epoch early", "prefetch loader, turbo",
    "prefetch loader, callback", "plain loader, turbo", "plain loader, callback",
])  # fmt: skip
def test_a_run_that_goes_on_equals_one_that_never_stopped(kind, at, tmp_path):
    if at == ("batch end", 8) and "plain" in kind:
        pytest.skip("a plain DataLoader does not know its position in the middle of an epoch")
    path, runs = tmp_path / "at.ckpt", []
    validates = 1.0 if at[0] == "validation end" else 0  # from a last step Lightning leaves the validation out
    for ckpt in (None, path):
        data, strategy, callbacks = loaders(kind)
        pl.seed_everything(0 if ckpt is None else 1, verbose=False)
        model = Net()
        run = trainer(strategy, *callbacks, Save(path, at if ckpt is None else ()), limit_val_batches=validates)
        run.fit(model, **data(), ckpt_path=ckpt, **unpickling(True if ckpt else None))
        runs.append((run, model))
    (whole, first), (rest, second) = runs
    assert second.losses == first.losses[at[1] :]
    assert len(second.losses) == EPOCHS * BATCHES - at[1]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert rest.global_step == whole.global_step
    counters = [{key: value for key, value in run.fit_loop.state_dict().items() if key != "state_dict"}
                for run in (whole, rest)]  # fmt: skip
    assert counters[0] == counters[1]


def test_a_checkpoint_that_is_saved_after_a_run_goes_on_too(tmp_path):
    models = []
    for epochs, ckpt in ((3, None), (2, None), (3, tmp_path / "two.ckpt")):
        data, strategy, _ = loaders("datamodule")
        pl.seed_everything(int(ckpt is not None), verbose=False)
        models.append(Net())
        run = trainer(strategy, max_epochs=epochs, limit_val_batches=0)
        run.fit(models[-1], **data(), ckpt_path=ckpt, **unpickling(True if ckpt else None))
        if epochs == 2:
            run.save_checkpoint(tmp_path / "two.ckpt")
    assert models[2].losses == models[0].losses[12:]


def test_another_number_of_ranks_leaves_the_random_states_alone(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("lightning_turbo.callbacks.exact_resume.rank_zero_info", said.append)
    run, path = trainer("turbo", max_epochs=1, limit_val_batches=0), tmp_path / "two.ckpt"
    run.fit(Net(), DataLoader(Numbers(), 2))
    run.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    torch.save({**saved, KEY: saved[KEY] * 2}, path)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    again = trainer("turbo", max_epochs=1, limit_val_batches=0)
    again.fit(Net(), DataLoader(Numbers(), 2), ckpt_path=path, **unpickling(True))
    assert said == [
        "ExactResume: the checkpoint has the RNG states of 2 ranks, but this run has 1: it does not restore them."
    ]
    torch.manual_seed(3)
    assert torch.rand(1) == expected


def test_one_callback_is_enough():
    run = trainer("turbo", ExactResume(), max_epochs=1, limit_val_batches=0)
    run.fit(Net(), **loaders("datamodule")[0]())
    run.fit(Net(), **loaders("datamodule")[0]())
    assert sum(isinstance(callback, ExactResume) for callback in run.callbacks) == 1


class Again(BatchSizeFinder):
    """Searches when an epoch starts, a later one too."""

    def on_fit_start(self, *args):
        pass

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch in (0, 1):
            self.scale_batch_size(trainer, module)


class AgainRate(LearningRateFinder):
    def on_fit_start(self, *args):
        pass

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            self.lr_find(trainer, module)


@pytest.mark.parametrize("search", [
    lambda: Again(mode="power", steps_per_trial=2, init_val=2, max_trials=1),
    lambda: AgainRate(num_training_steps=3, early_stop_threshold=None),
], ids=["batch size", "learning rate"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*")
def test_a_search_in_the_middle_of_a_run_is_left_to_lightning(search):
    class Data(pl.LightningDataModule):
        batch_size = 2

        def train_dataloader(self):
            return DataLoader(Numbers(), batch_size=self.batch_size, shuffle=True)

    runs = []
    for strategy, callbacks in (("auto", ()), ("turbo", ()), ("auto", (ExactResume(),))):
        pl.seed_everything(0, verbose=False)
        model = Net()
        run = trainer(strategy, *callbacks, search(), limit_val_batches=0)
        run.fit(model, datamodule=Data())
        runs.append((model.losses, run.global_step))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("strategy", ["auto", "turbo"])
def test_a_checkpoint_is_restored_after_a_run(strategy, tmp_path):
    run = trainer(strategy, max_epochs=1, limit_val_batches=0)
    run.fit(Net(), DataLoader(Numbers(), 2))
    run.save_checkpoint(tmp_path / "end.ckpt")
    weight = run.lightning_module.net[0].weight
    with torch.no_grad():
        weight.zero_()
    run._checkpoint_connector.restore(tmp_path / "end.ckpt")
    assert weight.any()
