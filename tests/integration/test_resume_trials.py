"""Runs with random settings, stopped and resumed several times, compared with uninterrupted ones."""

import multiprocessing
import os
import random
import signal

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.optim import lr_scheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_turbo import ExactResume, Preemption, Prefetch, PrefetchDataModule, PrefetchLoader, SeededSampler
from lightning_turbo.data import LengthBatchSampler, WeightedSampler
from lightning_turbo.data.loading import prefetcher
from tests.data.samples import Rows, Stream, seeded
from tests.integration.resuming import assert_same
from tests.leftovers import nothing_is_left, prefetch_threads
from tests.trainers import quiet_trainer
from tests.versions import KNOWS_WEIGHTS_ONLY, unpickling

pytestmark = [
    # Warnings of Lightning, torch and this package about unusual settings.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="Lightning 2.6 finishes an interrupted validation"),
]
LENGTH = 23


class Stop(Exception):
    """Ends a run."""


# Datasets and orders.


def row(index):
    return torch.full((4,), index / 10), index


def noisy(index):
    """Return a row with a random augmentation."""
    return torch.full((4,), index / 10) + torch.rand(4), index


class Streamed(IterableDataset):
    """Rows as a stream that is divided among worker processes."""

    def __iter__(self):
        return map(row, Stream(LENGTH))


class WithPlace(IterableDataset):
    """Rows as a stateful stream."""

    def __init__(self):
        self.at, self.loaded = 0, False

    def __iter__(self):
        own = list(Stream(LENGTH))
        self.at, self.loaded = self.at if self.loaded else 0, False
        while self.at < len(own):
            self.at += 1
            yield row(own[self.at - 1])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.loaded = state["at"], True


def arrays():
    return TensorDataset(torch.arange(4.0 * LENGTH).view(LENGTH, 4) / 100, torch.arange(LENGTH))


TRAIN = {
    "in order": lambda make, data, own: make(data),
    "shuffled": lambda make, data, own: make(data, shuffle=True, generator=own()),
    "replaced": lambda make, data, own: make(data, sampler=RandomSampler(data, True, 17, own())),
    "weighted": lambda make, data, own: make(data, sampler=WeightedRandomSampler([1.0] * LENGTH, 19, True, own())),
    "subset": lambda make, data, own: make(data, sampler=SubsetRandomSampler(range(3, LENGTH), own())),
    "distributed": lambda make, data, own: make(data, sampler=DistributedSampler(data, 2, 1)),
    "seeded": lambda make, data, own: make(data, sampler=SeededSampler(data, 5)),
    "our weighted": lambda make, data, own: make(data, sampler=WeightedSampler([1.0, 2.0] * 11 + [1.0], 19, seed=3)),
    "by length": lambda make, data, own: make(
        data, batch_sampler=LengthBatchSampler([1 + i % 7 for i in range(LENGTH)], batch_size=3, seed=2)
    ),
    "batches": lambda make, data, own: make(
        data, batch_sampler=BatchSampler(RandomSampler(data, generator=own()), 3, False)
    ),
    "arrays": lambda make, data, own: make(arrays(), shuffle=True, generator=own()),
    "stream": lambda make, data, own: make(Streamed()),
    "stateful stream": lambda make, data, own: make(WithPlace()),
    "two": lambda make, data, own: [make(data, shuffle=True, generator=own()), make(arrays(), shuffle=True)],
    "cycled": lambda make, data, own: CombinedLoader(
        {"a": make(data, shuffle=True), "b": make(Rows(9, row), shuffle=True, generator=own())}, "max_size_cycle"
    ),
    "unequal": lambda make, data, own: CombinedLoader(
        {"a": make(data, shuffle=True), "b": make(Rows(9, row))}, "max_size"
    ),
}  # fmt: skip
VALIDATION = {
    "none": lambda cls: None,
    "in order": lambda cls: cls(Rows(7, row), 2),
    "shuffled": lambda cls: cls(Rows(7, row), 2, shuffle=True),
    "with a generator": lambda cls: cls(Rows(7, row), 2, shuffle=True, generator=seeded(3)),
    "whose dataset draws": lambda cls: cls(Rows(7, noisy), 2),
    "two": lambda cls: [cls(Rows(7, row), 2, shuffle=True), cls(Rows(4, noisy), 2)],
    "of a worker process": lambda cls: cls(Rows(7, row), 2, shuffle=True, num_workers=1),
}
SCHEDULERS = {
    "none": lambda optimizer: None,
    "epochs": lambda optimizer: {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.8)},
    "second epochs": lambda optimizer: {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5), "frequency": 2},
    "steps": lambda optimizer: {"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.1, 200), "interval": "step"},
    "third steps": lambda optimizer: {
        "scheduler": lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3), "interval": "step", "frequency": 3
    },
    "plateau": lambda optimizer: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0), "monitor": "val",
        "strict": False,
    },
    "plateau of steps": lambda optimizer: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=1), "monitor": "loss",
        "interval": "step", "frequency": 2, "strict": False,
    },
}  # fmt: skip
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
}


