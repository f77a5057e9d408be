"""The demo, run from a clone as a user runs it."""

import json

import pytest
import sklearn  # noqa: F401  (sets variables of the environment when it is first imported)
import torch

from examples.demo import __main__ as demo
from examples.demo import boxes, levels, patches, stops


def run(out, *argv):
    """Run the demo on the CPU, restore the number of threads, and return the exit status and the results."""
    threads = torch.get_num_threads()
    try:
        status = demo.main(["--device", "cpu", "--out", str(out), *argv])
    finally:
        torch.set_num_threads(threads)
    return status, json.loads((out / "results.json").read_text())


def test_the_demo_measures_each_part_and_writes_all_results(tmp_path, capsys, monkeypatch):
    write = patches.write_scans
    monkeypatch.setattr(patches, "write_scans", lambda folder: write(folder, count=2))
    monkeypatch.setattr(patches, "SCANS", 2)
    status, results = run(tmp_path, "--levels", "O1", "--epochs", "1", "--seconds", "0.2")
    reached = results["levels"]["O1"]["accuracy"]
    assert 0.2 < reached < 0.95  # the slow test below trains to the end
    assert len(results["levels"]["O1"]["losses"]) == 43  # 1347 samples in batches of 32
    assert results["patches"]["factor"] > 1
    assert results["stops"]["ours"] == {"twice": 0, "never": 0}
    assert min(results["stops"]["stock"].values()) > 0
    assert results["boxes"]["factor"] > 0
    output = capsys.readouterr().out
    assert "of 64 samples, 0 are seen twice and 0 never" in output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")

    # The command fails if the accuracy of a level is too low, regardless of the other parts.
    assert status == 1
    assert f"O1: expected an accuracy of 0.95, got {reached:.3f}" in output
    for part, name in ((patches, "patches"), (stops, "stops"), (boxes, "boxes")):
        monkeypatch.setattr(part, "measure", lambda *_, name=name: results[name])
    monkeypatch.setattr(levels, "train", lambda level, epochs, device: {"accuracy": 0.96, "losses": [1.0] * 20})
    status, _ = run(tmp_path, "--levels", "O0", "--epochs", "1", "--seconds", "0.1")
    assert status == 0
    assert "O0 96.0%" in capsys.readouterr().out


def test_an_unknown_level_is_refused(capsys):
    with pytest.raises(SystemExit):
        demo.main(["--levels", "O1,01"])
    assert "expected some of O0,O1,O2,O3 (letter O, not zero), got 01" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_demo_reaches_the_expected_accuracy(tmp_path):
    status, results = run(tmp_path, "--minutes", "2")
    assert status == 0
    assert (tmp_path / "tune" / "turbo.yaml").exists()
    assert results["patches"]["factor"] > 10
