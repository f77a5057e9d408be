"""A resumed run has the same steps as an uninterrupted one: random numbers, schedulers, counters, accumulation."""

import contextlib
import functools
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import ApexAMP, ExactAccumulation, ExactResume, Prefetch, PrefetchDataModule, PrefetchLoader
from lightning_turbo.callbacks.exact_resume import KEY
from lightning_turbo.errors import TurboWarning
from tests.data.samples import Rows, seeded
from tests.integration.recording import EACH_STRATEGY, Save, matrix
from tests.integration.resuming import ALL, check_resumed, run_all
from tests.trainers import quiet_trainer
from tests.versions import unpickling

pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*"),
    pytest.mark.filterwarnings("ignore:.*no `val_dataloader`.*"),
    pytest.mark.filterwarnings("ignore:Loading a batch draws:lightning_turbo.errors.NoEffectWarning"),
]
BATCHES, EPOCHS = 6, 3


def altered(index):
    """Return a sample with random augmentations of torch, NumPy and Python."""
    return torch.full((4,), float(index)) + torch.rand(4) + np.random.rand() + random.random()


SAMPLES = Rows(2 * BATCHES, altered)


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


def trainer(strategy, *callbacks, **settings):
    settings = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, **settings}
    return quiet_trainer(strategy=strategy, callbacks=list(callbacks), **settings)


