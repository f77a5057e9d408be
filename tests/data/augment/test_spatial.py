"""RandomAffine, RandomElastic, RandomFlip and RandomCrop do what MONAI and slices do with equal parameters."""

import math

import pytest
import torch
from monai import transforms as monai

from lightning_turbo import augment
from lightning_turbo.data.augment import BatchAugmentation
from lightning_turbo.data.augment.draws import draws_of
from lightning_turbo.data.augment.transform import Parts
from tests.data.augment.samples import CPU, DEGREES, SPACES, images, masks


def test_parameters_of_transforms_fill_their_ranges():
    """Of a constant image, brightness shows the factor; the matrix shows rotation and scale."""
    indices = range(10_000)
    factor = BatchAugmentation([augment.RandomBrightness((0.5, 2.0), p=0.25)], 0)(
        (torch.ones(10_000, 1, 1, 1),), indices
    )
    changed = factor[0][factor[0] != 1]
    assert abs(len(changed) / 10_000 - 0.25) < 0.025
    assert changed.min() == pytest.approx(0.5, abs=0.01)
    assert changed.max() == pytest.approx(2, abs=0.01)
    assert changed.mean() == pytest.approx(1.25, abs=0.05)
    seen = {}

    class Affine(augment.RandomAffine):
        @staticmethod
        def matrix(angles, scale, shear, shift):
            seen.update(angles=angles, scale=scale, shear=shear, shift=shift)
            return augment.RandomAffine.matrix(angles, scale, shear, shift)

    Affine((-20, 40), (0.5, 2), (-5, 5), (-0.25, 0), p=0)(
        Parts([torch.ones(10_000, 1, 2, 2, 4)], [], None), draws_of(0, 0, indices, 1)[0]
    )
    limits = {"angles": (-20 * DEGREES, 40 * DEGREES), "scale": (0.5, 2)}
    limits["shear"] = (-math.tan(5 * DEGREES), math.tan(5 * DEGREES))
    for name, (low, high) in limits.items():
        span = high - low
        assert seen[name].min() == pytest.approx(low, abs=0.01 * span)
        assert seen[name].max() == pytest.approx(high, abs=0.01 * span)
    assert seen["angles"].mean() / DEGREES == pytest.approx(10, abs=0.6)
    for axis, size in enumerate((2, 2, 4)):
        assert seen["shift"][:, axis].min() == pytest.approx(-0.25 * size, rel=0.01)
    assert [seen[name][0].numel() for name in ("angles", "shear", "shift")] == [3, 6, 3]


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("space", SPACES)
def test_affine_equals_monais(space, padding_mode):
    axes, n = len(space), 3
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(n, 1 if axes == 2 else 3, generator=generator, dtype=torch.float64) - 0.5
    scale, shift = numbers(0.8, 1.0, 1.3), torch.randn(n, axes, generator=generator, dtype=torch.float64)
    for shear in (torch.zeros(n, axes * (axes - 1)), torch.rand(n, axes * (axes - 1), generator=generator) / 5):
        transform = augment.RandomAffine(padding_mode=padding_mode)
        matrix = transform.matrix(angles, scale, shear.double(), shift)
        parts = Parts([images(n, space)], [masks(n, space)], None)
        transform.resample(parts, torch.arange(n), transform.source(matrix, space, CPU))
        for row in range(n):
            whole = torch.eye(axes + 1, dtype=torch.float64)
            whole[:axes] = matrix[row]
            by_parameters = {
                "rotate_params": angles[row].tolist(),
                "translate_params": (-shift[row] / scale[row]).tolist(),
                "scale_params": [1 / scale[row].item()] * axes,
            }
            given = {"affine": whole} if shear.any() else by_parameters
            theirs = monai.Affine(**given, padding_mode=padding_mode, image_only=True, dtype=torch.float64)
            torch.testing.assert_close(
                parts.images[0][row], theirs(images(n, space)[row]).as_tensor(), atol=2e-5, rtol=0
            )
            mask = theirs(masks(n, space)[row], mode="nearest").as_tensor()
            # A voxel whose source lies between two voxels may go to either, by rounding.
            assert (parts.masks[0][row] != mask).float().mean() < 0.01
            assert parts.masks[0].dtype == torch.int64


@pytest.mark.parametrize("space", SPACES)
def test_elastic_samples_where_monai_does(space):
    axes, transform = len(space), augment.RandomElastic()
    points = 4 * torch.rand(2, axes, *[7] * axes, generator=torch.Generator().manual_seed(0)) - 2
    voxels = transform.source(points, space)  # from the center, as MONAI counts
    parts = Parts([images(2, space)], [], None)
    transform.resample(parts, torch.arange(2), voxels)
    for row in range(2):
        theirs = monai.Resample(padding_mode="zeros")(images(2, space)[row], voxels[row])
        torch.testing.assert_close(parts.images[0][row], theirs.as_tensor(), atol=2e-5, rtol=0)
    centers = torch.stack(torch.meshgrid(*[torch.arange(s) - (s - 1) / 2 for s in space], indexing="ij"))
    moved = voxels - centers
    assert 0.5 < moved.abs().max() <= points.abs().max()
    steps = [moved.diff(dim=axis).abs().max() for axis in range(2, axes + 2)]
    assert max(steps) < 2 * 4 / 2  # smooth: neighbors move alike
    still = transform.source(torch.full_like(points, 1.5), space)  # the weights of a spline sum to 1
    torch.testing.assert_close(still - centers, torch.full_like(moved, 1.5))


@pytest.mark.parametrize("space", SPACES)
def test_flips_and_crops_are_those_of_slices(space):
    """Of an image that holds its own coordinates, which the mask does too."""
    n, axes = 12, len(space)
    place = torch.arange(math.prod(space)).view(1, 1, *space).repeat(n, 1, *[1] * axes)
    size = (5, 4, 3)[:axes]
    steps = [augment.RandomFlip(), augment.RandomCrop(size)]
    image, mask = BatchAugmentation(steps, 3, mask=1)((place.float(), place[:, 0]), range(n))
    assert image.shape == (n, 1, *size)
    assert torch.equal(image[:, 0].long(), mask)
    flips, crop = draws_of(3, 0, range(n), 2)
    flipped = torch.stack([flips.uniform(0, 1) < 0.5 for _ in range(axes)], 1)
    begin = (crop.uniform(0, 1, axes) * (torch.tensor(space) - torch.tensor(size) + 1)).long()
    for row in range(n):
        own = place[row, 0].flip([axis for axis in range(axes) if flipped[row, axis]])
        assert torch.equal(mask[row], own[tuple(slice(b, b + s) for b, s in zip(begin[row], size, strict=True))])
    assert len(begin.unique(dim=0)) > 6
    one = BatchAugmentation([augment.RandomFlip([-1], p=1.0)], 0)((place.float(),), range(n))[0]
    assert torch.equal(one, place.float().flip(-1))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("step", [augment.RandomFlip, augment.RandomAffine, augment.RandomElastic], ids=str)
def test_masks_of_wide_unsigned_integers_are_those_of_signed_ones(step, p, dtype):
    mask = torch.arange(4 * 64).view(4, 1, 8, 8)
    augmentation = BatchAugmentation([step(p=p)], seed=0, image="image", mask="mask")
    found, expected = (
        augmentation({"image": torch.rand(4, 1, 8, 8), "mask": each}, range(4))["mask"]
        for each in (mask.to(dtype), mask.to(torch.int32))
    )
    assert found.dtype == dtype
    assert found.tolist() == expected.tolist()
    assert found.tolist() != mask.tolist()
