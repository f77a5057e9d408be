"""PerSample: transforms of other packages, seeded by sample."""

import importlib.util

import numpy as np
import pytest
import torch
from monai import transforms as monai
from torch.utils.data import DataLoader, default_collate

from lightning_turbo import augment
from lightning_turbo.data.augment import BatchAugmentation, Indexed, IndexedDataset
from tests.data.augment.samples import SPACES, Scans, assert_same, images, masks, passes


def test_monais_transforms_are_seeded_by_sample():
    steps = monai.Compose([
        monai.RandFlipd(["image", "mask"], prob=0.5), monai.RandRotated(["image", "mask"], range_x=0.5, prob=1.0),
        monai.RandGaussianNoised("image", prob=1.0),
    ])  # fmt: skip
    data = IndexedDataset(Scans())
    for transform, mask in ((steps, "mask"), (monai.RandGaussianNoise(prob=1.0), None)):
        augmentation = BatchAugmentation([augment.PerSample(transform)], 5, image="image", mask=mask)
        alone = passes(DataLoader(data, batch_size=1), augmentation)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        augmentation(Indexed([0], default_collate([data[0].data])))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()
        assert_same(alone, passes(DataLoader(data, batch_size=5), augmentation))
        assert not torch.equal(alone[0, 3][0], alone[1, 3][0])
        assert alone[0, 0][1].dtype == torch.int64


@pytest.mark.parametrize("package", ["torchvision", "kornia"])
def test_other_packages_are_seeded_by_sample(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "kornia":
        from kornia import augmentation as kornia

        transform = kornia.AugmentationSequential(kornia.RandomAffine(30.0, p=1.0), kornia.RandomHorizontalFlip())
    else:
        from torchvision.transforms import v2

        transform = v2.Compose([v2.RandomAffine(30), v2.RandomHorizontalFlip(), v2.GaussianNoise()])
    image = images(4, SPACES[0], channels=3)
    augmentation = BatchAugmentation([augment.PerSample(transform)], 5, mask=1)
    whole = augmentation((image, masks(4, SPACES[0])), range(4))
    for row in range(4):
        one = augmentation((image[row : row + 1], masks(4, SPACES[0])[row : row + 1]), [row])
        assert torch.equal(one[0][0], whole[0][row])
        assert torch.equal(one[1][0], whole[1][row])
    assert not torch.equal(whole[0], image)
    assert whole[1].dtype == torch.int64