class Data(PrefetchDataModule):
    def train_dataloader(self):
        return DataLoader(SAMPLES, batch_size=2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(SAMPLES, batch_size=4)


def plain(make):
    return lambda: {
        "train_dataloaders": make(SAMPLES, batch_size=2, shuffle=True),
        "val_dataloaders": DataLoader(SAMPLES, batch_size=4),
    }


# The keywords of ``fit``, the strategy and the callbacks that make a run exact.
KINDS = {
    "datamodule": (lambda: {"datamodule": Data()}, "auto", ()),
    "datamodule, turbo": (lambda: {"datamodule": Data()}, "turbo", ()),
    "prefetch loader, turbo": (plain(PrefetchLoader), "turbo", ()),
    "prefetch loader, callback": (plain(PrefetchLoader), "auto", (ExactResume,)),
    "plain loader, turbo": (plain(DataLoader), "turbo", ()),
    "plain loader, callback": (plain(DataLoader), "auto", (ExactResume,)),
}


def fit(kind, *callbacks, ckpt=None, seed=1, **settings):
    data, strategy, exact = KINDS[kind]
    pl.seed_everything(0 if ckpt is None else seed, verbose=False)
    model = Net()
    run = trainer(strategy, *(make() for make in exact), *callbacks, **settings)
    run.fit(model, **data(), ckpt_path=ckpt, **unpickling(True if ckpt else None))
    return run, model


AT = [
    ("on_train_epoch_end", 6), ("on_train_epoch_end", 12), ("on_validation_end", 6), ("on_train_batch_end", 6),
    ("on_train_epoch_start", 0), ("on_train_epoch_start", 6), ("on_train_batch_end", 8),
]  # fmt: skip


@matrix(("kind", "at"), list(KINDS), AT)
def test_a_resumed_run_equals_an_uninterrupted_one(kind, at, tmp_path):
    hook, batches = at
    if batches == 8 and "plain" in kind:
        pytest.skip("a plain DataLoader does not know its position in the middle of an epoch")
    path = tmp_path / "at.ckpt"
    validates = 1.0 if hook in ("on_validation_end", "on_train_batch_end") else 0
    whole, first = fit(kind, Save(path, batches, hook), limit_val_batches=validates)
    rest, second = fit(kind, ckpt=path, limit_val_batches=validates)
    assert second.losses == first.losses[batches:]
    assert len(second.losses) == EPOCHS * BATCHES - batches
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert rest.global_step == whole.global_step
    counters = [{**run.fit_loop.state_dict(), "state_dict": {}} for run in (whole, rest)]
    assert counters[0] == counters[1]


@pytest.mark.parametrize("at", [("on_train_batch_end", 6), ("on_train_epoch_start", 6)])
def test_a_plain_loader_resumes_at_the_end_of_an_epoch(at, tmp_path):
    test_a_resumed_run_equals_an_uninterrupted_one("plain loader, turbo", at, tmp_path)


MADE_AGAIN = {
    "shuffled": lambda kept: {"shuffle": True},
    "with a new generator": lambda kept: {"shuffle": True, "generator": seeded(1)},
    "with a shared generator": lambda kept: {"shuffle": True, "generator": kept},
    "in order": lambda kept: {},
}


@pytest.mark.parametrize("batches", [6, 12])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", MADE_AGAIN)
def test_reloaded_dataloaders_start_a_resumed_epoch_once(kind, every, batches, tmp_path):
    """A checkpoint of the first hook is saved after the loaders were created, which draws random numbers."""
    path, losses = tmp_path / "at.ckpt", []
    for ckpt in (None, path):
        pl.seed_everything(0 if ckpt is None else 1, verbose=False)
        kept = seeded(2)

        class Again(PrefetchDataModule):
            def train_dataloader(self, kept=kept):
                return DataLoader(SAMPLES, 2, **MADE_AGAIN[kind](kept))

        saves = [] if ckpt else [Save(path, batches, "on_train_epoch_start")]
        model, settings = Net(), {"limit_val_batches": 0, "reload_dataloaders_every_n_epochs": every}
        trainer("turbo", *saves, **settings).fit(model, Again(), ckpt_path=ckpt, **unpickling(True if ckpt else None))
        losses.append(model.losses)
    whole, rest = losses
    assert rest == whole[batches:]


@pytest.mark.parametrize("batches", [2, 3, 6, 8])
@pytest.mark.parametrize("kind", ["datamodule", "prefetch loader, turbo"])
def test_an_unfinished_step_is_repeated_with_the_same_random_numbers(kind, batches, tmp_path):
    """Also right after a validation, which Lightning would repeat, and draw random numbers for it."""
    path, settings = tmp_path / "at.ckpt", {"val_check_interval": 2, "limit_val_batches": 1.0}
    whole, first = fit(kind, Save(path, batches, "on_train_batch_start"), **settings)
    rest, second = fit(kind, ckpt=path, **settings)
    assert second.losses == first.losses[batches:]
    assert rest.fit_loop.epoch_loop._batches_that_stepped == whole.fit_loop.epoch_loop._batches_that_stepped


@pytest.mark.filterwarnings("ignore:The checkpoint was saved after 2 of 4 batches")
def test_a_step_within_a_scheduler_interval_is_logged_once(tmp_path):
    path, runs = tmp_path / "at.ckpt", []
    for ckpt in (None, path):
        scheduled = GradientAccumulationScheduler({0: 4})
        saves = [] if ckpt else [Save(path, 2, "on_train_batch_start")]
        runs.append(fit("prefetch loader, turbo", scheduled, *saves, ckpt=ckpt, limit_val_batches=0)[0])
    steps = [(run.global_step, run.fit_loop.epoch_loop._batches_that_stepped) for run in runs]
    assert steps == [(6, 6), (6, 6)]


class Waiting(Net):
    """Its learning rate is halved at the end of an epoch whose monitored value is not the best so far."""

    def __init__(self, monitor):
        super().__init__()
        self.monitor, self.rates = monitor, []

    def log_of_epoch(self, name):
        self.log(name, (2.0, 1.0, 2.0)[self.current_epoch], on_step=False, on_epoch=True, batch_size=2)

    def training_step(self, batch, index):
        self.log_of_epoch("trained")
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.log_of_epoch("validated")

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitor}}


def fit_waiting(monitor, strategy, *callbacks, ckpt=None, **settings):
    pl.seed_everything(0 if ckpt is None else 1, verbose=False)
    model = Waiting(monitor)
    run = trainer(strategy, *(callbacks if strategy == "turbo" else (ExactResume(), *callbacks)), **settings)
    run.fit(model, **plain(PrefetchLoader)(), ckpt_path=ckpt, **unpickling(True if ckpt else None))
    return model, run.lr_scheduler_configs[0].scheduler.state_dict(), run.fit_loop.epoch_loop.state_dict()


@functools.cache
def never_stopped(monitor, strategy):
    return fit_waiting(monitor, strategy)


