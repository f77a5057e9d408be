"""Whatever kernels compute a transform, the result is the same; the layout in memory is kept."""

import math

import pytest
import torch

from lightning_turbo import augment
from lightning_turbo.data.augment import kernels
from lightning_turbo.data.augment.spatial import _Corners

STEPS = [
    augment.RandomAffine(20), augment.RandomFlip(), augment.RandomGaussianBlur(p=0.5), augment.RandomContrast(p=0.5),
    augment.RandomGamma(p=0.5), augment.RandomLowResolution(p=0.5), augment.RandomCrop((20, 18)),
]  # fmt: skip


def images(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("space", [(16, 12), (8, 9, 10)])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
def test_both_ways_to_sample_agree(space, padding_mode):
    axes, image = len(space), images(3, 2, *space)
    source = 1.3 * (images(3, axes, *space) - 0.5) * torch.tensor(space).view(1, axes, *[1] * axes)
    ours = _Corners(source, padding_mode).linear(image)
    torch.testing.assert_close(
        kernels.sample_linear(image, kernels.grid_of(source), padding_mode), ours, atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("space", [(16, 12), (8, 9, 10)])
def test_the_grid_of_a_matrix_is_that_of_its_places(space):
    axes = len(space)
    matrix = images(3, axes, axes + 1) - 0.5
    source = augment.RandomAffine.source(matrix, space, torch.device("cpu"))
    torch.testing.assert_close(kernels.affine_grid(matrix, space), kernels.grid_of(source), atol=1e-5, rtol=0)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 1.5])
def test_both_ways_to_blur_agree(sigma, monkeypatch):
    image, value = images(3, 2, 21, 17), torch.tensor([sigma, sigma / 2, 0.0])
    blur = augment.RandomGaussianBlur((0.0, sigma))
    by_one_filter = blur.change(image, value)
    monkeypatch.setattr(kernels, "blur", lambda image, weights: None)
    torch.testing.assert_close(by_one_filter, blur.change(image, value), atol=1e-4, rtol=0)
    torch.testing.assert_close(by_one_filter[2], image[2], atol=1e-6, rtol=0)


def test_a_constant_image_stays_constant_up_to_its_borders():
    for sigma in (0.5, 1.5, 4.0):
        done = augment.RandomGaussianBlur((sigma, sigma)).change(torch.full((1, 1, 9, 30), 3.0), torch.tensor([sigma]))
        torch.testing.assert_close(done, torch.full((1, 1, 9, 30), 3.0))


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_channels_last_is_kept(dtype):
    image = images(6, 3, 24, 20)
    augmentation = augment.BatchAugmentation(STEPS, 1, dtype=dtype)
    expected = augmentation((image,), range(6))[0]
    got = augmentation((image.contiguous(memory_format=torch.channels_last),), range(6))[0]
    assert expected.is_contiguous()
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(got, expected, atol=1e-3 if dtype else 1e-5, rtol=0)


def test_angles_are_those_of_the_body_where_voxels_are_not_cubes():
    """A quarter turn of voxels twice as high as wide: 4 rows and 4 columns become 2 rows and 8 columns."""
    image = torch.zeros(1, 1, 24, 24)
    image[..., 10:14, 10:14] = 1
    turn = augment.RandomAffine((90, 90), (1, 1), spacing=(2.0, 1.0))
    done = augment.BatchAugmentation([turn], 0)((image,), [0])[0][0, 0] > 0.4
    rows, columns = done.nonzero().T
    assert (rows.max() - rows.min() + 1, columns.max() - columns.min() + 1) == (2, 8)


def test_a_turn_in_lengths_keeps_lengths():
    spacing = (3.0, 0.7, 1.0)
    seen = []

    class Affine(augment.RandomAffine):
        @staticmethod
        def source(matrix, space, device):
            seen.append(matrix)
            return augment.RandomAffine.source(matrix, space, device)

    augment.BatchAugmentation([Affine(40, (1, 1), translate=0.2, spacing=spacing)], 0)(
        (images(5, 1, 8, 9, 7),), range(5)
    )
    sizes = torch.tensor(spacing, dtype=torch.float64)
    matrix = seen[0][:, :, :3] * sizes[:, None] / sizes
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(3, dtype=torch.float64).expand(5, 3, 3))
    assert (matrix - torch.eye(3)).abs().max() > 0.1


@pytest.mark.parametrize("spacing", [1.0, (1.0,), (1.0, 0.0), (1.0, math.inf), (1.0, "x")])
def test_wrong_spacings_are_refused(spacing):
    with pytest.raises(ValueError, match="RandomAffine: spacing"):
        augment.RandomAffine(spacing=spacing)
    with pytest.raises(ValueError, match=r"RandomAffine: spacing: expected 2 numbers"):
        augment.BatchAugmentation([augment.RandomAffine(spacing=(1, 1, 2))], 0)((images(1, 1, 4, 4),), [0])
