"""What packing a dataset would save, from some of its samples."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_turbo.data import PackedDataset, pack
from lightning_turbo.tune.pipeline import _in_words, describe_packing


@pytest.mark.parametrize(("times", "words"), [
    # 500 samples for each process, 10 ms each to load and to write; 6 ms less in each epoch.
    ((0.16, 0.04, 0.04), "packing takes 5 s (20 samples: 8 ms each to load, 2 packed) and pays from epoch 2 on"),
    ((0.16, 0.16, 0.08), "packing takes 8 s (20 samples: 8 ms each to load, 4 packed) and pays from epoch 5 on"),
    ((0.16, 0.16, 0.16), "packing takes 8 s (20 samples: 8 ms each to load, 8 packed) and saves nothing"),
])  # fmt: skip
def test_when_packing_pays(times, words):
    assert _in_words(500, 20, *times).startswith(words)


def test_a_dataset_that_is_packed_already_is_not_to_be_packed_again(tmp_path):
    pack([torch.ones(2)], tmp_path / "packed")
    assert describe_packing(DataLoader(PackedDataset(tmp_path / "packed"))) == "the dataset is packed already"


class RandFlip:
    """Named like one of MONAI's."""

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
    assert len(dataset.transform.transforms) == 2, "they are back"
