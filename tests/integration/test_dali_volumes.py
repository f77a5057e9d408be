"""The example that loads volumes with a DALILoader: values, labels, crops, and its script."""

import itertools
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("nvidia.dali")

from examples import dali_volumes
from tests.dali_samples import make_volumes


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make_volumes(tmp_path_factory.mktemp("volumes"))  # 10 of shape (12, 10, 10)


def standardize(volume):
    return (volume - volume.mean()) / volume.std()


def load(pairs, crop, **settings):
    loader = dali_volumes.make_loader([path for path, _ in pairs], range(len(pairs)), crop, num_threads=1, **settings)
    batches = list(loader)
    loader.close()
    return [torch.cat(part).numpy() for part in zip(*batches, strict=True)]


def test_dali_evaluation_equals_numpy(pairs):
    volumes, labels = load(pairs, (8, 6, 4), train=False)
    assert labels.tolist() == list(range(10))
    expected = np.stack([standardize(np.load(path)[2:10, 2:8, 3:7]) for path, _ in pairs])
    # Sums of 192 float32 values in another order differ by a few units in the last place for values up to 4.
    np.testing.assert_allclose(volumes[:, 0], expected, atol=1e-5)


def test_training_flips_and_crops_the_volume_that_belongs_to_the_label(pairs):
    ranks = [load(pairs, (11, 9, 9), rank=rank, world_size=2) for rank in range(2)]
    assert sorted(label for _, labels in ranks for label in labels) == list(range(10))
    for volumes, labels in ranks:
        for volume, label in zip(volumes[:, 0], labels, strict=True):
            corners = itertools.product(range(2), repeat=3)
            crops = [np.load(pairs[label][0])[z : z + 11, y : y + 9, x : x + 9] for z, y, x in corners]
            axes = [[axis for axis in range(3) if flip >> axis & 1] for flip in range(8)]
            same = [np.allclose(volume, np.flip(standardize(crop), a), atol=1e-4) for crop in crops for a in axes]
            assert sum(same) == 1


def test_the_example_loads_each_volume_once_and_resumes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dali_volumes.py"])
    dali_volumes.main()
    assert capsys.readouterr().out.splitlines() == [
        "epoch 0: 3 batches, each volume once: True",
        "epoch 1, resumed after its first batch: the same batches, bit for bit",
    ]
