"""Images, masks and transforms for the tests of augmentation."""

import math

import torch
from torch.utils.data import Dataset

from lightning_turbo import augment
from lightning_turbo.data.augment import Indexed

CPU = torch.device("cpu")
SPACES = [(16, 12), (10, 12, 9)]
DEGREES = math.pi / 180

# One of each, with every sample changed.
ALL = {
    "affine": lambda: augment.RandomAffine(30, (0.7, 1.4), 10, 0.1),
    "blur": lambda: augment.RandomGaussianBlur(p=1),
    "brightness": lambda: augment.RandomBrightness(p=1),
    "contrast": lambda: augment.RandomContrast(p=1),
    "crop": lambda: augment.RandomCrop((5, 4, 3)),
    "cutmix": lambda: augment.CutMix(),
    "elastic": lambda: augment.RandomElastic(p=1),
    "flip": lambda: augment.RandomFlip(),
    "gamma": lambda: augment.RandomGamma(p=1),
    "low_resolution": lambda: augment.RandomLowResolution(p=1),
    "noise": lambda: augment.RandomGaussianNoise(p=1),
    "normalize": lambda: augment.NormalizeIntensity(),
}


def images(n=4, space=SPACES[1], channels=2, seed=0):
    return torch.rand(n, channels, *space, generator=torch.Generator().manual_seed(seed))


def masks(n=4, space=SPACES[1]):
    return (images(n, space, 1, seed=1) * 4).long()


class Scans(Dataset):
    """Samples of an image and a mask, as a dictionary."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"image": images(1, seed=index)[0], "mask": masks(1)[0], "number": index}


def passes(loader, augmentation, epochs=(0, 1)):
    """What is loaded and augmented: (epoch, number of the sample) -> image and mask."""
    found = {}
    for epoch in epochs:
        augmentation.set_epoch(epoch)
        for batch in loader:
            assert isinstance(batch, Indexed)
            done = augmentation(batch)
            for row, number in enumerate(done["number"].tolist()):
                found[epoch, number] = done["image"][row], done["mask"][row]
    return found


def assert_same(some, other, atol=0.0):
    assert some.keys() <= other.keys()
    for key, parts in some.items():
        for one, two in zip(parts, other[key], strict=True):
            torch.testing.assert_close(one, two, atol=atol, rtol=0, msg=str(key))
