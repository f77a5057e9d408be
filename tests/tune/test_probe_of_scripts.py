"""A measured script reads the values of its own Trainer, and errors caused by muting are explained."""

import dataclasses
import os
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_turbo.measure import RoundTimer, SkippedError
from lightning_turbo.tune.candidates import combine, list_candidates
from lightning_turbo.tune.worker import measure_program

pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
SCRIPT = """
import math, os, time, torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

STEPS_FILE = os.path.abspath("steps")

def note(path, text):
    with open(path, "a") as file:
        file.write(text)

class M(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = torch.nn.Linear(8, 4), []
    def training_step(self, batch, batch_idx):
        note(STEPS_FILE, f"{self.current_epoch}.{batch_idx} ")
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        STEP
        return loss
    def validation_step(self, batch, batch_idx):
        self.seen.append(batch_idx)
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": SCHEDULE, "interval": "step"}]
    def on_train_epoch_start(self):
        EPOCH
    def on_train_epoch_end(self):
        END

class Own(Logger):
    name, version = "own", 3
    def __init__(self): super().__init__(); self.rate, self.wrote = 5, open("wrote", "w").close()
    def log_metrics(self, metrics, step=None): note("wrote", "a metric")
    def log_hyperparams(self, params): pass

class Rollouts(IterableDataset):
    # Steps that the policy takes before each epoch; how many batches they make depends on it.
    lengths = []
    def __iter__(self):
        time.sleep(0.05)
        length = LENGTHS[len(self.lengths) % len(LENGTHS)]
        self.lengths.append(length)
        for _ in range(length):
            yield module.net.weight.detach().mean(0), len(self.lengths) % 4

data = DataLoader(TensorDataset(torch.randn(32, 8), torch.arange(32) % 4), 4)
module = M()
settings = {"accelerator": "cpu", "max_epochs": 3, "logger": False}
settings |= {"enable_progress_bar": False, "enable_model_summary": False}
Trainer(**{**settings, ARGUMENTS}).fit(module, TRAIN, data)
"""
CONSTANT = "torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1)"
TABLE = {each.name: each for each in list_candidates(2)}


class Ended(BaseException):
    """Raised instead of ending this process."""


def run(monkeypatch, *, names=(), look=0.0, steps=30, lengths=(), **places):
    """Measure the script in this process, with lines inserted in its places."""

    def end_process(status=0):
        if not isinstance(sys.exc_info()[1], Ended):
            raise Ended(status)

    monkeypatch.setattr("lightning_turbo.doctor.ending.end_process", end_process)
    text = SCRIPT
    for name in ("STEP\n", "EPOCH\n", "END\n"):
        text = text.replace(name, places.get(name.strip().lower(), "pass") + "\n")
    text = text.replace("SCHEDULE", places.get("schedule", CONSTANT)).replace("ARGUMENTS", places.get("arguments", ""))
    text = text.replace("TRAIN", "DataLoader(Rollouts(), 1)" if lengths else "data").replace("LENGTHS", str(lengths))
    Path("train.py").write_text(textwrap.dedent(text))
    orders = iter([{"order": "round", "lead": 2, "steps": steps}, {"order": "end"}])
    task = {"program": "train.py", "module": False, "arguments": [], "look": look}
    task |= {"settings": dataclasses.asdict(combine(TABLE[name] for name in names)), "folder": "temporary"}
    outcomes = []

    def report(find):
        if not outcomes:
            try:
                outcomes.append(find())
            except Exception as error:
                outcomes.append(error)

    measure_program(task, RoundTimer(lambda event: next(orders), warmup=2), report)
    if isinstance(outcomes[0], Exception):
        raise outcomes[0]
    return outcomes[0]