@pytest.mark.parametrize("monitor", ["validated", "trained"])
@pytest.mark.parametrize(("hook", "batches"), [
    ("on_train_epoch_end", 6), ("on_train_epoch_end", 12), ("on_validation_end", 6), ("on_validation_end", 12),
    ("on_train_epoch_start", 6), ("on_train_batch_end", 8), ("on_train_batch_end", 12), ("on_train_end", 12),
])  # fmt: skip
def test_reduce_lr_on_plateau_is_updated_once_per_epoch(hook, batches, monitor, tmp_path):
    path, settings = tmp_path / "at.ckpt", {}
    strategy = "auto" if batches == 12 else "turbo"
    ends = {"max_epochs": 2} if hook == "on_train_end" else {}
    whole, *states = never_stopped(monitor, strategy)
    fit_waiting(monitor, strategy, Save(path, batches, hook), **settings, **ends)
    rest, *resumed = fit_waiting(monitor, strategy, ckpt=path, **settings)
    assert rest.rates == whole.rates[batches:]
    assert rest.losses == whole.losses[batches:]
    assert resumed[0] == states[0]
    assert resumed[1]["scheduler_progress"] == states[1]["scheduler_progress"]


class WaitingForSteps(Waiting):
    """Its learning rate is halved after some steps without a better value."""

    def configure_optimizers(self):
        settings = super().configure_optimizers()
        settings["lr_scheduler"] |= {"interval": "step", "frequency": 2, "strict": False}
        return settings

    def training_step(self, batch, index):
        self.log("trained", batch.mean(), on_step=True, on_epoch=False)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return Net.training_step(self, batch, index)


@matrix(("interval", "batches", "hook"), [1.0, 2], [3, 6, 8, 12], [
    "on_train_batch_end", "on_train_batch_start", "on_train_epoch_end", "on_validation_epoch_end", "on_validation_end",
])  # fmt: skip
def test_reduce_lr_on_plateau_per_step_is_updated_once(interval, batches, hook, tmp_path):
    path, runs = tmp_path / "at.ckpt", []
    for ckpt in (None, path):
        pl.seed_everything(0 if ckpt is None else 1, verbose=False)
        model, saves = WaitingForSteps("trained"), [] if ckpt else [Save(path, batches, hook)]
        run = trainer("turbo", *saves, val_check_interval=interval)
        if ckpt is not None and not path.exists():
            return  # that hook is not called there
        run.fit(model, **plain(PrefetchLoader)(), ckpt_path=ckpt, **unpickling(True if ckpt else None))
        logged_step = run.fit_loop.epoch_loop._batches_that_stepped
        runs.append((model, (run.lr_scheduler_configs[0].scheduler.state_dict(), logged_step)))
    (whole, end), (rest, resumed) = runs
    assert len(set(whole.rates)) > 2
    assert rest.rates == whole.rates[batches:]
    assert rest.losses == whole.losses[batches:]
    assert resumed == end


class Fail(pl.Callback):
    """Ends a run with an error in a hook after a given number of batches, and saves a checkpoint."""

    def __init__(self, path, batches, hook):
        def fail(trainer, *_):
            if trainer.fit_loop.epoch_loop.batch_progress.total.processed == batches:
                raise InterruptedError

        setattr(self, hook, fail)
        self.on_exception = lambda trainer, *_: trainer.save_checkpoint(path)


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize(("hook", "batches"), [
    ("on_train_batch_end", 4), ("on_train_batch_end", 8), ("on_train_epoch_end", 6), ("on_validation_end", 12),
])  # fmt: skip
def test_the_monitored_value_of_a_scheduler_is_saved_after_an_error(hook, batches, interval, tmp_path):
    path, runs = tmp_path / "at.ckpt", []
    for stopped, ckpt in ((False, None), (True, None), (False, path)):
        pl.seed_everything(0 if ckpt is None else 1, verbose=False)
        model = Waiting("trained") if interval == "epoch" else WaitingForSteps("trained")
        run = trainer("turbo", Prefetch(), *([Fail(path, batches, hook)] if stopped else []))
        with pytest.raises(InterruptedError) if stopped else contextlib.nullcontext():
            run.fit(model, **plain(PrefetchLoader)(), ckpt_path=ckpt, **unpickling(True if ckpt else None))
        runs.append((model, run.lr_scheduler_configs[0].scheduler.state_dict()))
    (whole, end), _, (rest, resumed) = runs
    assert end["_last_lr"][0] < whole.rates[0]
    assert rest.rates == whole.rates[batches:]
    assert resumed == end


