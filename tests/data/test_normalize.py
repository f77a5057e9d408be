"""Normalize: the naive formula on images alone, and a word where a batch holds none."""

import pickle
from collections import namedtuple

import pytest
import torch

from lightning_turbo.data import Normalize
from lightning_turbo.errors import NoEffectWarning

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("shape", "layout"), [((2, 3, 4, 5), torch.channels_last), ((2, 3, 3, 4, 5), torch.channels_last_3d)]
)
def test_normalize_equals_the_naive_formula(shape, layout):
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    image = torch.randint(0, 256, shape, dtype=torch.uint8)
    constants = (torch.tensor(v, dtype=torch.float64).view(1, 3, *[1] * (len(shape) - 2)) for v in (mean, std))
    got = Normalize(mean, std)(image)
    # Two float32 roundings of numbers below 4.
    expected = (image.double() / 255 - next(constants)) / next(constants)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    assert got.dtype == torch.float32
    half = Normalize(mean, std, dtype=torch.float16, memory_format=layout)(image)
    assert half.is_contiguous(memory_format=layout)
    assert torch.equal(half, got.half())
    for kind in (torch.uint8, torch.int16):  # constants for pixels as they are
        pixels = Normalize([m * 255 for m in mean], torch.tensor([std]) * 255, scale=1.0, keys=[0])([image.to(kind)])[0]
        torch.testing.assert_close(pixels, got, rtol=0, atol=5e-6)  # four float32 roundings


def test_normalize_touches_images_alone():
    image, mask, label = (torch.zeros(s, dtype=torch.uint8) for s in ((2, 1, 4, 4), (2, 4, 4), (2,)))
    batch = {"image": image, "mask": mask, "label": label, "name": ["a", "b"]}
    out = Normalize(0.0, 1.0)(batch)
    assert out["image"].dtype == torch.float32
    assert all(out[key] is batch[key] for key in ("mask", "label", "name"))
    assert batch["image"] is image
    pair = Normalize(0.0, 1.0)(Pair(image, label))
    assert isinstance(pair, Pair)
    assert pair.y is label
    chosen = Normalize(0.0, 1.0, keys=[1])([image, image])
    assert chosen[0] is image
    assert chosen[1].dtype == torch.float32


@pytest.mark.parametrize("batch", [
    torch.rand(2, 3, 4, 4), (torch.rand(2, 3, 4, 4), torch.zeros(2)), {"image": torch.zeros(2, 4, dtype=torch.uint8)},
])  # fmt: skip
def test_normalize_says_once_that_a_batch_holds_no_image(batch):
    normalize = Normalize([0.5] * 3, [0.5] * 3)
    with pytest.warns(NoEffectWarning, match=r"expected a uint8 tensor of \(batch, channel, ...\) in the batch, got"):
        normalize(batch)
    normalize(batch)


def test_normalize_takes_no_tensors_of_a_device_along():
    image = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    normalize = Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
    fresh = len(pickle.dumps(normalize))
    got = normalize(image)
    sent = pickle.dumps(normalize)
    assert len(sent) == fresh
    assert torch.equal(pickle.loads(sent)(image), got)
