"""The files of a packed folder: plain arrays where rows are alike, and compressed rows."""

import json
import os

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_turbo.data import PackedDataset, pack
from tests.data.packed.files import Samples, files_of, scan


def test_the_files_are_plain_arrays_where_samples_are_alike(tmp_path):
    pack(Samples(lambda n: (np.full((2, 2), n, np.float32), n)), tmp_path / "out")
    assert sorted(files_of(tmp_path / "out")) == ["0.npy", "1.npy", "packed.json"]
    assert np.load(tmp_path / "out" / "0.npy", mmap_mode="r").shape == (5, 2, 2)
    assert np.load(tmp_path / "out" / "1.npy").tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("field", [1, 2, 3])
def test_an_interruption_at_the_end_leaves_nothing(tmp_path, monkeypatch, field):
    def interrupt(descriptor):
        calls.append(descriptor)
        if len(calls) == field:
            raise KeyboardInterrupt

    calls = []
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pack(Samples(lambda n: {"x": scan(n), "n": n, "name": "a" * n}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_compressed_samples_are_smaller_and_the_same(tmp_path):
    pytest.importorskip("blosc2")
    dataset = Samples(lambda n: {"x": np.full((2, 40 + n, 40, 40), n, np.int16), "n": n})
    for name, compress in (("plain", False), ("small", (16, 16, 16))):
        pack(dataset, tmp_path / name, compress=compress)
    sizes = [(tmp_path / name / "x.npy").stat().st_size for name in ("small", "plain")]
    assert sizes[0] < sizes[1] / 10
    packed = PackedDataset(tmp_path / "small")
    loaded = list(DataLoader(packed, None, num_workers=1))
    assert all(np.array_equal(loaded[n]["x"], dataset[n]["x"]) for n in range(5))
    assert [sample["n"].item() for sample in loaded] == [0, 1, 2, 3, 4]
    assert json.loads((tmp_path / "small" / "packed.json").read_text())["samples"] == 5
