"""Transforms of intensities do what MONAI's do with equal parameters."""

import pytest
import torch
from monai import transforms as monai

from lightning_turbo import augment
from lightning_turbo.data.augment import BatchAugmentation
from tests.data.augment.samples import SPACES, images


def interior(value):
    return value[(slice(None), *[slice(3, -3)] * (value.dim() - 1))]


def low_resolution(zoom):
    def change(image):
        mode = "bilinear" if image.dim() == 3 else "trilinear"
        return monai.RandSimulateLowResolution(prob=1.0, upsample_mode=mode, zoom_range=(zoom, zoom))(image)

    return change


@pytest.mark.parametrize("space", [(16, 12), (11, 12, 13)])
@pytest.mark.parametrize(
    ("ours", "values", "theirs", "part"),
    [
        (augment.RandomGamma, (0.5, 1.7), lambda v: monai.AdjustContrast(v), None),
        (
            augment.RandomBrightness,
            (0.5, 1.7),
            lambda v: monai.ScaleIntensity(minv=None, maxv=None, factor=v - 1),
            None,
        ),
        (
            augment.RandomContrast,
            (0.5, 1.7),
            lambda v: monai.ScaleIntensityFixedMean(factor=v - 1, fixed_mean=True, preserve_range=True),
            None,
        ),
        # MONAI's lets zeros in at the border.
        (augment.RandomGaussianBlur, (0.4, 0.7), lambda v: monai.GaussianSmooth(v), interior),
        (augment.RandomLowResolution, (0.5, 0.75), lambda v: low_resolution(v), None),
    ],
    ids=["gamma", "brightness", "contrast", "blur", "low_resolution"],
)
def test_intensities_equal_monais(ours, values, theirs, part, space):
    batch = images(2, space, channels=1) - 0.2
    got = ours().change(batch, torch.tensor(values).view(-1, *[1] * (batch.dim() - 1)))
    for row, value in enumerate(values):
        expected = torch.as_tensor(theirs(value)(batch[row]))
        cut = part or (lambda value: value)
        torch.testing.assert_close(cut(got[row]), cut(expected), atol=1e-4, rtol=0)
        assert not torch.allclose(got[row], batch[row], atol=1e-2)


@pytest.mark.parametrize("space", SPACES)
def test_normalized_intensities_equal_monais(space):
    batch = images(2, space)
    batch[1, 1] = 3.0
    got = augment.NormalizeIntensity().change(batch)
    for row in range(2):
        theirs = monai.NormalizeIntensity(channel_wise=True)(batch[row])
        torch.testing.assert_close(got[row], torch.as_tensor(theirs), atol=1e-5, rtol=0)


def test_noise_has_its_deviation_and_a_blur_without_width_is_none():
    batch = (torch.zeros(3, 1, 40, 40),)
    noisy = BatchAugmentation([augment.RandomGaussianNoise((0.5, 0.5), p=1)], 0)(batch, range(3))[0]
    assert noisy.std((1, 2, 3)).tolist() == pytest.approx([0.5] * 3, rel=0.05)
    image = images(2, (8, 9))
    torch.testing.assert_close(augment.RandomGaussianBlur().change(image, torch.zeros(2, 1, 1, 1)), image)


@pytest.mark.parametrize("span", [1.0, 1e-3, 1e-7, 1e-20])
def test_gamma_is_the_formula_of_the_card_for_every_range(span):
    image = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
    found = augment.RandomGamma((2.0, 2.0), p=1.0).change(image * span, torch.tensor(2.0).view(1, 1, 1, 1))
    assert torch.allclose(found / span, image**2, atol=1e-5)