class Net(LightningModule):
    """Records each step and validation, also in its checkpoints."""

    def __init__(self, optimizer, scheduler):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.made = optimizer, scheduler
        self.trained, self.validated = {}, {}
        self.has_begun = False

    def on_train_start(self):
        self.has_begun = True

    def loss(self, rows):
        return self.net(rows).square().mean()

    def training_step(self, batch, index):
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch[0], (list, tuple)) else [batch]
        parts = [part for part in parts if part is not None]
        loss = torch.stack([self.loss(rows) for rows, _ in parts]).sum()
        self.log("loss", loss, on_step=True, on_epoch=False)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        seen = [numbers.tolist() for _, numbers in parts]
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.trained[batches] = [self.current_epoch, index, self.global_step, seen, loss.item(), rate]
        return loss

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.validated[self.trainer.fit_loop.epoch_loop.batch_progress.total.processed] = []

    def validation_step(self, batch, index, dataloader_idx=0):
        loss = self.loss(batch[0]) + torch.rand(())
        self.log("val", loss, batch_size=4, add_dataloader_idx=False) if not dataloader_idx else None
        if not self.trainer.sanity_checking:
            list(self.validated.values())[-1].append([dataloader_idx, index, batch[1].tolist(), loss.item()])

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.made[0]](self.parameters())
        scheduler = SCHEDULERS[self.made[1]](optimizer)
        return optimizer if scheduler is None else {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = dict(self.trained), {at: list(parts) for at, parts in self.validated.items()}

    def on_load_checkpoint(self, checkpoint):
        self.trained, self.validated = checkpoint["seen"]


# Ways to stop a run.

HOOKS = [
    "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end",
    "on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end",
]  # fmt: skip


class Stops(Callback):
    """Stops a run after a given number of calls of a hook, if no accumulation window is open."""

    def __init__(self, hook, calls, act):
        self.left, self.act, self.acted = calls, act, False
        setattr(self, hook, self.count)

    def count(self, trainer, *_):
        if trainer.sanity_checking or self.acted:
            return
        self.left -= 1
        progress = trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.processed
        whole = progress.is_last_batch and progress.current.ready == done
        if self.left <= 0 and (whole or done % trainer.accumulate_grad_batches == 0):
            self.acted = True
            self.act(trainer)


class SaveOnException(Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, module, exception):
        if isinstance(exception, Stop):
            trainer.save_checkpoint(self.path)


def validates_in_windows(trainer):
    """Return whether a validation may run before an accumulation window ends."""
    has_windows = trainer["accumulate_grad_batches"] > 1 or "schedule" in trainer
    return has_windows and trainer["val_check_interval"] != 1.0


def raise_stop(trainer):
    raise Stop


def stopping(draw, drew, folder):
    """Return callbacks that stop a run at a random moment and in a random way."""
    way = draw.choice(["save", "error", "signal", "files"])
    # A step that was interrupted is repeated with other random numbers.
    within = [] if way in ("save", "error") else ["on_before_backward"]
    hook = draw.choice(HOOKS + within)
    calls = draw.randint(1, 3 if "epoch" in hook else 12 if "train" in hook else 6)
    if way == "error":
        return [Stops(hook, calls, raise_stop), SaveOnException(folder / "error.ckpt")]
    if way == "signal":
        return [Preemption(), Stops(hook, calls, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))]
    if way == "files":
        when = draw.choice([{"every_n_train_steps": draw.randint(1, 4)}, {"every_n_epochs": 1}])
        if "every_n_epochs" in when:
            when["save_on_train_epoch_end"] = draw.choice([None, True, False])
            if validates_in_windows(drew["trainer"]):
                # "A checkpoint from the middle of an accumulation window holds no gradients", as docs/resume.md says.
                when["save_on_train_epoch_end"] = True
        return [ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, **when), Stops(hook, calls, raise_stop)]

    def save(trainer):
        trainer.save_checkpoint(folder / "save.ckpt")
        raise Stop

    return [Stops(hook, calls, save)]


