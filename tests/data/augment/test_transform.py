"""What holds for every transform: wrong arguments are refused, and no cycle of references is left.

The collector of garbage takes a cycle away late, and the tensors of a batch are large.
"""

import gc

import pytest
import torch
from monai import transforms as monai

from lightning_turbo import augment
from lightning_turbo.data.augment import BatchAugmentation, IndexedDataset
from lightning_turbo.data.augment.transform import Transform

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
    gc.freeze()  # so that the next collection need not look through what others have made
    gc.disable()
    try:
        for epoch in range(3):
            augmentation.set_epoch(epoch)
            augmentation(batch, range(4))
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: augment.RandomFlip(p=1.5), ValueError, "RandomFlip: p: expected a probability from 0 to 1, got 1.5"),
        (lambda: augment.RandomGamma(p=-0.1), ValueError, "got -0.1"),
        (lambda: augment.RandomGamma((2, 1)), ValueError, r"RandomGamma: gamma: .*got \(2, 1\)"),
        (lambda: augment.RandomGamma(0.5), ValueError, "two numbers"),
        (lambda: augment.RandomGaussianBlur((-1, 1)), ValueError, "of 0.0 or more"),
        (lambda: augment.RandomAffine(scale=(0, 1)), ValueError, "scale"),
        (lambda: augment.RandomAffine(padding_mode="wrap"), ValueError, "or 'reflection', got 'wrap'"),
        (lambda: augment.RandomLowResolution((0.5, 1.5)), ValueError, "up to 1"),
        (lambda: augment.RandomElastic(control_points=3), ValueError, "4 or more, got 3"),
        (lambda: augment.RandomFlip([0, 0]), ValueError, "distinct"),
        (lambda: augment.RandomCrop((4,)), ValueError, "2 or 3 positive integers, got"),
        (lambda: augment.MixUp(alpha=0), ValueError, "above 0, got 0"),
        (lambda: augment.MixUp(1), ValueError, "2 or more"),
        (lambda: BatchAugmentation([torch.nn.ReLU()], 0), TypeError, "PerSample wraps"),
        (lambda: BatchAugmentation([], -1), ValueError, "seed"),
        (lambda: BatchAugmentation([], 0, dtype=torch.int64), TypeError, "floating-point"),
        (lambda: BatchAugmentation([], 0, image=None), TypeError, "image"),
        (lambda: BatchAugmentation([], 0).set_epoch(-1), ValueError, "epoch"),
        (lambda: augment.PerSample(torch.nn.ReLU()), TypeError, "can be seeded per sample"),
        (lambda: IndexedDataset(iter([1])), TypeError, "__getitem__"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_at_construction(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize("make", [
    lambda: augment.RandomElastic(p=0), lambda: augment.RandomAffine(p=0), lambda: augment.RandomGamma(p=0),
    lambda: augment.RandomLowResolution(p=0),
], ids=["elastic", "affine", "gamma", "low resolution"])  # fmt: skip
def test_a_batch_of_which_no_sample_is_drawn_stays_as_it_is(make):
    image, mask = torch.rand(4, 1, 12, 10), torch.ones(4, 12, 10, dtype=torch.int64)
    got = BatchAugmentation([make()], 0, mask=1)((image, mask), range(4))
    assert torch.equal(got[0], image)
    assert torch.equal(got[1], mask)


def test_a_transform_that_says_not_what_it_does_is_refused_as_it_is_made():
    class Forgets(Transform):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Forgets(0.5)