@pytest.mark.parametrize("batches", [6, 8])
def test_a_checkpoint_without_metrics_loses_the_update_at_the_end_of_its_epoch(batches, tmp_path):
    path = tmp_path / "at.ckpt"
    hook = "on_train_epoch_end" if batches == 6 else "on_train_batch_end"
    fit_waiting("validated", "turbo", Save(path, batches, hook))
    saved = torch.load(path, weights_only=True)
    for each in saved[KEY]:
        each.update(metrics={}, plateaus=False)
    torch.save(saved, path)
    rest, scheduler, _ = fit_waiting("validated", "turbo", ckpt=path)
    assert len(rest.rates) == EPOCHS * BATCHES - batches
    assert scheduler["last_epoch"] == EPOCHS - (batches == BATCHES)


def test_a_checkpoint_saved_after_a_run_resumes(tmp_path):
    path = tmp_path / "two.ckpt"
    fit("datamodule", max_epochs=2, limit_val_batches=0)[0].save_checkpoint(path)
    whole, rest = (fit("datamodule", ckpt=ckpt, limit_val_batches=0)[1] for ckpt in (None, path))
    assert rest.losses == whole.losses[12:]


def test_the_random_states_of_missing_ranks_are_dropped(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("lightning_turbo.callbacks.exact_resume.rank_zero_info", said.append)
    path = tmp_path / "two.ckpt"
    fit("plain loader, turbo", max_epochs=1, limit_val_batches=0)[0].save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    (first,) = saved[KEY]
    second = {**first, "random": {**first["random"], "torch": torch.Generator().manual_seed(5).get_state()}}
    torch.save({**saved, KEY: [{**each, "ranks": 2} for each in (first, second)]}, path)
    losses = [fit("plain loader, turbo", ckpt=path, seed=seed, limit_val_batches=0)[1].losses for seed in (1, 2)]
    assert said == ["turbo: The random states of the last 1 of 2 ranks are dropped."] * 2
    assert losses[0] == losses[1] == fit("plain loader, turbo", limit_val_batches=0)[1].losses[BATCHES:]


def test_the_random_states_of_new_ranks_are_derived_from_rank_0(tmp_path, monkeypatch):
    """A second rank of a run that had one rank: the seed of its own process has no effect."""
    said, places = [], "lightning_turbo.callbacks.exact_resume."
    path = tmp_path / "one.ckpt"
    fit("plain loader, turbo", max_epochs=1, limit_val_batches=0)[0].save_checkpoint(path)
    monkeypatch.setattr(places + "rank_zero_info", said.append)
    losses = {}
    for rank, size in ((0, 2), (1, 2), (2, 3)):
        monkeypatch.setattr(places + "rank_and_size", lambda rank=rank, size=size: (rank, size))
        runs = [fit("plain loader, turbo", ckpt=path, seed=seed, limit_val_batches=0)[1].losses for seed in (1, 2)]
        assert runs[0] == runs[1]
        losses[rank] = tuple(runs[0])
    assert len(set(losses.values())) == 3
    assert said[0] == "turbo: The random states of the last 1 of 2 ranks follow from those of rank 0."


def test_one_callback_is_enough():
    run = trainer("turbo", ExactResume(), max_epochs=1, limit_val_batches=0)
    run.fit(Net(), datamodule=Data())
    run.fit(Net(), datamodule=Data())
    assert sum(isinstance(callback, ExactResume) for callback in run.callbacks) == 1


class AgainSize(BatchSizeFinder):
    """Runs the finder at the start of each epoch."""

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
    lambda: AgainSize(mode="power", steps_per_trial=2, init_val=2, max_trials=1),
    lambda: AgainRate(num_training_steps=3, early_stop_threshold=None),
    lambda: BatchSizeFinder(mode="power", steps_per_trial=2, init_val=2, max_trials=1),
    lambda: BatchSizeFinder(mode="binsearch", steps_per_trial=2, init_val=2, max_trials=2),
    lambda: LearningRateFinder(num_training_steps=3, early_stop_threshold=None),
], ids=["batch size later", "learning rate later", "batch size", "batch size by halves", "learning rate"])  # fmt: skip
@pytest.mark.parametrize("limit", [0, 1.0], ids=["", "with validation"])
@pytest.mark.filterwarnings("ignore:.*")
def test_checkpoints_of_the_batch_size_finder_and_lr_finder_are_left_to_lightning(search, limit):
    """The file that Lightning saves before a search and restores after it is not a checkpoint to resume from."""

    class Sized(pl.LightningDataModule):
        batch_size = 2

        def train_dataloader(self):
            return DataLoader(SAMPLES, batch_size=self.batch_size, shuffle=True)

        def val_dataloader(self):  # Lightning 2.5.0 calls it
            return DataLoader(SAMPLES)

    runs = []
    for strategy, callbacks in (("auto", ()), ("turbo", ()), ("auto", (ExactResume(),))):
        pl.seed_everything(0, verbose=False)
        model = Net()
        run = trainer(strategy, *callbacks, search(), limit_val_batches=limit)
        run.fit(model, datamodule=Sized())
        runs.append((model.losses, run.global_step, run.fit_loop.epoch_loop._batches_that_stepped))
    assert runs[0] == runs[1] == runs[2]