READS = {
    "a metric of the validation": {"end": 'self.trainer.callback_metrics["val_loss"].item()'},
    "what the sanity check left": {"epoch": "assert self.seen"},
    "max_epochs": {"epoch": "torch.linspace(0, 1, self.trainer.max_epochs)[self.current_epoch].item()"},
    "max_steps": {
        "step": "assert 0 <= self.global_step < self.trainer.max_steps == 10",
        "arguments": '"max_epochs": -1, "max_steps": 10',
    },
    "the steps of the fit": {"step": "assert self.global_step < self.trainer.estimated_stepping_batches == 24"},
    "the batches of an epoch": {"step": "assert batch_idx < self.trainer.num_training_batches == 8"},
    "the batches of a validation": {"end": "assert self.trainer.limit_val_batches == 1.0"},
    "callbacks": {
        "epoch": "assert self.trainer.checkpoint_callback.dirpath.endswith('ck'); "
        "assert self.trainer.early_stopping_callback.patience == 3; assert self.trainer.progress_bar_callback",
        "arguments": '"callbacks": [ModelCheckpoint("ck", save_last=True), EarlyStopping("val_loss"), '
        'TQDMProgressBar(), Timer(duration="00:00:00:01")], "enable_progress_bar": True',
    },
    "where it logs": {
        "epoch": 'os.makedirs(os.path.join(self.trainer.log_dir, "pictures"), exist_ok=True); '
        "assert os.path.isdir(self.logger.save_dir)",
        "arguments": '"logger": CSVLogger("logs")',
    },
    "its own logger": {
        "epoch": "assert (self.logger.name, self.logger.version, self.logger.rate) == ('own', 3, 5); "
        "self.logger.log_image(1)",
        "arguments": '"logger": Own()',
    },
    "learning rates": {
        "schedule": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))",
        "step": "assert math.isclose(self.optimizers().param_groups[0]['lr'], 0.1 / (1 + self.global_step))",
    },
    "a schedule that ends": {"schedule": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=24)"},
}


def trained():
    """Return the steps that the script has trained, as epoch and batch."""
    return Path("steps").read_text().split()


@pytest.mark.parametrize("places", READS.values(), ids=list(READS))
def test_a_script_reads_its_own_trainer(places, monkeypatch):
    assert run(monkeypatch, **places) == {}
    assert len(trained()) == 32
    left = {path.name for path in Path().iterdir()} - {"train.py", "temporary", "steps"}
    assert left <= {"wrote"}
    assert not Path("wrote").exists() or Path("wrote").read_text() == ""


@pytest.mark.parametrize("names", [(), ("lean",)], ids=["as it is", "with another strategy"])
def test_a_script_with_ddp_on_one_device_is_measured(names, monkeypatch):
    arguments = '"strategy": "ddp", "devices": 1'
    kind = "TurboStrategy" if names else "DDPStrategy"
    step = f"assert type(self.trainer.strategy).__name__ == {kind!r}; assert self.trainer.world_size == 1"
    with mock.patch.dict(os.environ):  # Lightning sets the addresses of the ranks
        try:
            run(monkeypatch, names=names, arguments=arguments, step=step)
            assert len(trained()) == 32
            if not names:
                found = run(monkeypatch, look=30.0, arguments=arguments, step=step)
                assert "own strategy" not in found["lacks"]
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def test_ranks_are_not_measured_as_one(monkeypatch):
    with pytest.raises(
        SkippedError, match="DDPStrategy and 2 devices; expected one device with the default strategy, 't"
    ):
        run(monkeypatch, arguments='"strategy": "ddp", "devices": 2')


@pytest.mark.parametrize("lengths", [(), [8]], ids=["a dataset", "a generator"])
def test_a_script_reads_its_own_loader(lengths, monkeypatch):
    read = "loader = self.trainer.train_dataloader; assert loader.num_workers == 0; assert loader.dataset is not None"
    read += "; import copy; assert copy.copy(loader).dataset is loader.dataset"
    run(monkeypatch, lengths=lengths, epoch=read)
    assert len(trained()) == 32


def test_a_measured_training_restarts_where_it_would_end(monkeypatch):
    """Three epochs of eight steps, repeatedly, with continuing weights."""
    run(monkeypatch, steps=60, step="note('losses', f'{loss.item()} ')")
    whole = [f"{epoch}.{batch}" for epoch in range(3) for batch in range(8)]
    assert trained() == (whole * 3)[:62]
    seen = [float(each) for each in Path("losses").read_text().split()]
    assert seen[24] < seen[0]


def test_whole_epochs_are_trained_with_their_validation(monkeypatch):
    """Two epochs from the second step on: what lies between them is in the time."""
    validated = "note(STEPS_FILE, f'validated-{len(self.seen)} '); self.seen.clear()"
    run(monkeypatch, steps=16, end=validated, arguments='"num_sanity_val_steps": 0')
    assert [each for each in trained() if "-" in each] == ["validated-8"] * 2, "all batches of it"


