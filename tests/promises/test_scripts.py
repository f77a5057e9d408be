"""A script under ``doctor`` and ``tune``: it reads what it wrote, and what it saved is not overwritten."""

import dataclasses
import os
import runpy
import shutil
import warnings
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_turbo import Doctor, cli
from lightning_turbo.measure import RoundTimer
from lightning_turbo.tune.candidates import combine, list_candidates
from lightning_turbo.tune.worker import measure_program
from tests.children import RETURNED, status_of_child

SCRIPT = """
import atexit, sys, torch
from pathlib import Path
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

Path("classes.txt").write_text("cat dog")

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, len(Path("classes.txt").read_text().split()))

    def on_fit_start(self):
        torch.save(self.net.state_dict(), "start.pt")

    def training_step(self, batch, index):
        assert torch.load("start.pt")["weight"].shape == (2, 8)
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_exception(self, exception):
        torch.save(self.net.state_dict(), "error.pt")

    def on_fit_end(self):
        torch.save(self.net.state_dict(), "fitted.pt")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)

def train(model, name):
    data = DataLoader(TensorDataset(torch.randn(128, 8), torch.arange(128) % 2), 4)
    settings = {"max_epochs": 2, "logger": False, "enable_checkpointing": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    try:
        Trainer(accelerator="cpu", **settings).fit(model, data)
    finally:
        torch.save(model.state_dict(), name)

atexit.register(Path("ended").write_text, "by atexit")
teacher, student = Model(), Model()
train(teacher, "teacher.pt")
student.load_state_dict(torch.load("teacher.pt"))  # the weights of the first training, for the second
train(student, "student.pt")
print("all was trained")
"""
SAVED = ("teacher.pt", "student.pt", "fitted.pt")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder of a script that has trained to its end."""
    folder = tmp_path_factory.mktemp("trained")

    def train():
        os.chdir(folder)
        runpy.run_path("train.py", run_name="__main__")
        Path("ended").write_text("trained twice")

    (folder / "train.py").write_text(SCRIPT)
    assert status_of_child(train) == RETURNED
    assert (folder / "ended").read_text() == "trained twice"
    return folder


@pytest.fixture
def trained(whole_run):
    """The files of the script, before it is measured."""
    shutil.copytree(whole_run, ".", dirs_exist_ok=True)
    return {name: Path(name).read_bytes() for name in (*SAVED, "ended", "train.py", "classes.txt")}


def check_files(trained):
    assert {name: Path(name).read_bytes() for name in trained} == trained
    assert not Path("error.pt").exists(), "an end that is not the script's is no error of its training"


def test_a_script_under_the_doctor_keeps_what_it_saved(trained, capfd):
    status = status_of_child(lambda: os._exit(cli.main(["doctor", "train.py"])))  # it may end the process itself
    output = "".join(capfd.readouterr())
    assert "Traceback" not in output
    assert status == 0, output[-3000:]
    assert "The mean step takes" in output
    check_files(trained)


def measure(names=(), look=0.0):
    """Measure the script in this process, which ends, as ``tune`` measures it in each of its own."""
    orders = iter([{"order": "round", "lead": 2, "steps": 100}, {"order": "end"}])
    table = {each.name: each for each in list_candidates(2)}
    task = {"program": "train.py", "module": False, "arguments": [], "look": look}
    task |= {"settings": dataclasses.asdict(combine(table[name] for name in names)), "folder": "temporary"}

    def report(find):
        print("measured", len(find()))

    measure_program(task, RoundTimer(lambda event: next(orders), warmup=2), report)


@pytest.mark.parametrize(
    ("names", "look"), [((), 0.0), (("fused",), 0.0), ((), 30.0)], ids=["as it is", "set", "looked at"]
)
def test_a_script_under_tune_keeps_what_it_saved(names, look, trained, capfd):
    assert status_of_child(lambda: measure(names, look)) == 0
    output = "".join(capfd.readouterr())
    assert f"measured {11 if look else 0}" in output, output[-3000:]
    assert "Traceback" not in output
    check_files(trained)


def slow():
    total = 0
    for number in range(300_000):
        total += number * number
    return total


class Slow(BoringModel):
    def training_step(self, batch, batch_idx):
        slow()
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("free_alarm")
def test_the_doctor_names_the_line_that_computes(tmp_path):
    doctor = Doctor(warmup=2, timed=5, watched=3)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=12,
        logger=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[doctor],
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Slow())
    sites = [place.site for finding in doctor.report.findings for place in finding.places if place.site]
    assert {site.function for site in sites} & {"slow", "training_step"}
