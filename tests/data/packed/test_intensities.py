"""Statistics of the foreground that are stored at packing, and the transform that takes them."""

import numpy as np
import pytest
import torch

from lightning_turbo import augment
from lightning_turbo.data import PackedDataset, PatchDataset, pack


def scans(channels=2, label_channel=False):
    for n in range(3):
        generator = np.random.default_rng(n)
        label = np.zeros((8, 9, 10), np.uint8)
        label[: n * 3, 2:5, 3:6] = 1 + n % 2  # the first scan has no foreground
        image = generator.normal(100 * n, 10, (channels, 8, 9, 10)).astype(np.float32)
        image[1:] *= 3
        yield {
            "image": image if channels > 1 else image[0],
            "label": label[None] if label_channel else label,
            "other": generator.integers(0, 9, (8, 9, 10), dtype=np.int16),
            "features": np.ones(10),
            "n": n,
        }


@pytest.mark.parametrize("label_channel", [False, True])
@pytest.mark.parametrize("channels", [1, 2])
def test_statistics_of_the_foreground(tmp_path, channels, label_channel):
    samples = list(scans(channels, label_channel))
    found = pack(samples, tmp_path / "out", foreground="label")["intensities"]
    assert list(found) == ["image", "other"]
    assert len(found["image"]) == channels
    # As nnU-Net: of each scan with foreground as many, drawn with replacement.
    masks = [sample["label"].reshape(8, 9, 10) > 0 for sample in samples]
    for channel, statistics in enumerate(found["image"]):
        values = [
            sample["image"].reshape(channels, 8, 9, 10)[channel][mask]
            for sample, mask in zip(samples, masks, strict=True)
        ]
        rows = [np.random.default_rng(1).choice(value, 10_000) for value in values if len(value)]
        pooled = np.concatenate(rows)
        expected = {
            "mean": pooled.mean(), "std": pooled.std(), "median": np.median(pooled), "min": pooled.min(),
            "max": pooled.max(), "percentile_00_5": np.percentile(pooled, 0.5),
            "percentile_99_5": np.percentile(pooled, 99.5),
        }  # fmt: skip
        assert set(statistics) == set(expected)
        spread = pooled.std()
        for name, value in expected.items():
            assert abs(statistics[name] - value) < 0.05 * spread, name
    for data in (PackedDataset(tmp_path / "out"), PatchDataset(tmp_path / "out", (4, 4, 4), keys=["image", "label"])):
        assert data.intensities == found


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_without_foreground_there_are_none(tmp_path, dtype):
    sample = {"image": np.zeros((4, 4, 4), dtype), "label": np.zeros((4, 4, 4), np.uint8)}
    assert pack([sample], tmp_path / "empty", foreground="label")["intensities"] == {}
    assert pack([sample], tmp_path / "none")["intensities"] == {}
    assert PackedDataset(tmp_path / "none").intensities == {}


def test_the_same_statistics_after_an_interruption(tmp_path):
    samples = list(scans())

    class Stopped(list):
        def __getitem__(self, index):
            if index == 2:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        pack(Stopped(samples), tmp_path / "out", foreground="label")
    expected = pack(samples, tmp_path / "whole", foreground="label")
    assert pack(samples, tmp_path / "out", foreground="label") == expected


@pytest.mark.parametrize("space", [(4, 5), (4, 5, 3)])
def test_images_are_normalized_by_statistics_of_the_dataset(space):
    statistics = [
        {"mean": 2.0, "std": 4.0, "percentile_00_5": -1.0, "percentile_99_5": 6.0, "max": 9.0},
        {"mean": -3.0, "std": 0.0, "percentile_00_5": -4.0, "percentile_99_5": -2.0},
    ]
    image = torch.randn(3, 2, *space) * 8
    step = augment.NormalizeIntensity(statistics)
    found = augment.BatchAugmentation([step], seed=1, image=0)([image.clone()], range(3))[0]
    first = (image[:, 0].clamp(-1, 6) - 2) / 4
    second = image[:, 1].clamp(-4, -2) + 3  # a constant channel is only shifted
    assert torch.allclose(found, torch.stack([first, second], 1))
    with pytest.raises(ValueError, match="NormalizeIntensity: channels: expected 2, like intensities, got 3"):
        augment.BatchAugmentation([step], seed=1, image=0)([torch.rand(1, 3, *space)], range(1))


@pytest.mark.parametrize(
    ("given", "error"), [({"mean": 1.0}, TypeError), ([], TypeError), ([1.0], TypeError), ([{"mean": 1.0}], KeyError)]
)
def test_what_is_no_statistics(given, error):
    with pytest.raises(error, match="NormalizeIntensity: intensities: expected"):
        augment.NormalizeIntensity(given)
