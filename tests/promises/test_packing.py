"""Packing: which label volume belongs to which volume is named, never guessed; a folder is whole or not there."""

import itertools
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_turbo import PackedDataset
from lightning_turbo.data import cache_transforms, pack, pack_folder


def write_scan(path, value, shape=(6, 7, 8)):
    nibabel = pytest.importorskip("nibabel")
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(np.full(shape, value, np.int16), np.eye(4)), path)


@pytest.mark.parametrize("series", [False, True])
def test_acdc_is_packed_as_it_is_distributed(series, tmp_path):
    """Each patient has two frames with numbers of its own, and a series without a label volume."""
    for number, frames in ((1, ("01", "12")), (2, ("01", "09"))):
        name = f"patient{number:03}"
        for frame in frames:
            write_scan(tmp_path / "acdc" / name / f"{name}_frame{frame}.nii.gz", 10 * number)
            write_scan(tmp_path / "acdc" / name / f"{name}_frame{frame}_gt.nii.gz", number)
        if series:
            write_scan(tmp_path / "acdc" / name / f"{name}_4d.nii.gz", 99, (6, 7, 8, 3))
    labels = sorted((tmp_path / "acdc").rglob("*_gt.nii.gz"))
    pairs = [(label.with_name(label.name.replace("_gt", "")), label) for label in labels]
    pack_folder(tmp_path / "acdc", tmp_path / "packed", pairs=pairs)
    data = PackedDataset(tmp_path / "packed")
    assert len(data) == 4
    for number in range(4):
        scan, label = data[number]
        np.testing.assert_array_equal(np.asarray(scan), 10 * np.asarray(label))


LAYOUTS = {
    "a folder for each case": ("s{}/T1", "s{}/aseg"),
    "LiTS": ("volume-{}", "segmentation-{}"),
    "BTCV": ("img/img{}", "label/label{}"),
    "one folder": ("{}", "{}_mask"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_label_volumes_are_no_scans_in_silence(layout, tmp_path):
    image, label = LAYOUTS[layout]
    for number in (1, 2):
        write_scan(tmp_path / "scans" / f"{image.format(number)}.nii.gz", 100 * number)
        write_scan(tmp_path / "scans" / f"{label.format(number)}.nii.gz", number)
    with pytest.raises(ValueError, match=Path(label.format(1)).name):
        pack_folder(tmp_path / "scans", tmp_path / "packed")
    pairs = tuple(f"{each.format('{case}')}.nii.gz" for each in (image, label))
    pack_folder(tmp_path / "scans", tmp_path / "packed", pairs=pairs)
    data = PackedDataset(tmp_path / "packed")
    assert [(int(scan.max()), int(mask.max())) for scan, mask in (data[n] for n in range(2))] == [(100, 1), (200, 2)]


class Rows(Dataset):
    """Samples of different shapes, which take a moment each."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        time.sleep(0.002)
        return {"x": np.full((20, 3 + index % 3), index, np.float32), "y": index}


def assert_holds_rows(folder):
    data = PackedDataset(folder)
    samples = [*DataLoader(data, None)]
    assert len(samples) == 30
    for number, sample in enumerate(samples):
        assert sample["x"].shape == (20, 3 + number % 3)
        assert set(sample["x"].flatten().tolist()) == {number} == {sample["y"].item()}


def test_threads_that_fill_one_cache_do_not_mix(tmp_path):
    with ThreadPoolExecutor(3) as threads:
        folders = {*threads.map(lambda _: cache_transforms(Rows(), tmp_path, key="rows"), range(3))}
    (folder,) = folders
    assert_holds_rows(folder)
    assert [*tmp_path.iterdir()] == [folder]


class Stuck(Rows):
    """Waits at a sample in the middle."""

    def __getitem__(self, index):
        if index == 20:
            time.sleep(100)
        return super().__getitem__(index)


def pack_until_stuck(folder):
    # As in a program of its own; a process that shares the tests ignores the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pack(Stuck(), folder / "packed")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_packing_that_ends_before_its_end_leaves_nothing_under_the_name(how, tmp_path):
    packing = multiprocessing.get_context("fork").Process(target=pack_until_stuck, args=(tmp_path,))
    packing.start()
    while not any(path.suffix == ".npy" for path in tmp_path.rglob("*")):
        time.sleep(0.005)
    os.kill(packing.pid, how)
    packing.join()
    assert packing.exitcode
    assert not (tmp_path / "packed").exists()
    pack(Rows(), tmp_path / "packed")
    assert_holds_rows(tmp_path / "packed")
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


PARTS = (np.float32(1.5), torch.arange(3, dtype=torch.int16), "text", [np.ones((2, 1)), (3, True)], {"a": 2.5, 4: "b"})


@pytest.mark.parametrize("parts", [*itertools.combinations(PARTS, 2), PARTS])
def test_a_sample_comes_back_as_it_was(parts, tmp_path):
    pack([parts, parts], tmp_path / "packed")
    expected, found = ([*DataLoader(data, 2)] for data in ([parts, parts], PackedDataset(tmp_path / "packed")))
    assert repr(found) == repr(expected)