@EACH_STRATEGY
def test_a_checkpoint_is_restored_after_a_run(strategy, tmp_path):
    run = trainer(strategy, max_epochs=1, limit_val_batches=0)
    run.fit(Net(), DataLoader(SAMPLES, 2))
    run.save_checkpoint(tmp_path / "end.ckpt")
    weight = run.lightning_module.net[0].weight
    with torch.no_grad():
        weight.zero_()
    run._checkpoint_connector.restore(tmp_path / "end.ckpt")
    assert weight.any()


ROWS = Rows(2 * BATCHES, functools.partial(torch.full, (4,), dtype=torch.float32))


@pytest.mark.parametrize("batches", [6, 8, 12])
def test_persistent_workers_keep_their_seed_after_a_resume(batches, tmp_path):
    """A new process draws the seed again, between the checkpoint and the next order."""

    def run(*callbacks, ckpt=None):
        pl.seed_everything(0 if ckpt is None else 1, verbose=False)
        model, loader = Net(), PrefetchLoader(ROWS, 2, shuffle=True, num_workers=1, persistent_workers=True)
        trainer("turbo", *callbacks).fit(model, loader, ckpt_path=ckpt, **unpickling(True if ckpt else None))
        loader.close()
        return model.losses

    path = tmp_path / "at.ckpt"
    whole = run(Save(path, batches, "on_train_batch_end"))
    assert run(ckpt=path) == whole[batches:]


# Levels and optimizers, bit for bit.

QUICK = ["O0-sgd-bfloat16", "O1-adamw_fused-float16", "O2-adam-bfloat16", "O2-sgd-float16", "O3-adamw-bfloat16"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in ALL]
)
def test_a_new_trainer_resumes_bit_for_bit(case, tmp_path):
    check_resumed(case, run_all(case, tmp_path))


# A checkpoint in the middle of an accumulation window holds no gradients, and the resumed run warns about it.


class Halving(pl.LightningModule):
    """A batch may have an infinite loss or none. The learning rate is halved at each step."""

    def __init__(self, poison, empty):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.poison, self.empty = poison, empty
        self.rates = []

    def training_step(self, batch, index):
        if index in self.empty:
            return None
        loss = self.net(batch[0]).float().square().mean() * 0.02
        return loss * torch.inf if index in self.poison else loss

    def on_train_batch_end(self, *_):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit_halving(plugin, *callbacks, ckpt=None, poison=(), empty=(), **flags):
    module, inputs = Halving(poison, empty), torch.randn(24, 4, generator=seeded(1))
    trainer = quiet_trainer(max_epochs=1, plugins=plugin, callbacks=list(callbacks), **flags)
    trainer.fit(module, PrefetchLoader(TensorDataset(inputs), batch_size=4), ckpt_path=ckpt)
    return module


