"""Augmentation on CUDA: bitwise the same parameters as on a CPU, and the same images up to rounding."""

import pytest
import torch

from lightning_turbo import augment

pytestmark = pytest.mark.gpu

STEPS = {
    "affine": lambda: augment.RandomAffine(20, translate=0.1),
    "blur": lambda: augment.RandomGaussianBlur(),
    "contrast": lambda: augment.RandomContrast(),
    "crop": lambda: augment.RandomCrop((8, 7, 6)),
    "cutmix": lambda: augment.CutMix(),
    "elastic": lambda: augment.RandomElastic((0, 2)),
    "flip": lambda: augment.RandomFlip(),
    "gamma": lambda: augment.RandomGamma(),
    "low_resolution": lambda: augment.RandomLowResolution(),
    "noise": lambda: augment.RandomGaussianNoise((0.5, 0.5)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_device_augments_as_a_cpu_does(name):
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(8, 2, 12, 10, 11, generator=generator)
    mask = (image[:, 0] * 4).long()
    step = STEPS[name]()
    step.p = 0.75
    augmentation = augment.BatchAugmentation([step], seed=3, mask=1)
    expected = augmentation((image, mask), range(8))
    got = augmentation((image.cuda(), mask.cuda()), range(8))
    assert all(part.is_cuda for part in got)
    torch.testing.assert_close(got[0].cpu(), expected[0], atol=1e-4, rtol=0)
    # Rounding may select either voxel if the source position is halfway between two.
    assert (got[1].cpu() != expected[1]).float().mean() < 0.01
