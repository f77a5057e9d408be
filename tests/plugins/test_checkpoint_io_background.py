"""Background saves in a Trainer: the same files, complete at any moment, and none lost."""

import os
import pickle
import random
import time
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_turbo import AtomicCheckpointIO, ExactResume
from lightning_turbo._host_copy import HostCopier
from tests.integration.recording import Numbers, RecordingModel, gives
from tests.integration.resuming import assert_same
from tests.ranks import end, start
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


def train(folder, background, callbacks=(), **settings):
    """Fit for 2 epochs of 6 steps. Keeps the last two checkpoints and one of the end of each epoch."""
    torch.manual_seed(3)
    saves = [
        ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, monitor="step", mode="max", save_top_k=2),
        ModelCheckpoint(folder / "epochs", filename="{epoch}", save_top_k=-1, save_last=True),
    ]
    trainer = quiet_trainer(
        max_epochs=2, callbacks=[*saves, *callbacks], plugins=[AtomicCheckpointIO(background=background)],
        enable_checkpointing=True, **settings,
    )  # fmt: skip
    trainer.fit(RecordingModel(), gives(DataLoader(Numbers(12), batch_size=2, shuffle=True)))
    return trainer


@pytest.mark.usefixtures("every_loader_has_a_thread")
@pytest.mark.parametrize("strategy", ["auto", "turbo"])
def test_background_saves_write_the_same_files_and_a_save_after_the_run_is_synchronous(strategy, tmp_path):
    for folder in ("waits", "goes on"):
        trainer = train(tmp_path / folder, background=folder == "goes on", strategy=strategy)
        trainer.save_checkpoint(tmp_path / folder / "after.ckpt")
        torch.load(tmp_path / folder / "after.ckpt", weights_only=True)
    waits, goes_on = (
        {p.relative_to(tmp_path / f): p for p in (tmp_path / f).rglob("*.ckpt")} for f in os.listdir(tmp_path)
    )
    assert list(map(str, sorted(waits))) == [
        "after.ckpt", "epochs/epoch=0.ckpt", "epochs/epoch=1.ckpt", "epochs/last.ckpt", "step=11.ckpt", "step=12.ckpt",
    ]  # fmt: skip
    assert waits.keys() == goes_on.keys()
    for name, path in waits.items():
        ours, theirs = (torch.load(each, weights_only=True) for each in (goes_on[name], path))
        for each in (ours, theirs):  # these contain the path of the folder
            each["callbacks"] = [key for key in each["callbacks"] if "Checkpoint" not in key]
        assert_same(ours, theirs, str(name))


class Fails(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.trainer = trainer
        if trainer.global_step == 3:
            raise RuntimeError("on its way")


def test_an_interrupted_run_waits_for_its_background_save(tmp_path):
    with pytest.raises(RuntimeError, match="on its way"):
        train(tmp_path, True, [Fails()])
    assert torch.load(max(tmp_path.glob("step=*.ckpt"), key=os.path.getmtime))["global_step"] >= 2
    assert not list(tmp_path.rglob("*.partial"))


def test_a_save_after_an_interrupted_run_is_synchronous(tmp_path):
    fails = Fails()
    with pytest.raises(RuntimeError, match="on its way"):
        train(tmp_path, True, [fails])
    fails.trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert torch.load(tmp_path / "after.ckpt")["global_step"] == 3
    with pytest.raises(OSError, match="could not be written"):
        fails.trainer.save_checkpoint(tmp_path / "after.ckpt" / "in a file")


def test_fit_raises_the_error_of_the_last_background_save(tmp_path, monkeypatch):
    sync = os.fsync

    def full(descriptor):
        is_last = "/.last.ckpt." in os.readlink(f"/proc/self/fd/{descriptor}")
        if is_last and (tmp_path / "epochs" / "epoch=1.ckpt").exists():
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"last\.ckpt' could not be written \(No space left"):
        train(tmp_path, True)
    assert torch.load(tmp_path / "epochs" / "epoch=1.ckpt")["global_step"] == 12


class Counting(torch.optim.SGD):
    def step(self, closure):
        loss = super().step(closure)
        for weight in self.param_groups[0]["params"]:
            self.state[weight].setdefault("steps", torch.zeros(2**16)).add_(1)
        return loss


class Counts(pl.LightningModule):
    """Every weight, buffer and optimizer state grows by 1 per step."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(2**18) for _ in range(4))
        self.register_buffer("seen", torch.zeros(2**18))

    def training_step(self, batch, index):
        self.seen += 1
        return -sum(weight.sum() for weight in self.weights)

    def configure_optimizers(self):
        return Counting(self.parameters(), lr=1.0)


def train_for_ever(folder):
    """Train a model whose tensors all equal the number of the step, with a background save at every step."""
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, enable_version_counter=False)
    quiet_trainer(
        enable_checkpointing=True, callbacks=[saves, ExactResume()], plugins=[AtomicCheckpointIO(background=True)],
        max_epochs=1,
    ).fit(Counts(), DataLoader(range(100_000)))  # fmt: skip


def killed_at(folder, moment):
    """Start a run, kill it ``moment`` seconds after its first file, and return the steps of the existing files."""
    job = start(train_for_ever, [folder], f"{folder}.log")
    deadline = time.monotonic() + 60
    try:
        while not list(folder.glob("*.ckpt")) and time.monotonic() < deadline and job.is_alive():
            time.sleep(0.01)
        time.sleep(moment)
        assert job.is_alive(), Path(f"{folder}.log").read_text()[-3000:]
    finally:
        end(job)
    return [step_of(path) for path in folder.glob("*.ckpt")]


def step_of(path):
    """Load a checkpoint, check that all of its tensors equal one number, and return it."""
    loaded = torch.load(path, weights_only=True)
    step = loaded["global_step"]
    states = loaded["optimizer_states"][0]["state"].values()
    held = [*loaded["state_dict"].values(), *(state["steps"] for state in states)]
    assert len(held) == 9
    assert all((tensor == step).all() for tensor in held), path
    assert loaded["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"] == step
    assert path.name == f"step={step}.ckpt"
    return step


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_every_checkpoint_of_a_killed_run_is_complete_and_of_one_step(kills, tmp_path):
    chance = random.Random(kills)
    for number in range(kills):
        steps = killed_at(tmp_path / str(number), chance.uniform(0, 0.3))
        assert 1 <= len(steps) <= 2, "a checkpoint is removed after the next one is complete"


def test_a_host_copy_is_read_after_the_device_finished_it():
    made = []
    event = SimpleNamespace(synchronize=lambda: made.append("copied"))
    with HostCopier()._lent([], [event, event], pickle.dumps({"step": 3})) as copied:
        assert (copied, made) == ({"step": 3}, ["copied"] * 2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bfloat16, torch.int64])
def test_a_host_copy_has_tensors_of_every_dtype_and_what_they_share(dtype, tmp_path):
    whole = torch.arange(6, dtype=torch.int64).to(dtype)
    with HostCopier().copy({"whole": whole, "part": whole[2:]}) as copied:
        torch.save(copied, tmp_path / "copy.pt")
    loaded = torch.load(tmp_path / "copy.pt", weights_only=True)
    assert torch.equal(loaded["whole"].float(), whole.float())
    assert loaded["part"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()
