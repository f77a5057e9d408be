"""The suite of patches: every set-up of MONAI returns what PatchDataset returns, and leaves its cache as it is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks import patches

monai = pytest.importorskip("monai")
pytest.importorskip("nibabel")
TIMER: Any = SimpleNamespace(seed=0, quick=True)


@pytest.fixture
def files(tmp_path):
    yield patches.write_scans(TIMER, tmp_path)
    monai.data.set_track_meta(True)


@pytest.mark.parametrize("by", ["packed", "persistent", "cached", "indices", "classes", "bare"])
def test_a_batch_has_four_patches_half_of_them_on_foreground(by, tmp_path, files):
    data, collate = patches.MAKERS[by](TIMER, tmp_path, files)
    size = patches.PER_SCAN if by == "packed" else 1
    torch.manual_seed(0)
    batches = [batch for _ in range(4) for batch in DataLoader(data, size, collate_fn=collate)]
    for batch in batches:
        assert batch["image"].shape == batch["label"].shape == (4, 1, 32, 32, 32)
    if by in ("bare", "packed"):
        assert type(batches[0]["image"]) is torch.Tensor
        assert batches[0]["image"].dtype is torch.int16
    centers = torch.cat([batch["label"][:, 0, 16, 16, 16] for batch in batches])
    assert 0.3 < (centers > 0).float().mean() < 0.95


@pytest.mark.parametrize("by", ["indices", "classes", "bare"])
def test_patches_without_copies_are_views_of_the_cache_which_a_loader_copies(by, tmp_path, files):
    data, collate = patches.MAKERS[by](TIMER, tmp_path, files)
    before = [torch.as_tensor(item["image"]).clone() for item in data._cache]

    def unchanged():
        return [
            torch.equal(torch.as_tensor(item["image"]), image) for item, image in zip(data._cache, before, strict=True)
        ]

    for batch in DataLoader(data, collate_fn=collate):
        batch["image"].zero_()
    assert all(unchanged())
    data[0][0]["image"].zero_()
    assert unchanged() == [False, True, True, True]
