"""The files of a packed folder: plain arrays where rows are alike, compressed rows, and an end that goes on."""

import json
import os

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_turbo.data import PackedDataset, pack
from lightning_turbo.data.packed import rows
from tests.data.packed.files import Samples, files_of, scan


def test_the_files_are_plain_arrays_where_samples_are_alike(tmp_path):
    pack(Samples(lambda n: (np.full((2, 2), n, np.float32), n)), tmp_path / "out")
    assert sorted(files_of(tmp_path / "out")) == ["0.npy", "1.npy", "packed.json"]
    assert np.load(tmp_path / "out" / "0.npy", mmap_mode="r").shape == (5, 2, 2)
    assert np.load(tmp_path / "out" / "1.npy").tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("field", [1, 2, 3])
def test_an_interruption_at_the_end_goes_on_too(tmp_path, monkeypatch, field):
    def make(n):
        return {"x": scan(n), "n": n, "name": "a" * n}

    def interrupt(descriptor):
        calls.append(descriptor)
        if len(calls) == field:
            raise KeyboardInterrupt

    pack(Samples(make), tmp_path / "whole")
    calls = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pack(Samples(make), tmp_path / "out")
    dataset = Samples(make)
    pack(dataset, tmp_path / "out")
    assert dataset.asked == [0]
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_an_interruption_in_the_first_sample_goes_on(tmp_path, monkeypatch):
    """Its files are there, and the journal counts nothing yet."""
    write = rows._write

    def interrupt(data, index, value):
        write(data, index, value)
        raise KeyboardInterrupt

    pack(Samples(scan), tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(rows, "_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pack(Samples(scan), tmp_path / "out")
    pack(Samples(scan), tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


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
