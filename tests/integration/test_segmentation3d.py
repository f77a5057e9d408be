"""examples/segmentation3d: training from files to a checkpoint, and resuming."""

import json

import pytest

pytest.importorskip("nibabel")
pytest.importorskip("monai")

from examples.segmentation3d import __main__ as example
from examples.segmentation3d.scans import write_scans
from lightning_turbo import PackedDataset

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = ["--patch", "8x8x8", "--batch", "4", "--width", "2", "--scans", "3", "--size", "16x14x12", "--workers", "0"]


@pytest.mark.parametrize("row", example.ROWS)
def test_the_segmentation_example_trains_and_resumes(tmp_path, capsys, row):
    words = [*SMALL, "--out", str(tmp_path), "--row", row]
    assert example.main([*words, "--epochs", "1", "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first["patches"] == [2 * example.PER_SCAN]  # one of three scans is for validation
    assert 0 <= first["dice"] <= 1
    assert example.main([*words, "--epochs", "2"]) == 0
    assert f"{row}: 1 epochs of" in capsys.readouterr().out
    assert example.main([*words, "--epochs", "2"]) == 0
    assert "all 2 epochs are already trained" in capsys.readouterr().out
    packed = PackedDataset(tmp_path / "packed", keys=["volumes", "labels"])
    assert packed[0][0].shape[0] == 2  # two modalities


def test_the_segmentation_example_accepts_an_nnunet_folder(tmp_path, capsys):
    write_scans(tmp_path / "made", 3, (12, 13, 14))
    for case in (tmp_path / "made").iterdir():
        for end, name in (("t1n", "imagesTr/{}_0000"), ("t2w", "imagesTr/{}_0001"), ("seg", "labelsTr/{}")):
            path = tmp_path / "Dataset001" / f"{name.format(case.name)}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            (case / f"{case.name}-{end}.nii.gz").rename(path)
    description = {"channel_names": {"0": "T1", "1": "T2"}, "labels": {"background": 0, "edge": 1, "core": 2}}
    (tmp_path / "Dataset001" / "dataset.json").write_text(json.dumps(description))
    words = [str(tmp_path / "Dataset001"), *SMALL, "--out", str(tmp_path / "out"), "--spacing", "1x1x1.2"]
    assert example.main([*words, "--epochs", "1"]) == 0
    assert PackedDataset(tmp_path / "out" / "packed").classes == ["background", "edge", "core"]
