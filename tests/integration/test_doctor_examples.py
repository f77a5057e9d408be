"""The Doctor reports nothing above info about the examples of this repository."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lightning.pytorch import Trainer

import lightning_turbo
from lightning_turbo import Doctor
from lightning_turbo.doctor.command import examine
from tests.integration.doctor_runs import QUIET

EXAMPLES = Path(lightning_turbo.__file__).parent.parent / "examples"
pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings(
        "ignore:Precision bf16-mixed is not supported by the model summary",
    ),
]


@pytest.fixture
def own_time(monkeypatch):
    """Times the steps by what this thread computes: what other programs on the machine take is no habit of the loop."""
    monkeypatch.setattr("lightning_turbo.doctor.timeline.time", SimpleNamespace(perf_counter=time.thread_time))


@pytest.fixture(scope="module")
def scikit_learn():
    """Imported before a test begins: it sets environment variables."""
    return pytest.importorskip("sklearn.datasets")


@pytest.fixture
def example(monkeypatch, scikit_learn):
    """Imports an example by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    return load


def fit(model, data, **more):
    doctor = Doctor(warmup=1, timed=3, watched=3)
    Trainer(
        callbacks=[doctor], limit_train_batches=8, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", **{"max_epochs": 1, **more},
    ).fit(model, data)  # fmt: skip
    return doctor.report


def test_the_lines_to_add(example, own_time):
    add_apex_amp = example("add_apex_amp")
    report = fit(add_apex_amp.Digits(), add_apex_amp.FastDigitsData(), max_epochs=4)
    assert report.facts.watched == 3
    assert report.above("info") == []


@pytest.fixture
def images(tmp_path):
    """Images as files, as the example keeps them."""
    (tmp_path / "labels").mkdir()
    np.save(tmp_path / "labels" / "all.npy", np.arange(256) % 10)
    for number in range(256):
        np.save(tmp_path / f"{number:04d}.npy", np.full((8, 8), number / 256, dtype=np.float32))
    return tmp_path


def test_prefetching(example, images, own_time):
    prefetch = example("prefetch_datamodule")
    report = fit(prefetch.Net(), prefetch.FastDigits(images, 0.0002))
    assert report.facts.watched == 3
    assert report.above("info") == []


def test_what_prefetching_does_away_with(example, images):
    """A slow disk, by the clock on the wall: the example's loop before prefetching waits for each of its 32 files."""
    prefetch = example("prefetch_datamodule")
    report = fit(prefetch.Net(), prefetch.Digits(images, 0.005))
    assert {each.rule for each in report.above("info")} == {"waits-for-data", "workers"}


def examined(path, *arguments):
    """Examines a script by the command's own way; returns what is above info."""
    steps = {"warmup": 1, "timed": 2, "watched": 2}
    assert examine(EXAMPLES / path, arguments, out="doctor", **steps) == 0
    report = json.loads(Path("doctor/doctor.json").read_text())
    assert report["watched"] == 2
    return [each for each in report["findings"] if each["level"] != "info"]


@pytest.mark.slow
def test_images_by_dali(own_time):
    pytest.importorskip("nvidia.dali")
    assert examined("imagenet_dali.py", "--demo", "--epochs", "1", "--level", "O0", "--batch-size", "8") == []


def test_volumes(own_time):
    rng, arrays = np.random.default_rng(0), {}
    for part, count in (("train", 24), ("val", 8), ("test", 8)):
        arrays[f"{part}_images"] = rng.integers(0, 255, (count, 12, 12, 12)).astype(np.uint8)
        arrays[f"{part}_labels"] = (np.arange(count) % 2).astype(np.uint8)[:, None]
    np.savez_compressed("cubes.npz", **arrays)
    config = EXAMPLES / "medmnist3d" / "config.yaml"
    found = examined(
        "medmnist3d/__main__.py", "fit", "--config", str(config), "--data", str(Path("cubes.npz").resolve()),
        "--data.batch_size", "4", "--model.depth", "10", "--model.widen", "0.125", "--model.epochs_up", "1",
        "--trainer.accelerator", "cpu", "--trainer.max_epochs", "2",
    )  # fmt: skip
    assert found == []
