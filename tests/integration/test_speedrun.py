"""The speedrun: all rows see the same batches, reach the AUC and are recorded."""

import pytest
import sklearn  # noqa: F401  (sets variables of the environment when it is first imported)
import torch

from examples.demo.data import DemoData, VolumePatches
from examples.speedrun import __main__ as speedrun


@pytest.fixture
def volumes(tmp_path, monkeypatch):
    """A folder with a few cubes. The brightness of a cube is its class."""
    half = torch.arange(60)[:, None, None].expand(60, 60, 60) > 29
    volume = half + 0.1 * torch.randn(60, 60, 60, generator=torch.Generator().manual_seed(0))
    corners = torch.randint(32, (40, 3), generator=torch.Generator().manual_seed(0)).numpy()
    corners[:, 0] = [0, 32] * 20
    patches = VolumePatches(volume, corners, torch.tensor([0, 1] * 20))
    data = DemoData(train=patches, val=patches, dims=3, classes=2, batch_size=16)
    monkeypatch.setattr(speedrun, "load_mni", lambda: data)
    speedrun.write_parts(tmp_path / "volumes")
    return tmp_path / "volumes"


def test_all_speedrun_rows_see_the_same_batches_in_each_epoch(volumes):
    seen = {}
    for row in speedrun.ROWS:
        train, val = speedrun.loaders(row, volumes, seed=3)
        seen[row] = [
            (images.double().sum((1, 2, 3, 4)).tolist(), labels.tolist())
            for loader in (train, val, train)
            for images, labels in loader
        ]
    assert len(seen["baseline"]) == 9
    assert seen["baseline"][:3] != seen["baseline"][6:]
    assert seen["baseline"] == seen["workers"] == seen["best"]


def test_rows_reach_the_auc_and_are_added_to_the_records(volumes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speedrun, "run_process", lambda *args: {**speedrun.train(*args), "whole": 60.0})
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{speedrun.BEGIN}\n| Date |\n| --- |\n{speedrun.END}\nafter\n")
    words = ["--seeds", "0", "--volumes", str(volumes), "--page", str(page)]
    assert speedrun.main([*words, "--auc", "0.9"]) == 0
    assert speedrun.main([*words, "--auc", "0.9", "--rows", "best", "--note", "busy"]) == 0
    before, *table, after = page.read_text().split("\n\n")[1].strip().splitlines()
    assert (before, after) == (speedrun.BEGIN, "after")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:-1]]
    assert [row[1] for row in rows] == ["baseline", "best", "best"]
    assert all(row[2] == "60.0" and float(row[5]) >= 0.9 for row in rows)
    assert rows[2][6].endswith(", busy")
    assert capsys.readouterr().out.count("best, seed 0: 60.0 s") == 2


def test_a_row_that_misses_the_auc_leaves_no_record(volumes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speedrun, "run_process", lambda *args: {"auc": [0.5], "seconds": 1.0, "whole": 2.0})
    page = tmp_path / "page.md"
    assert speedrun.main(["--seeds", "0", "--volumes", str(volumes), "--page", str(page)]) == 1
    assert not page.exists()
    assert "No record: baseline, best did not reach an AUC of 0.985." in capsys.readouterr().out
