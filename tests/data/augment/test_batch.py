"""BatchAugmentation: a sample is augmented alike in any batch, process and rank; structures, dtypes, refusals."""

import collections
import dataclasses
import itertools

import pytest
import torch
from monai import transforms as monai
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lightning_turbo import augment
from lightning_turbo.data import PrefetchLoader, seed_samples
from lightning_turbo.data.augment import BatchAugmentation, Indexed, IndexedCollate, IndexedDataset
from tests.data.augment.samples import ALL, Scans, assert_same, images, masks, passes

OF_NEIGHBORS = ("cutmix",)  # beside parameters, what comes out follows from the batch


# The same in any batch, process and rank, and after a restart.


@pytest.mark.parametrize("name", sorted(set(ALL) - {*OF_NEIGHBORS}))
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


# What is refused.


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
        ([], {}, (torch.rand(3, 1, 4, 4),), ValueError, "3 indices, one per sample, got"),
        ([], {}, torch.rand(2, 1, 4, 4), TypeError, "expected a mapping, tuple, list or dataclass, got Tensor"),
        ([augment.RandomCrop((3, 3, 3))], {}, (torch.rand(2, 1, 4, 4),), ValueError, r"\(3, 3, 3\)"),
        ([augment.RandomCrop((5, 3))], {}, (torch.rand(2, 1, 4, 4),), ValueError, r"size of the images, \(4, 4\)"),
        ([augment.RandomFlip([2])], {}, (torch.rand(2, 1, 4, 4),), ValueError, r"axes of the space \(4, 4\)"),
        ([augment.MixUp(3)], {}, (torch.rand(2, 1, 4, 4),), ValueError, "label=None"),
        ([augment.MixUp()], {"label": 1}, (torch.rand(2, 1, 4, 4), torch.tensor([0, 1])), ValueError, "num_classes"),
        ([augment.CutMix()], {}, (torch.rand(2, 1, 4, 4),), ValueError, "neither"),
        ([augment.PerSample(monai.RandFlip())], {"mask": 0}, (torch.rand(2, 1, 4, 4),), ValueError, "dictionary"),
    ],
)  # fmt: skip
def test_wrong_batches_are_refused(steps, names, batch, error, says):
    with pytest.raises(error, match=says):
        BatchAugmentation(steps, 0, **names)(batch, [0, 1])


def test_a_batch_without_indices_is_refused():
    with pytest.raises(ValueError, match="expected the batch of an IndexedDataset, or index=, got a tuple"):
        BatchAugmentation([], 0)((images(),))