# The runs.


def drawn(draw):
    """Return the settings of all attempts of a run: those of its loaders, its network and its Trainer."""
    name = draw.choice(list(TRAIN))
    streams = "stream" in name
    workers = draw.choice([0, 0, 0, 0, 1, 2])
    stays = workers > 0 and draw.random() < 0.5
    settings = {"num_workers": workers, "persistent_workers": stays}
    batch = {"batch_size": draw.randint(2, 4), "drop_last": draw.random() < 0.3}
    load = noisy if not workers and draw.random() < 0.4 else row
    generator = draw.choice([None, 4])
    route = draw.choice(["loader", "callback", "datamodule"])
    cls = PrefetchLoader if route == "loader" else DataLoader

    def make(data, **given):
        return cls(data, **settings, **({} if "batch_sampler" in given else batch), **given)

    kind = draw.choice(list(VALIDATION))

    def loaders():
        own = TRAIN[name](make, Rows(LENGTH, load), lambda: None if generator is None else seeded(generator))
        return own, VALIDATION[kind](cls)

    trainer = {"max_epochs": draw.randint(1, 4), "strategy": draw.choice(["auto", "turbo"])}
    if draw.random() < 0.2:
        trainer |= {"max_steps": draw.randint(5, 15), "max_epochs": -1}
    trainer["num_sanity_val_steps"] = draw.choice([0, 2])
    trainer["accumulate_grad_batches"] = draw.choice([1, 1, 2, 3])
    trainer["limit_train_batches"] = draw.choice([1.0, 1.0, 1.0, 5, 3])
    trainer["val_check_interval"] = draw.choice([1.0, 1.0, 1, 2, 3] + [0.5] * (not streams))
    if draw.random() < 0.2:
        trainer["check_val_every_n_epoch"] = 2
    elif draw.random() < 0.15:
        trainer |= {"check_val_every_n_epoch": None, "val_check_interval": draw.randint(1, 9)}
    trainer["reload_dataloaders_every_n_epochs"] = draw.choice([0, 0, 0, 1, 2])
    if trainer["strategy"] == "turbo" and trainer["accumulate_grad_batches"] == 1 and draw.random() < 0.2:
        trainer["schedule"] = {0: 1, 1: 2}
    net = draw.choice(list(OPTIMIZERS)), draw.choice(list(SCHEDULERS))
    return {"train": name, "loader": settings | batch, "generator": generator, "load": load.__name__, "route": route,
            "validation": kind, "trainer": trainer, "net": net, "loaders": loaders}  # fmt: skip


