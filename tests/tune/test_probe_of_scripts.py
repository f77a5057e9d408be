"""A measured script reads the values of its own Trainer, and errors caused by muting are explained."""

import dataclasses
import gc
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

def note(path, text):
    with open(path, "a") as file:
        file.write(text)

class M(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = torch.nn.Linear(8, 4), []
    def training_step(self, batch, batch_idx):
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


def run(monkeypatch, *, names=(), mode="step", steps=30, lengths=(), **places):
    """Measure the script in this process, with lines inserted in its places."""

    def end_process(status=0):
        if not isinstance(sys.exc_info()[1], Ended):
            raise Ended(status)

    monkeypatch.setattr("lightning_turbo.doctor.ending.end_process", end_process)
    text = SCRIPT
    for name in ("STEP", "EPOCH", "END"):
        text = text.replace(name, places.get(name.lower(), "pass"))
    text = text.replace("SCHEDULE", places.get("schedule", CONSTANT)).replace("ARGUMENTS", places.get("arguments", ""))
    text = text.replace("TRAIN", "DataLoader(Rollouts(), 1)" if lengths else "data").replace("LENGTHS", str(lengths))
    Path("train.py").write_text(textwrap.dedent(text))
    orders = iter([{"order": "round", "lead": 2, "steps": steps}, {"order": "border"}, {"order": "end"}])
    task = {"program": "train.py", "module": False, "arguments": [], "mode": mode, "ranks": 1, "batch_size": 0}
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


@pytest.mark.parametrize("places", READS.values(), ids=list(READS))
def test_a_script_reads_its_own_trainer(places, monkeypatch):
    found = run(monkeypatch, **places)
    assert len(found["losses"]) >= 30
    assert found["borders"]
    assert found["validations"]
    left = {path.name for path in Path().iterdir()} - {"train.py", "temporary"}
    assert left <= {"wrote"}
    assert not Path("wrote").exists() or Path("wrote").read_text() == ""


@pytest.mark.parametrize("names", [(), ("lean",)], ids=["as it is", "with another strategy"])
def test_a_script_with_ddp_on_one_device_is_measured(names, monkeypatch):
    arguments = '"strategy": "ddp", "devices": 1'
    kind = "TurboStrategy" if names else "DDPStrategy"
    step = f"assert type(self.trainer.strategy).__name__ == {kind!r}; assert self.trainer.world_size == 1"
    with mock.patch.dict(os.environ):  # Lightning sets the addresses of the ranks
        try:
            assert run(monkeypatch, names=names, arguments=arguments, step=step)["losses"]
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def test_ranks_are_not_measured_as_one(monkeypatch):
    with pytest.raises(
        SkippedError, match="DDPStrategy and 2 devices; expected one device with the default strategy, 't"
    ):
        run(monkeypatch, arguments='"strategy": "ddp", "devices": 2')


@pytest.mark.parametrize("mode", ["step", "one batch"])
@pytest.mark.parametrize("lengths", [(), [8]], ids=["a dataset", "a generator"])
def test_a_script_reads_its_own_loader(mode, lengths, monkeypatch):
    read = "loader = self.trainer.train_dataloader; assert loader.num_workers == 0; assert loader.dataset is not None"
    read += "; import copy; assert copy.copy(loader).dataset is loader.dataset"
    assert run(monkeypatch, mode=mode, lengths=lengths, epoch=read)["losses"]


def test_a_measured_training_restarts_where_it_would_end(monkeypatch):
    """Three epochs of eight steps, repeatedly, with continuing weights."""
    found = run(monkeypatch, steps=60, step="note('steps', f'{self.current_epoch}.{batch_idx} ')")
    seen = Path("steps").read_text().split()
    whole = [f"{epoch}.{batch}" for epoch in range(3) for batch in range(8)]
    assert seen[: 2 * 24] == whole * 2
    assert found["facts"]["epochs"] == 3
    assert found["losses"][24] < found["losses"][0]


@pytest.mark.parametrize(("arguments", "validations", "epochs"), [
    ("", 1.0, 3), ('"val_check_interval": 0.25', 4.0, 3), ('"val_check_interval": 3', 2.0, 3),
    ('"check_val_every_n_epoch": 2', 0.5, 3), ('"limit_val_batches": 0', 0.0, 3),
    ('"check_val_every_n_epoch": None, "val_check_interval": 16', 0.5, 3),
    ('"max_epochs": -1, "max_steps": 12', 1.0, 1.5),
])  # fmt: skip
def test_the_number_of_validations_per_epoch(arguments, validations, epochs, monkeypatch):
    facts = run(monkeypatch, steps=10, arguments=arguments)["facts"]
    assert (facts["validations"], facts["epochs"], facts["batches"]) == (validations, epochs, 8)


def test_the_boundary_of_a_long_epoch_is_reached_and_its_validation_is_projected(monkeypatch):
    long = '"limit_train_batches": 1000, "limit_val_batches": 50'
    text = SCRIPT.replace("torch.randn(32, 8), torch.arange(32)", "torch.randn(8000, 8), torch.arange(8000)")
    text = text.replace("self.seen.append", "__import__('time').sleep(0.01); self.seen.append")
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", text)
    found = run(monkeypatch, arguments=long, step="note('batches', f'{batch_idx} ')")
    seen = [int(each) for each in Path("batches").read_text().split()]
    assert found["facts"]["batches"] == 1000
    at = seen.index(999)
    assert seen[:at] == list(range(at)), "the last batch follows immediately"
    assert seen[at + 1] == 0, "and then the next epoch"
    assert len(found["borders"]) == 1
    assert found["validations"][-1] >= 50 * 0.01, "two of its batches stand for all"


@pytest.mark.parametrize(("lengths", "steps", "arguments", "batches", "borders", "validations", "epochs"), [
    ([8], 30, "", 8, 4, 1.0, 3),
    ([6, 8], 30, "", 7, 5, 1.0, 3),  # 6, 8, 6, 8, 6 and a part
    ([50], 10, "", 50, 1, 1.0, 3),  # it continues to the end of the first epoch
    ([8], 30, '"val_check_interval": 3', 8, 4, 2.0, 3),
    ([8], 30, '"val_check_interval": 10', 8, 4, 0.0, 3),
    ([8], 40, '"max_epochs": -1, "max_steps": 20', 8, 6, 1.0, 2.5),  # 8, 8, and 4 of the third
    ([2], 10, "", 2, 10, 1.0, 3),
])  # fmt: skip
def test_epochs_of_unknown_length_are_measured_when_they_end(
    lengths, steps, arguments, batches, borders, validations, epochs, monkeypatch
):
    found = run(monkeypatch, lengths=lengths, steps=steps, arguments=arguments)
    facts = found["facts"]
    assert (facts["batches"], facts["validations"], facts["epochs"]) == (batches, validations, epochs)
    assert len(found["borders"]) == borders
    assert min(found["borders"]) >= 0.05, "the rollouts are in the boundary"


def test_an_endless_epoch_is_not_awaited(monkeypatch):
    monkeypatch.setattr("lightning_turbo.tune.probe.BORDER_SECONDS", 0.1)
    found = run(monkeypatch, lengths=[10**9])
    assert (found["facts"]["batches"], found["borders"]) == (None, [])


@pytest.mark.parametrize("lengths", [(), [8]], ids=["a dataset", "a generator"])
def test_garbage_is_collected_before_measurements(lengths, monkeypatch, tmp_path):
    """A full collection takes longer than some steps, and would be in the only boundary of some settings."""
    # A whole path: the collector may call the script's function in another working directory.
    seen = tmp_path / "seen"
    heard = "if not hasattr(self, 'hears'): import gc; self.hears = True; gc.callbacks.append(lambda phase, info: "
    heard += f"note({str(seen)!r}, '-full') if (phase, info['generation']) == ('stop', 2) else None)"
    steps = f"note({str(seen)!r}, f' {{self.current_epoch}}.{{batch_idx}}')"
    before = list(gc.callbacks)
    try:
        run(monkeypatch, lengths=lengths, steps=3, schedule=f"(exec({heard!r}), {CONSTANT})[1]", step=steps)
    finally:
        gc.callbacks[:] = before
    noted = seen.read_text().split()
    assert noted[0].startswith("-full"), "before the first step"
    assert any(each.startswith("0.4-full") for each in noted), "after two steps of the lead and three of the round"
    assert noted[-1] == "1.0"


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
