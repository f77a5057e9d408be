"""Augmentation leaves nothing that only the collector of garbage takes away: tensors are large, and it comes late."""

import gc

import pytest
import torch
from monai import transforms as monai

from lightning_turbo import augment

SPACES = [(12, 10), (8, 10, 9)]
TRANSFORMS = {
    "affine": lambda axes: augment.RandomAffine(30, (0.7, 1.4), 10, 0.1),
    "affine, some": lambda axes: augment.RandomAffine(p=0.5, padding_mode="reflection"),
    "blur": lambda axes: augment.RandomGaussianBlur(p=1),
    "brightness": lambda axes: augment.RandomBrightness(p=1),
    "contrast": lambda axes: augment.RandomContrast(p=1),
    "crop": lambda axes: augment.RandomCrop((5, 4, 3)[:axes]),
    "cutmix": lambda axes: augment.CutMix(3),
    "elastic": lambda axes: augment.RandomElastic(p=1),
    "flip": lambda axes: augment.RandomFlip(),
    "gamma": lambda axes: augment.RandomGamma(p=1),
    "low resolution": lambda axes: augment.RandomLowResolution(p=1),
    "mixup": lambda axes: augment.MixUp(3),
    "noise": lambda axes: augment.RandomGaussianNoise(p=1),
    "normalize": lambda axes: augment.NormalizeIntensity(),
    "per sample": lambda axes: augment.PerSample(monai.RandFlipd(["image", "mask"], prob=0.5)),
}


def test_every_transform_is_tried():
    tried = {type(make(2)).__name__ for make in TRANSFORMS.values()}
    assert tried == {
        name for name in augment.__all__
        if isinstance(kind := getattr(augment, name), type) and issubclass(kind, augment.RandomFlip.__base__)
    }  # fmt: skip


@pytest.mark.parametrize("space", SPACES, ids=["2D", "3D"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_transform_makes_a_cycle_of_references(name, space):
    batch = (torch.rand(4, 1, *space), (torch.rand(4, 1, *space) * 4).floor(), torch.tensor([0, 1, 2, 0]))
    masks = {} if name == "mixup" else {"mask": 1}
    augmentation = augment.BatchAugmentation([TRANSFORMS[name](len(space))], 0, label=2, **masks)
    augmentation(batch, range(4))  # what is made once, such as modules that are imported
    gc.collect()
    gc.disable()
    try:
        for epoch in range(3):
            augmentation.set_epoch(epoch)
            augmentation(batch, range(4))
        assert gc.collect() == 0
    finally:
        gc.enable()