def run(drew, seed, folder, callbacks=(), path=None):
    """Run one attempt to its end or until it is stopped. Return the Trainer and whether it reached the end."""

    class Data(PrefetchDataModule if drew["route"] == "datamodule" else LightningDataModule):
        def train_dataloader(self):
            return drew["loaders"]()[0]

        def val_dataloader(self):
            return drew["loaders"]()[1]

    random.seed(seed)
    torch.manual_seed(seed)
    settings = dict(drew["trainer"])
    schedule = settings.pop("schedule", None)
    own = [GradientAccumulationScheduler(schedule)] if schedule else []
    own += {"loader": [ExactResume()], "callback": [Prefetch()], "datamodule": []}[drew["route"]]
    trainer = quiet_trainer(
        callbacks=[*own, *callbacks], default_root_dir=folder, enable_checkpointing=True, **settings
    )  # fmt: skip
    data = Data()
    if drew["validation"] == "none":
        data.val_dataloader = LightningDataModule.val_dataloader.__get__(data)
    model = Net(*drew["net"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(model, datamodule=data, ckpt_path=path, **unpickling(True if path else None))
    except (Stop, SystemExit):
        return trainer, False
    finally:
        for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
            signal.signal(getattr(signal, name), before if name == "SIGTERM" else signal.SIG_DFL)
    return trainer, True


def state(trainer):
    """Return everything that must be equal at the end of two runs."""
    model = trainer.lightning_module
    return {
        "trained": {at: repr(each) for at, each in model.trained.items()},  # as strings, so that nan equals nan
        "validated": {at: repr(each) for at, each in model.validated.items()},
        "module": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "place": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped],
    }


def trial(number, folder, monkeypatch):
    """Compare a run with random settings with one that is stopped up to four times, and return the number of stops."""
    draw = random.Random(number)
    drew = drawn(draw)
    if draw.random() < 0.5:
        monkeypatch.setattr(prefetcher, "MIN_SECONDS", 0.0)
    folder.mkdir()
    whole, ended = run(drew, number, folder / "whole")
    assert ended
    path, stops = None, 0
    for life in range(draw.randint(1, 4)):
        own = folder / str(life)
        trainer, ended = run(drew, 1000 + life if path else number, own, stopping(draw, drew, own), path)
        stops += not ended
        if ended:
            break
        path = Preemption.resume_path(own) or path
    else:
        trainer, ended = run(drew, 2000 if path else number, folder / "rest", path=path)
        assert ended
    end, expected = state(trainer), state(whole)
    if not trainer.lightning_module.has_begun:
        # "Where no step of the whole run is left, `fit` ends at once", as docs/resume.md says.
        end, expected = ({name: each[name] for name in ("trained", "module")} for each in (end, expected))
    assert_same(end, expected, f"{number}: {stops} stops, {drew}")
    del trainer, whole  # with persistent worker processes
    if multiprocessing.active_children() or prefetch_threads():
        nothing_is_left()
    return stops


@pytest.mark.parametrize("first", [0, pytest.param(9, marks=pytest.mark.slow)])
def test_random_runs_stopped_several_times_equal_uninterrupted_ones(first, tmp_path, monkeypatch):
    assert sum(trial(number, tmp_path / str(number), monkeypatch) for number in range(first, first + 3)) >= 2


WHERE = {
    120: "before a first batch, twice",
    147: "within a validation of worker processes",
    179: "after a validation, twice",
    322: "two loaders before their first batch",
    403: "in the validation of a last batch",
}


# Validations of worker processes are in callbacks/test_validation_after_resume.py, too.
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] * (n == 147)) for n in WHERE], ids=WHERE.values()
)
def test_a_run_that_is_stopped_where_nothing_of_a_pass_is_used(number, tmp_path, monkeypatch):
    assert trial(number, tmp_path / str(number), monkeypatch) >= 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 1000, 30))
def test_nine_hundred_random_runs_stopped_several_times_equal_uninterrupted_ones(first, tmp_path, monkeypatch):
    stops = sum(trial(number, tmp_path / str(number), monkeypatch) for number in range(first, first + 30))
    assert stops >= 15, "runs are compared that hardly stop; the draws give about one stop per run"
