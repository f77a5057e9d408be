"""The demo of a clone, run as a user runs it."""

import dataclasses
import json

import pytest
import sklearn  # noqa: F401  (sets variables of the environment when it is first imported)
import torch
from torch.utils.data import TensorDataset

from examples.demo import __main__ as demo
from examples.demo import volumes
from examples.demo.data import DemoData, VolumePatches, load_digits


def run(out, *argv):
    """Runs the demo on the CPU and puts back the number of threads; returns exit status and results."""
    threads = torch.get_num_threads()
    try:
        status = demo.main(["--device", "cpu", "--out", str(out), *argv])
    finally:
        torch.set_num_threads(threads)
    return status, json.loads((out / "results.json").read_text())


@pytest.fixture
def _few_digits(monkeypatch):
    """Three batches an epoch."""

    def load(seed):
        data = load_digits(seed)
        return dataclasses.replace(data, train=TensorDataset(*(tensor[:96] for tensor in data.train.tensors)))

    monkeypatch.setattr(demo, "load_digits", load)


def test_levels_reach_their_accuracy_and_everything_is_written(tmp_path, capsys):
    status, results = run(tmp_path, "--levels", "O1,O3", "--epochs", "3", "--minutes", "0")
    assert status == 0
    for level in ("O1", "O3"):
        row = results["levels"][level]
        assert row["accuracy"] >= 0.95
        assert len(row["losses"]) == 3 * 43  # 1347 samples in batches of 32
        assert sorted(row["losses"][-20:])[10] < 0.5 < row["losses"][0]
    said = capsys.readouterr().out
    assert all(f"  {level}  accuracy {row['accuracy']:.3f}" in said for level, row in results["levels"].items())
    assert results["volumes"] is None
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_few_digits")
def test_a_level_below_its_accuracy_is_a_failure(tmp_path, capsys):
    status, results = run(tmp_path, "--levels", "O0", "--epochs", "1", "--minutes", "0")
    assert status == 1
    assert results["levels"]["O0"]["accuracy"] < 0.95
    assert "O0: expected an accuracy of 0.95, got 0." in capsys.readouterr().out


def test_an_unknown_level_is_refused(capsys):
    with pytest.raises(SystemExit):
        demo.main(["--levels", "O1,01"])
    assert "expected some of O0,O1,O2,O3 (letter O, not zero), got 01" in capsys.readouterr().err


@pytest.mark.usefixtures("_few_digits")
@pytest.mark.parametrize("chosen", [("prefetch",), ()])
def test_volumes_are_trained_with_and_without_what_tune_found(tmp_path, monkeypatch, chosen):
    """The files of tune are the test's, so that its answer is known; both runs train with the same batches."""
    volume = torch.randn(60, 60, 60, generator=torch.Generator().manual_seed(0))
    corners = torch.randint(32, (32, 3), generator=torch.Generator().manual_seed(0)).numpy()
    patches = VolumePatches(volume, corners, torch.from_numpy(corners[:, 0] > 16).long())
    data = DemoData(train=patches, val=patches, dims=3, classes=2, batch_size=16)
    monkeypatch.setattr(demo, "load_mni", lambda: data)
    monkeypatch.setattr(demo, "VOLUME_EPOCHS", 2)

    def tune(command, check):
        assert command[-3:] == [volumes.__file__, str(tmp_path / "volumes"), "cpu"]
        folder = tmp_path / "tune"
        folder.mkdir()
        (folder / "tune.json").write_text(json.dumps({"chosen": {"settings": chosen}}))
        used = (
            "import lightning_turbo\ndef turbo(callbacks):\n    return {'strategy': 'turbo', 'callbacks': callbacks}\n"
        )
        plain = "def turbo(callbacks):\n    return {'callbacks': callbacks}\n"
        (folder / "turbo.py").write_text(used if chosen else plain)

    monkeypatch.setattr(demo.subprocess, "run", tune)
    _, results = run(tmp_path, "--levels", "O0", "--epochs", "1")
    stock, tuned = (row["losses"] for row in results["volumes"]["rows"].values())
    assert len(stock) == 4
    assert stock == tuned
    assert ("times as fast with prefetch; accuracy" in results["volumes"]["headline"]) == bool(chosen)
    assert ("Nothing was found that helps" in results["volumes"]["headline"]) != bool(chosen)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_run_reaches_its_accuracy_everywhere(tmp_path):
    status, results = run(tmp_path)
    assert status == 0
    assert all(row["accuracy"] > 0.85 for row in results["volumes"]["rows"].values())