@pytest.mark.parametrize(("level", "exact"), [
    (None, True), ("O1", True), ("O1", False), ("O2", False), ("O3", False),
])  # fmt: skip
def test_an_accumulation_window_restarts_with_the_remaining_batches(level, exact, tmp_path):
    path, flags = tmp_path / "window.ckpt", {"accumulate_grad_batches": 4}
    ours = [ExactAccumulation()] if exact else []
    fit_halving(level and ApexAMP(level), *ours, Save(path, 2), **flags)
    with pytest.warns(TurboWarning, match=r"saved after 2 of 4 batches of an accumulation window.*restarts"):
        resumed = fit_halving(level and ApexAMP(level), *ours, ckpt=path, **flags)
    assert all(p.isfinite().all() for p in resumed.parameters())
    assert not torch.equal(resumed.net.weight, torch.load(path, weights_only=True)["state_dict"]["net.weight"])


class Saves(ModelCheckpoint):
    """Records after how many batches it saves."""

    def __init__(self, folder):
        super().__init__(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        self.batches = []

    def _save_checkpoint(self, trainer, filepath):
        self.batches.append(trainer.fit_loop.epoch_loop.batch_progress.current.processed)
        super()._save_checkpoint(trainer, filepath)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_saves_checkpoints_at_the_same_batches(tmp_path):
    flags = {"accumulate_grad_batches": 2, "enable_checkpointing": True}
    whole, rest = Saves(tmp_path / "whole"), Saves(tmp_path / "rest")
    fit_halving(None, ExactResume(), whole, **flags)
    assert whole.batches == [2, 4, 6]
    fit_halving(None, ExactResume(), rest, ckpt=tmp_path / "whole" / "step=1.ckpt", **flags)
    assert rest.batches == [4, 6]


@pytest.mark.parametrize(("saved", "batches", "now", "said"), [(4, 2, 2, "2 of 4"), (2, 2, 4, None)])
def test_an_accumulation_window_is_counted_by_the_length_at_the_save(saved, batches, now, said, tmp_path):
    fit_halving(None, ExactResume(), Save(tmp_path / "c", batches), accumulate_grad_batches=saved)
    with pytest.warns(TurboWarning, match=f"saved after {said} batches") if said else contextlib.nullcontext():
        fit_halving(ApexAMP("O1"), ExactResume(), ckpt=tmp_path / "c", accumulate_grad_batches=now)


@pytest.mark.parametrize(("callbacks", "level"), [
    ([ExactResume], None), ([ExactResume, ExactAccumulation], None), ([ExactResume, ExactAccumulation], "O1"),
])  # fmt: skip
def test_a_checkpoint_within_an_accumulation_window_warns_once(callbacks, level, tmp_path, recwarn):
    for path in (None, tmp_path / "c"):
        saves = [] if path else [Save(tmp_path / "c", 2)]
        ours = [kind() for kind in callbacks] + saves
        fit_halving(level and ApexAMP(level), *ours, ckpt=path, accumulate_grad_batches=4)
    assert sum("2 of 4 batches of an accumulation window" in str(each.message) for each in recwarn) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_checkpoint_after_a_finished_step_resumes_exactly(level, tmp_path):
    path, settings = tmp_path / "step.ckpt", {"accumulate_grad_batches": 2, "poison": [1]}
    whole = fit_halving(ApexAMP(level, dtype=torch.float16), Save(path, 4), **settings)
    resumed = fit_halving(ApexAMP(level, dtype=torch.float16), ckpt=path, **settings)
    assert torch.equal(resumed.net.weight, whole.net.weight)
    assert resumed.rates == whole.rates[4:]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_a_loss_after_a_skipped_step_is_not_a_skipped_step(tmp_path):
    path, settings = tmp_path / "c", {"poison": [1], "empty": [2]}
    whole = fit_halving(ApexAMP("O2", dtype=torch.float16), Save(path, 2), **settings)
    resumed = fit_halving(ApexAMP("O2", dtype=torch.float16), ckpt=path, **settings)
    assert whole.rates == [0.5, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert resumed.rates == whole.rates[2:]
