"""PerSample: transforms of other packages, seeded by sample."""

import importlib.util
import sys
import types

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


class Flips:
    """What transforms of torchvision and kornia have in common: one draw for all that they are given."""

    def __init__(self):
        self.given = []

    def flip(self, parts):
        flips = torch.rand(()) < 0.5
        done = [part.flip(-1) if flips else part for part in parts]
        return done if len(done) > 1 else done[0]


class OfTorchvision(Flips):
    __module__ = "torchvision.transforms.v2"

    def __call__(self, *parts):
        self.given.append([type(part).__name__ for part in parts])
        return self.flip(parts)


class AugmentationSequential(Flips):
    __module__ = "kornia.augmentation"

    def __call__(self, *parts, data_keys):
        assert all(part.ndim == 4 and part.is_floating_point() for part in parts)
        self.given.append(data_keys)
        return self.flip(parts)


class OfKornia(Flips):
    __module__ = "kornia.augmentation"

    def __call__(self, image):
        return self.flip([image])


@pytest.fixture
def _tv_tensors(monkeypatch):
    """Stands for torchvision's module of tensors that know what they are."""
    module = types.ModuleType("torchvision.tv_tensors")
    for name in ("Image", "Mask"):
        kind = type(name, (torch.Tensor,), {})
        setattr(module, name, lambda value, kind=kind: value.as_subclass(kind))
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.tv_tensors", module)


@pytest.mark.usefixtures("_tv_tensors")
@pytest.mark.parametrize(("make", "given"), [
    (OfTorchvision, ["Image", "Mask"]), (AugmentationSequential, ["input", "mask"]),
])  # fmt: skip
def test_a_stand_in_for_another_package_gets_each_sample_as_the_package_takes_it(make, given):
    image, mask = images(6, SPACES[0]), masks(6, SPACES[0])
    transform = make()
    augmentation = BatchAugmentation([augment.PerSample(transform)], 5, mask=1)
    whole = augmentation((image, mask), range(6))
    assert transform.given == [given] * 6
    assert [type(part) for part in whole] == [torch.Tensor] * 2
    assert (whole[0].dtype, whole[1].dtype) == (torch.float32, torch.int64)
    flipped = [not torch.equal(one, two) for one, two in zip(whole[0], image, strict=True)]
    assert 0 < sum(flipped) < 6
    for row in range(6):
        assert torch.equal(whole[1][row], mask[row].flip(-1) if flipped[row] else mask[row])
        alone = augmentation((image[row : row + 1], mask[row : row + 1]), [row])
        assert torch.equal(alone[0][0], whole[0][row])


@pytest.mark.usefixtures("_tv_tensors")
@pytest.mark.parametrize("make", [OfTorchvision, OfKornia])
def test_a_stand_in_that_gets_the_image_alone_changes_it(make):
    image = images(6, SPACES[0])
    (got,) = BatchAugmentation([augment.PerSample(make())], 5)((image,), range(6))
    assert type(got) is torch.Tensor
    assert {torch.equal(one, two.flip(-1)) for one, two in zip(got, image, strict=True)} == {True, False}


def test_a_module_of_kornia_s_that_takes_an_image_is_refused_beside_a_mask():
    augmentation = BatchAugmentation([augment.PerSample(OfKornia())], 5, mask=1)
    with pytest.raises(ValueError, match=r"got <.*OfKornia.*>, 1 image\(s\) and 1 mask\(s\)\. Use"):
        augmentation((images(2, SPACES[0]), masks(2, SPACES[0])), range(2))