SEEN = {
    "phases",
    "device",
    "lacks",
    "accumulate",
    "workers",
    "draws",
    "batches",
    "period",
    "seconds",
    "is_seen",
    "trained",
}


@pytest.fixture
def longer(monkeypatch):
    """Epochs of 32 batches, which are enough for a Doctor."""
    text = SCRIPT.replace("randn(32", "randn(128").replace("arange(32)", "arange(128)")
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", text)


def test_a_look_sees_the_phases_and_a_whole_epoch_with_its_validation(longer, monkeypatch):
    text = SCRIPT.replace("self.seen.append(batch_idx)", "time.sleep(0.02)")
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", text)
    found = run(monkeypatch, look=30.0, step="time.sleep(0.004)")
    assert set(found) == SEEN
    assert (found["device"], found["batches"], found["period"], found["is_seen"]) == ("cpu", 32, 32, True)
    assert found["phases"]["forward"] >= 0.004
    assert found["seconds"] >= 32 * 0.004 + 32 * 0.02, "the steps and the validation"
    assert {"cuda", "convolutions", "new workers"} <= set(found["lacks"])
    assert not {"dataloader", "own strategy", "own precision", "optimizer", "cpu"} & set(found["lacks"])
    assert trained()[-1] == "0.31", "it ends with the epoch"


@pytest.mark.parametrize(("arguments", "batches", "period"), [
    ('"check_val_every_n_epoch": 2', 32, 64),
    ('"limit_val_batches": 0', 32, 32),
    ('"accumulate_grad_batches": 4', 32, 32),
    ('"max_epochs": 1', 32, 32),
])  # fmt: skip
def test_a_look_finds_when_training_and_validation_repeat_themselves(arguments, batches, period, longer, monkeypatch):
    found = run(monkeypatch, look=30.0, arguments=arguments)
    assert (found["batches"], found["period"]) == (batches, period)
    assert found["accumulate"] == (4 if "accumulate" in arguments else 1)
    assert found["seconds"] > 0.0


@pytest.mark.parametrize(("length", "batches"), [(18, 18), (10**9, None)])
def test_a_look_finds_the_length_of_an_epoch_that_lightning_does_not_know(length, batches, monkeypatch):
    found = run(monkeypatch, look=3.0, lengths=[length])
    assert (found["batches"], found["period"], found["is_seen"]) == (batches, batches, batches is not None)


DRAWS = "collate_fn=lambda rows: (torch.rand(1), torch.utils.data.default_collate(rows))[1]"


@pytest.mark.parametrize(("more", "draws"), [("", False), (DRAWS, True)])
def test_a_look_sees_whether_loading_draws_random_numbers(more, draws, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", SCRIPT.replace("% 4), 4)", f"% 4), 4, {more})"))
    assert run(monkeypatch, look=3.0)["draws"] is draws


def test_a_look_comes_before_that_of_the_scripts_own_doctor(longer, monkeypatch):
    found = run(monkeypatch, look=30.0, arguments='"callbacks": [__import__("lightning_turbo").Doctor(minutes=0)]')
    assert set(found) == SEEN


TRIPS = {
    "a checkpoint": {
        "arguments": '"callbacks": [ModelCheckpoint("ck")]',
        "epoch": "torch.load(self.trainer.checkpoint_callback.best_model_path) if self.current_epoch else None",
    },
}


@pytest.mark.parametrize("places", TRIPS.values(), ids=list(TRIPS))
def test_an_error_caused_by_muting_is_explained_to_the_script(places, monkeypatch):
    with pytest.raises(
        SkippedError, match=r"tune writes no checkpoint, and the script reads .*ckpt \(FileNotFoundError"
    ):
        run(monkeypatch, **places)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_an_older_checkpoint_is_not_replaced_by_a_link(monkeypatch):
    Path("ck").mkdir()
    Path("ck", "last.ckpt").write_text("of a trained network")
    run(
        monkeypatch,
        arguments='"callbacks": [ModelCheckpoint("ck", save_last="link", save_top_k=1, monitor="val_loss")]',
    )
    assert [path.name for path in Path("ck").iterdir()] == ["last.ckpt"]
    assert Path("ck", "last.ckpt").read_text() == "of a trained network"
