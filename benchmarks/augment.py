"""The suite ``augment``: a batch of volumes with masks, augmented at once, beside MONAI sample by sample."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite import Aim, Case, Meter, Suite
from lightning_turbo import augment

__all__ = ["SUITE"]

BATCH, SIZE = 4, 64
DEGREES, SCALE, STD, GAMMA = 15.0, (0.8, 1.25), (0.0, 0.1), (0.7, 1.5)


def _batch(meter: Meter) -> tuple[Tensor, Tensor]:
    """Volumes and masks on the CPU; small ones if quick."""
    generator, size = torch.Generator().manual_seed(meter.seed), 32 if meter.quick else SIZE
    volumes = torch.rand(BATCH, 1, size, size, size, generator=generator)
    return volumes, (volumes * 4).floor()


def ours(meter: Meter) -> dict[str, float]:
    """A ``BatchAugmentation`` on the meter's device, to which each batch is copied."""
    steps = [
        augment.RandomAffine(DEGREES, SCALE),
        augment.RandomFlip(),
        augment.RandomGaussianNoise(STD, p=1.0),
        augment.RandomGamma(GAMMA, p=1.0),
    ]
    augmentation, (volumes, masks) = augment.BatchAugmentation(steps, meter.seed, mask=1), _batch(meter)
    number = 0
    while True:
        batch = volumes.to(meter.device), masks.to(meter.device)
        augmentation(batch, range(number, number + BATCH))
        number += BATCH
        if not meter.step(samples=BATCH):
            return {}


def monai(meter: Meter) -> dict[str, float]:
    """MONAI's transforms on the CPU, one sample after another; the batch is then copied to the meter's device."""
    from monai import transforms
    from monai.data import set_track_meta

    set_track_meta(False)  # as fast as it can be
    keys, angle = ("image", "mask"), math.radians(DEGREES)
    # MONAI's scale is where voxels are taken from: 1 over ours.
    steps = transforms.Compose([
        transforms.RandAffined(
            keys, prob=1.0, rotate_range=(angle,) * 3, scale_range=((1 / SCALE[1] - 1, 1 / SCALE[0] - 1),) * 3,
            mode=("bilinear", "nearest"), padding_mode="zeros",
        ),
        *(transforms.RandFlipd(keys, prob=0.5, spatial_axis=axis) for axis in range(3)),
        transforms.RandGaussianNoised("image", prob=1.0, std=STD[1]),
        transforms.RandAdjustContrastd("image", prob=1.0, gamma=GAMMA),
    ])  # fmt: skip
    steps.set_random_state(meter.seed)
    volumes, masks = _batch(meter)
    while True:
        done: list[Any] = [steps({"image": volume, "mask": mask}) for volume, mask in zip(volumes, masks, strict=True)]
        for key in keys:
            torch.stack([torch.as_tensor(each[key]) for each in done]).to(meter.device)
        if not meter.step(samples=BATCH):
            return {}


MONAI, OURS = "MONAI, sample by sample", "BatchAugmentation"
SUITE = Suite(
    name="augment",
    about=f"A batch of {BATCH} volumes of {SIZE} x {SIZE} x {SIZE} with masks: rotation and scale, flips along each "
    "axis, noise, and gamma. MONAI computes on the CPU, and copies the batch to the device.",
    cases=[
        Case(name=MONAI, run=monai, needs=("monai",), kind="peer"),
        Case(name=OURS, run=ours, kind="ours"),
    ],
    aims=[Aim(OURS, MONAI, at_most=0.5)],
    quick=(MONAI, OURS),
    steps=2,
    warmup=2,
    unit="batch",
)
