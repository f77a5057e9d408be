"""Augmentation of batches: what is drawn belongs to the sample, and does what MONAI does with the same parameters."""

import collections
import dataclasses
import importlib.util
import itertools
import math

import numpy as np
import pytest
import torch
from monai import transforms as monai
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate

from lightning_turbo import augment
from lightning_turbo.data import PackedDataset, PrefetchLoader, seed_samples
from lightning_turbo.data.augment import BatchAugmentation, Indexed, IndexedCollate, IndexedDataset
from lightning_turbo.data.augment.draws import draws_of
from lightning_turbo.data.augment.transform import Parts
from lightning_turbo.data.sample_seeds import seeds_of

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
OF_NEIGHBOURS = ("cutmix",)  # beside parameters, what comes out follows from the batch


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


# The draws.


def split_mix(state):
    """SplitMix64 as in the paper, with Python's integers."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def test_uniform_numbers_are_those_of_split_mix():
    step, seed, epoch, index, position = 0x9E3779B97F4A7C15, 7, 3, 123456789, 2
    key = split_mix((seeds_of(seed, epoch, 0, kind="augment")[0] + 2**63 + step * index) % 2**64)
    key = split_mix((key + step * (position + 1)) % 2**64)
    expected = [(split_mix((key + step * number) % 2**64) >> 11) / 2**53 for number in range(1, 7)]
    draws = draws_of(seed, epoch, [5, index], 3)[position]
    got = [draws.uniform(0, 1, 2, 2)[1].flatten(), draws.uniform(0, 1, 2)[1]]
    assert torch.cat(got).tolist() == expected


def everything(indices, epoch=1):
    """All kinds of numbers, of the second transform."""
    draws, rows = draws_of(7, epoch, indices, 2)[1], torch.arange(len(indices))
    some = [draws.uniform(-2, 3, 4), draws.beta(0.3)[:, None], draws.normal(rows, (7, 5), CPU).flatten(1).double()]
    return torch.cat([*some, draws.uniform(0, 1)[:, None]], 1)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_draws_belong_to_the_sample_in_any_batch(size):
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist()
    batches = [order[at : at + size] for at in range(0, 50, size)]
    got = torch.cat([everything(batch) for batch in batches])
    assert torch.equal(got, everything(list(range(50)))[order])
    assert not torch.equal(got, everything(order, epoch=2))


def test_drawn_numbers_are_distributed_as_they_say_and_independent():
    count = 10_000
    columns = []
    for epoch in (0, 1):
        for draws in draws_of(0, epoch, range(count), 2):
            columns += [draws.uniform(0, 1), draws.uniform(0, 1)]
    unit = torch.stack(columns)
    assert (unit.mean(1) - 0.5).abs().max() < 5 * math.sqrt(1 / 12 / count)
    assert ((unit.sort(1).values - torch.linspace(0, 1, count)).abs().max() * math.sqrt(count)) < 2.2  # Kolmogorov
    neighbours = torch.cat([unit, unit.roll(1, 1)])
    correlation = torch.corrcoef(neighbours) - torch.eye(len(neighbours))
    assert correlation.abs().max() < 5 / math.sqrt(count)
    draws = draws_of(0, 0, range(count), 1)[0]
    assert abs(len(draws.rows(0.3)) / count - 0.3) < 5 * math.sqrt(0.21 / count)
    assert (len(draws.rows(0)), len(draws.rows(1))) == (0, count)
    for alpha in (0.05, 0.4, 1.0, 8.0):
        share = draws.beta(alpha)
        variance = 1 / (4 * (2 * alpha + 1))
        assert share.isfinite().all()
        assert 0 <= share.min() <= share.max() <= 1
        assert abs(share.mean() - 0.5) < 5 * math.sqrt(variance / count)
        assert share.var() == pytest.approx(variance, rel=0.05)
    noise = draws.normal(torch.arange(100), (101,), CPU)
    assert abs(noise.mean()) < 0.05
    assert noise.var() == pytest.approx(1, rel=0.05)
    assert (noise**4).mean() == pytest.approx(3, rel=0.1)
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.5


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


# Against MONAI, with equal parameters.


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
    voxels = transform.source(points, space)  # from the centre, as MONAI counts
    parts = Parts([images(2, space)], [], None)
    transform.resample(parts, torch.arange(2), voxels)
    for row in range(2):
        theirs = monai.Resample(padding_mode="zeros")(images(2, space)[row], voxels[row])
        torch.testing.assert_close(parts.images[0][row], theirs.as_tensor(), atol=2e-5, rtol=0)
    centres = torch.stack(torch.meshgrid(*[torch.arange(s) - (s - 1) / 2 for s in space], indexing="ij"))
    moved = voxels - centres
    assert 0.5 < moved.abs().max() <= points.abs().max()
    steps = [moved.diff(dim=axis).abs().max() for axis in range(2, axes + 2)]
    assert max(steps) < 2 * 4 / 2  # smooth: neighbours move alike
    still = transform.source(torch.full_like(points, 1.5), space)  # the weights of a spline sum to 1
    torch.testing.assert_close(still - centres, torch.full_like(moved, 1.5))


def interior(value):
    return value[(slice(None), *[slice(3, -3)] * (value.dim() - 1))]


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


def low_resolution(zoom):
    def change(image):
        mode = "bilinear" if image.dim() == 3 else "trilinear"
        return monai.RandSimulateLowResolution(prob=1.0, upsample_mode=mode, zoom_range=(zoom, zoom))(image)

    return change


@pytest.mark.parametrize("space", SPACES)
def test_normalised_intensities_equal_monais(space):
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


def test_mixup_and_cutmix_mix_labels_as_images():
    n = 64
    image = torch.arange(float(n)).view(n, 1, 1, 1).repeat(1, 1, 20, 20)
    label = torch.arange(n)
    before = torch.arange(n).roll(1)
    mixed, soft = BatchAugmentation([augment.MixUp(n, 0.4, p=0.7)], 0, label=1)((image, label), range(n))
    share = soft[label, label]
    assert torch.equal(soft.sum(1), torch.ones(n))
    assert 5 < (share == 1).sum() < 40
    torch.testing.assert_close(mixed[:, 0, 0, 0], share * label + (1 - share) * before)
    both = {"image": image, "mask": label.view(n, 1, 1).repeat(1, 20, 20), "label": label}
    cut = BatchAugmentation([augment.CutMix(n)], 0, image="image", mask="mask", label="label")(both, range(n))
    assert torch.equal(cut["image"][:, 0].long(), cut["mask"])
    share = (cut["mask"] == label.view(n, 1, 1)).float().mean((1, 2))
    torch.testing.assert_close(cut["label"][label, label], share)
    torch.testing.assert_close(cut["label"][label, before], 1 - share)
    # The parameters are those of the sample whatever is beside it; then labels may be mixed twice.
    steps = [augment.MixUp(n), augment.CutMix()]
    twice = BatchAugmentation(steps, 0, label=1)((image, label), range(n))[1]
    torch.testing.assert_close(twice.sum(1), torch.ones(n))


# The same in any batch, process and rank, and after a restart.


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


@pytest.mark.parametrize("name", sorted(set(ALL) - {*OF_NEIGHBOURS}))
def test_a_sample_is_augmented_alike_in_any_batch(name):
    augmentation = BatchAugmentation(
        [ALL[name](), ALL[name]()][: 1 if name == "crop" else 2], 5, image="image", mask="mask"
    )
    data = IndexedDataset(Scans())
    alone = passes(DataLoader(data, batch_size=1), augmentation)
    batched = passes(DataLoader(data, batch_size=4, shuffle=True), augmentation)
    # A product of matrices, or a sum, may be computed in another order in a larger batch.
    assert_same(alone, batched, atol=1e-5)
    assert_same(passes(DataLoader(data, batch_size=4), augmentation, (1,)), batched, atol=1e-5)
    if name != "normalize":
        assert not torch.equal(alone[0, 3][0], alone[1, 3][0])


def test_workers_ranks_and_restarts_change_no_bit():
    steps = [ALL[name]() for name in ("affine", "elastic", "flip", "gamma", "blur", "noise", "low_resolution")]
    augmentation, data = BatchAugmentation(steps, 5, image="image", mask="mask"), IndexedDataset(Scans())
    expected = passes(DataLoader(data, batch_size=5), augmentation)
    assert len(expected) == 20
    for loader in (
        DataLoader(data, batch_size=5, num_workers=1),
        DataLoader(data, batch_size=5, num_workers=2, collate_fn=IndexedCollate()),
        PrefetchLoader(data, batch_size=5),
        seed_samples(DataLoader(data, batch_size=5), seed=1),
    ):
        assert_same(passes(loader, augmentation), expected)
    for rank in (0, 1):
        sampler = DistributedSampler(data, 2, rank)
        assert_same(passes(DataLoader(data, batch_size=5, sampler=sampler), augmentation), expected)


def test_thirty_restarts_change_no_bit():
    """Each with an object of its own, as a process that begins there has it."""
    steps = [ALL[name]() for name in ("affine", "noise")]
    data = IndexedDataset(Scans())
    expected = passes(
        DataLoader(data, batch_size=5), BatchAugmentation(steps, 5, image="image", mask="mask"), range(15)
    )
    for epoch, batch in itertools.product(range(15), range(2)):
        left = DataLoader(Subset(data, range(5 * batch, 10)), batch_size=5)
        assert_same(passes(left, BatchAugmentation(steps, 5, image="image", mask="mask"), (epoch,)), expected)


# The structure of batches.

Named = collections.namedtuple("Named", ["image", "mask"])


@dataclasses.dataclass(frozen=True)
class Case:
    image: torch.Tensor
    mask: torch.Tensor
    name: str = "x"


def test_batches_of_every_structure():
    image, mask = images(), masks()
    steps = [augment.RandomAffine(), augment.RandomFlip()]
    positions = BatchAugmentation(steps, 0, image=0, mask=1)
    names = BatchAugmentation(steps, 0, image="image", mask="mask")
    expected = positions((image, mask), range(4))
    batches = [
        (positions, [image, mask, "other"], lambda b: (b[0], b[1])),
        (positions, Named(image, mask), lambda b: (b.image, b.mask)),
        (names, collections.OrderedDict(image=image, mask=mask, rest=3), lambda b: (b["image"], b["mask"])),
        (names, Case(image, mask), lambda b: (b.image, b.mask)),
        (BatchAugmentation(steps, 0, image=-3, mask=[-2]), (image, mask, 5), lambda b: b[:2]),
        (BatchAugmentation(steps, 0, image=["a", "b"], mask="mask"), {"a": image, "b": image, "mask": mask[:, 0]},
         lambda b: (b["b"], b["mask"][:, None])),
    ]  # fmt: skip
    for augmentation, batch, parts in batches:
        done = augmentation(Indexed([0, 1, 2, 3], batch))
        assert type(done) is type(batch)
        assert all(torch.equal(one, two) for one, two in zip(parts(done), expected, strict=True))
    assert torch.equal(image, images())  # the batch itself stays
    assert torch.equal(mask, masks())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_images_keep_their_dtype_or_get_the_one_asked_for(dtype):
    steps = [ALL[name]() for name in ("affine", "gamma", "blur", "noise")]
    exact = BatchAugmentation(steps, 0)((images(),), range(4))[0]
    kept = BatchAugmentation(steps, 0)((images().to(dtype),), range(4))[0]
    asked = BatchAugmentation(steps, 0, dtype=dtype)((images(),), range(4))[0]
    assert kept.dtype == asked.dtype == dtype
    assert torch.equal(asked, exact.to(dtype))
    torch.testing.assert_close(kept.float(), exact, atol=0.05, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(BatchAugmentation(steps, 0)((images(),), range(4))[0], exact)


class Whole(list):
    """What a dataset returns of a batch, with more than its samples."""


class Bulk(Scans):
    def __getitems__(self, indices):
        return Whole(self[index] for index in indices)


def collate_whole(samples):
    assert type(samples) is Whole
    return default_collate(list(samples))


@pytest.mark.parametrize(
    ("data", "collate"),
    [(Scans, None), (Bulk, None), (Scans, IndexedCollate()), (Bulk, IndexedCollate(collate_whole))],
)
def test_collated_samples_keep_their_indices(data, collate):
    loader = DataLoader(IndexedDataset(data()), batch_size=4, collate_fn=collate)
    for each in (loader, seed_samples(loader, seed=1)):
        batches = list(each)
        assert [batch.index for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert all(batch.index == batch.data["number"].tolist() for batch in batches)


# Transforms of other packages.


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


# What is refused.


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
        (lambda: augment.RandomFlip([0, 0]), ValueError, "different"),
        (lambda: augment.RandomCrop((4,)), ValueError, "2 or 3 positive integers, got"),
        (lambda: augment.MixUp(alpha=0), ValueError, "above 0, got 0"),
        (lambda: augment.MixUp(1), ValueError, "2 or more"),
        (lambda: BatchAugmentation([torch.nn.ReLU()], 0), TypeError, "PerSample wraps"),
        (lambda: BatchAugmentation([], -1), ValueError, "seed"),
        (lambda: BatchAugmentation([], 0, dtype=torch.int64), TypeError, "floating-point"),
        (lambda: BatchAugmentation([], 0, image=None), TypeError, "image"),
        (lambda: BatchAugmentation([], 0).set_epoch(-1), ValueError, "epoch"),
        (lambda: augment.PerSample(torch.nn.ReLU()), TypeError, "can be seeded by sample"),
        (lambda: IndexedDataset(iter([1])), TypeError, "__getitem__"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_at_construction(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("steps", "names", "batch", "error", "says"),
    [
        ([], {}, (torch.rand(2, 1, 3, 3, 3, 3),), ValueError, r"shape: expected .*got \(2, 1, 3, 3, 3, 3\)"),
        ([], {}, (torch.rand(2, 5),), ValueError, r"got \(2, 5\)"),
        ([], {}, (torch.zeros(2, 1, 4, 4, dtype=torch.uint8),), TypeError, "got torch.uint8. Pass dtype="),
        ([], {}, ("text",), TypeError, "expected a tensor, got 'text'"),
        ([], {"mask": 1}, (torch.rand(2, 1, 4, 4), torch.rand(2, 1, 4, 5)), ValueError,
         r"mask 1: shape: expected .*\(2, 4, 4\).*\(2, 1, 4, 4\), got \(2, 1, 4, 5\)"),
        ([], {"mask": "mask"}, {"image": 1}, KeyError, "no 0"),
        ([], {"image": [0, 1]}, (torch.rand(2, 1, 4, 4), torch.rand(2, 1, 4, 3)), ValueError, r"image 1"),
        ([], {}, (torch.rand(3, 1, 4, 4),), ValueError, "3 indices, one a sample, got"),
        ([], {}, torch.rand(2, 1, 4, 4), TypeError, "expected a mapping, tuple, list or dataclass, got Tensor"),
        ([augment.RandomCrop((3, 3, 3))], {}, (torch.rand(2, 1, 4, 4),), ValueError, r"\(3, 3, 3\)"),
        ([augment.RandomCrop((5, 3))], {}, (torch.rand(2, 1, 4, 4),), ValueError, r"within the images' \(4, 4\)"),
        ([augment.RandomFlip([2])], {}, (torch.rand(2, 1, 4, 4),), ValueError, r"axes of the space \(4, 4\)"),
        ([augment.MixUp(3)], {}, (torch.rand(2, 1, 4, 4),), ValueError, "label=None"),
        ([augment.MixUp()], {"label": 1}, (torch.rand(2, 1, 4, 4), torch.tensor([0, 1])), ValueError, "num_classes"),
        ([augment.CutMix()], {}, (torch.rand(2, 1, 4, 4),), ValueError, "neither"),
        ([augment.PerSample(monai.RandFlip())], {"mask": 0}, (torch.rand(2, 1, 4, 4),), ValueError, "with keys"),
    ],
)  # fmt: skip
def test_wrong_batches_are_refused(steps, names, batch, error, says):
    with pytest.raises(error, match=says):
        BatchAugmentation(steps, 0, **names)(batch, [0, 1])


def test_a_batch_without_indices_is_refused():
    with pytest.raises(ValueError, match="expected the batch of an IndexedDataset, or index=, got a tuple"):
        BatchAugmentation([], 0)((images(),))


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


@pytest.mark.parametrize("span", [1.0, 1e-3, 1e-7, 1e-20])
def test_gamma_is_the_formula_of_the_card_for_every_range(span):
    image = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
    found = augment.RandomGamma((2.0, 2.0), p=1.0).change(image * span, torch.tensor(2.0).view(1, 1, 1, 1))
    assert torch.allclose(found / span, image**2, atol=1e-5)


def test_samples_that_were_changed_after_they_were_indexed_are_collated():
    data = IndexedDataset(PackedDataset(np.zeros((4, 2), np.float32)))

    class Changed(Dataset):
        def __len__(self):
            return 4

        def __getitems__(self, indices):
            samples = data.__getitems__(indices)
            samples[0] = Indexed(samples[0].index, samples[0].data + 100)
            return samples

    (batch,) = DataLoader(Changed(), 4, collate_fn=IndexedCollate(PackedDataset.collate))
    assert batch.data[:, 0].tolist() == [100, 0, 0, 0]
