"""The time that packing a dataset would save, estimated from some samples."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_turbo.data import PackedDataset, pack
from lightning_turbo.tune.pipeline import _in_words, describe_packing


@pytest.mark.parametrize(("times", "words"), [
    # 500 samples per process, 10 ms each to load and to write, and 6 ms less in each epoch.
    ((0.16, 0.04, 0.04), "packing takes 5 s (20 samples: 8 ms each to load, 2 packed) and pays from epoch 2 on"),
    ((0.16, 0.16, 0.08), "packing takes 8 s (20 samples: 8 ms each to load, 4 packed) and pays from epoch 5 on"),
    ((0.16, 0.16, 0.16), "packing takes 8 s (20 samples: 8 ms each to load, 8 packed) and saves nothing"),
])  # fmt: skip
def test_when_packing_saves_time(times, words):
    assert _in_words(500, 20, *times).startswith(words)


def test_packing_is_not_recommended_for_a_packed_dataset(tmp_path):
    pack([torch.ones(2)], tmp_path / "packed")
    assert describe_packing(DataLoader(PackedDataset(tmp_path / "packed"))) == "the dataset is packed already"


class RandFlip:
    """Has the name of a MONAI transform."""

    def __call__(self, sample):
        return sample + torch.rand(2)


RandFlip.__module__ = "monai.transforms"


class Flipped(Dataset):
    """Draws random numbers in the last of its transforms."""

    def __init__(self):
        self.transform = SimpleNamespace(transforms=[torch.neg, RandFlip()])

    def __len__(self):
        return 4

    def __getitem__(self, index):
        sample = torch.ones(2)
        for each in self.transform.transforms:
            sample = each(sample)
        return sample


@pytest.mark.parametrize("subset", [False, True])
def test_packing_is_timed_before_the_random_transforms_also_inside_a_subset(subset):
    dataset = Flipped()
    loader = DataLoader(Subset(dataset, [0, 1]) if subset else dataset)
    assert f"({2 if subset else 4} samples: " in describe_packing(loader)
    assert len(dataset.transform.transforms) == 2, "the transforms are restored"
