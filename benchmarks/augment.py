"""The suites ``augment`` (volumes with masks, compared with MONAI) and ``transforms`` (single transforms)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite import Aim, Case, CaseTimer, Suite
from lightning_turbo import augment

__all__ = ["SUITE", "TRANSFORMS"]

BATCH, SIZE = 4, 64
DEGREES, SCALE, STD, GAMMA = 15.0, (0.8, 1.25), (0.0, 0.1), (0.7, 1.5)


def _batch(timer: CaseTimer) -> tuple[Tensor, Tensor]:
    """Return volumes and masks on the CPU, small ones if ``timer.quick``."""
    generator, size = torch.Generator().manual_seed(timer.seed), 32 if timer.quick else SIZE
    volumes = torch.rand(BATCH, 1, size, size, size, generator=generator)
    return volumes, (volumes * 4).floor()


def ours(timer: CaseTimer) -> dict[str, float]:
    """Copy each batch to the device and augment it there with ``BatchAugmentation``."""
    steps = [
        augment.RandomAffine(DEGREES, SCALE),
        augment.RandomFlip(),
        augment.RandomGaussianNoise(STD, p=1.0),
        augment.RandomGamma(GAMMA, p=1.0),
    ]
    augmentation, (volumes, masks) = augment.BatchAugmentation(steps, timer.seed, mask=1), _batch(timer)
    number = 0
    while True:
        batch = volumes.to(timer.device), masks.to(timer.device)
        augmentation(batch, range(number, number + BATCH))
        number += BATCH
        if not timer.step(samples=BATCH):
            return {}


def monai(timer: CaseTimer) -> dict[str, float]:
    """Transform sample by sample on the CPU with MONAI, and copy the batch to the device."""
    from monai import transforms
    from monai.data import set_track_meta

    set_track_meta(False)  # MONAI is faster without metadata
    keys, angle = ("image", "mask"), math.radians(DEGREES)
    volumes, masks = _batch(timer)
    # MONAI scales the sampling grid, we scale the image: its factor is the inverse of ours.
    steps = transforms.Compose([
        transforms.RandAffined(
            keys, prob=1.0, rotate_range=(angle,) * 3, scale_range=((1 / SCALE[1] - 1, 1 / SCALE[0] - 1),) * 3,
            mode=("bilinear", "nearest"), padding_mode="zeros", spatial_size=volumes.shape[2:], cache_grid=True,
        ),
        *(transforms.RandFlipd(keys, prob=0.5, spatial_axis=axis) for axis in range(3)),
        transforms.RandGaussianNoised("image", prob=1.0, std=STD[1]),
        transforms.RandAdjustContrastd("image", prob=1.0, gamma=GAMMA),
    ])  # fmt: skip
    steps.set_random_state(timer.seed)
    while True:
        done: list[Any] = [steps({"image": volume, "mask": mask}) for volume, mask in zip(volumes, masks, strict=True)]
        for key in keys:
            torch.stack([torch.as_tensor(each[key]) for each in done]).to(timer.device)
        if not timer.step(samples=BATCH):
            return {}


MONAI, OURS = "MONAI, sample by sample", "BatchAugmentation"
SUITE = Suite(
    name="augment",
    about=f"A batch of {BATCH} volumes of {SIZE} x {SIZE} x {SIZE} with masks: rotation and scale, flips along each "
    "axis, noise, and gamma. MONAI computes on the CPU and copies the batch to the device.",
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


IMAGES, VOLUMES = (16, 3, 224, 224), (4, 1, 64, 64, 64)
ANGLE, SIGMA, ZOOM, FACTOR = 30.0, 1.0, (0.5, 0.75), (0.75, 1.25)
Change = Callable[[Tensor], Any]


def _own(transform: Any) -> Change:
    augmentation = augment.BatchAugmentation([transform], 0)
    return lambda batch: augmentation((batch,), range(len(batch)))[0]


def _monai(name: str, **settings: Any) -> Change:
    from monai.data import set_track_meta

    set_track_meta(False)
    transform = getattr(importlib.import_module("monai.transforms"), name)(prob=1.0, **settings)
    return lambda batch: torch.stack([torch.as_tensor(transform(sample)) for sample in batch])


def _torchvision(name: str, *values: Any, **settings: Any) -> Change:
    """Transform sample by sample, because torchvision draws one random number per call, and stack the results."""
    transform = getattr(importlib.import_module("torchvision.transforms.v2"), name)(*values, **settings)
    return lambda batch: torch.stack([transform(sample) for sample in batch])


def _kornia(name: str, *values: Any, **settings: Any) -> Change:
    return getattr(importlib.import_module("kornia.augmentation"), name)(*values, p=1.0, **settings)


# The same transforms of each package, for images and volumes; the filters have equal widths.
OWN: dict[str, Callable[[int], Change]] = {
    "affine": lambda axes: _own(augment.RandomAffine(ANGLE, (0.8, 1.25))),
    "blur": lambda axes: _own(augment.RandomGaussianBlur((0.5, SIGMA), p=1.0)),
    "contrast": lambda axes: _own(augment.RandomContrast(FACTOR, p=1.0)),
    "gamma": lambda axes: _own(augment.RandomGamma(GAMMA, p=1.0)),
    "low resolution": lambda axes: _own(augment.RandomLowResolution(ZOOM, p=1.0)),
    "noise": lambda axes: _own(augment.RandomGaussianNoise(STD, p=1.0)),
    "flip": lambda axes: _own(augment.RandomFlip([-1])),
    "crop": lambda axes: _own(augment.RandomCrop((192, 192) if axes == 2 else (48, 48, 48))),
}
RADIANS = math.radians(ANGLE)
PEERS: dict[str, dict[str, Callable[[int], Change]]] = {
    "MONAI": {
        "affine": lambda axes: _monai(
            "RandAffine", rotate_range=(RADIANS,) * (1 if axes == 2 else 3), scale_range=((-0.2, 0.25),) * axes,
            padding_mode="zeros", spatial_size=(IMAGES if axes == 2 else VOLUMES)[2:], cache_grid=True,
        ),
        "blur": lambda axes: _monai("RandGaussianSmooth", **{f"sigma_{axis}": (0.5, SIGMA) for axis in "xyz"}),
        "contrast": lambda axes: _monai("RandScaleIntensityFixedMean", factors=0.25, preserve_range=True),
        "gamma": lambda axes: _monai("RandAdjustContrast", gamma=GAMMA),
        "low resolution": lambda axes: _monai(
            "RandSimulateLowResolution", zoom_range=ZOOM, upsample_mode="bilinear" if axes == 2 else "trilinear"
        ),
        "noise": lambda axes: _monai("RandGaussianNoise", std=STD[1]),
        "crop": lambda axes: _cropped_by_monai((192, 192) if axes == 2 else (48, 48, 48)),
    },
    "torchvision": {
        "affine": lambda axes: _torchvision("RandomAffine", ANGLE, scale=(0.8, 1.25), interpolation=_bilinear()),
        "blur": lambda axes: _torchvision("GaussianBlur", 9, (0.5, SIGMA)),
        "contrast": lambda axes: _torchvision("ColorJitter", contrast=FACTOR),
        "noise": lambda axes: _torchvision("GaussianNoise", sigma=STD[1], clip=False),
        "flip": lambda axes: _torchvision("RandomHorizontalFlip"),
        "crop": lambda axes: _torchvision("RandomCrop", 192),
    },
    "kornia": {
        "affine": lambda axes: _kornia("RandomAffine", ANGLE, scale=(0.8, 1.25)),
        "blur": lambda axes: _kornia("RandomGaussianBlur", (9, 9), (0.5, SIGMA)),
        "contrast": lambda axes: _kornia("RandomContrast", FACTOR),
        "gamma": lambda axes: _kornia("RandomGamma", GAMMA),
        "noise": lambda axes: _kornia("RandomGaussianNoise", std=STD[1]),
        "crop": lambda axes: _kornia("RandomCrop", (192, 192)),
    },
}  # fmt: skip


def _bilinear() -> Any:
    return importlib.import_module("torchvision.transforms").InterpolationMode.BILINEAR


def _cropped_by_monai(size: tuple[int, ...]) -> Change:
    from monai.data import set_track_meta
    from monai.transforms import RandSpatialCrop

    set_track_meta(False)
    transform = RandSpatialCrop(size, random_size=False)
    return lambda batch: torch.stack([torch.as_tensor(transform(sample)) for sample in batch])


def one_transform(timer: CaseTimer, *, name: str, by: str, axes: int) -> dict[str, float]:
    """Apply one transform to a batch of images or volumes on the device. The result is one stacked batch."""
    shape = IMAGES if axes == 2 else VOLUMES
    batch = torch.rand(shape, generator=torch.Generator().manual_seed(timer.seed)).to(timer.device)
    change = batch.__class__.clone if by == "clone" else (OWN[name] if by == "ours" else PEERS[by][name])(axes)
    while True:
        change(batch)
        if not timer.step(samples=len(batch)):
            return {}


def _transforms() -> Iterator[Case]:
    for axes in (2, 3):
        copy = f"{axes}D: a copy"
        yield Case(name=copy, run=one_transform, config={"name": "", "by": "clone", "axes": axes}, base=copy)
        for name in OWN:
            own = f"{axes}D, {name}: BatchAugmentation"
            peers = [by for by in PEERS if name in PEERS[by] and (axes == 2 or by == "MONAI")]
            base = f"{axes}D, {name}: {peers[0]}" if peers else copy
            for by in peers:
                yield Case(
                    name=f"{axes}D, {name}: {by}", run=one_transform, needs=(by.lower(),), kind="peer", base=base,
                    config={"name": name, "by": by, "axes": axes},
                )  # fmt: skip
            against = tuple(f"{axes}D, {name}: {by}" for by in peers[1:])
            yield Case(
                name=own, run=one_transform, config={"name": name, "by": "ours", "axes": axes}, base=base,
                against=(*against, copy), kind="ours",
            )  # fmt: skip


def _aims() -> Iterator[Aim]:
    for axes in (2, 3):
        for name in ("affine", "blur", "contrast", "gamma", "low resolution"):
            for by in PEERS:
                if name in PEERS[by] and (axes == 2 or by == "MONAI"):
                    yield Aim(f"{axes}D, {name}: BatchAugmentation", f"{axes}D, {name}: {by}", at_most=1.1)
        for name in ("flip", "crop"):
            yield Aim(f"{axes}D, {name}: BatchAugmentation", f"{axes}D: a copy", at_most=2.2)


TRANSFORMS = Suite(
    name="transforms",
    about="One transform of 16 images of 3 x 224 x 224 or 4 volumes of 64 x 64 x 64, stacked to a batch. Filters are 9 "
    "voxels wide. torchvision changes contrast around the mean of the gray image and clips to [0, 1].",
    cases=list(_transforms()),
    aims=list(_aims()),
    quick=("2D, contrast: MONAI", "2D, contrast: BatchAugmentation"),
    steps=3,
    rounds=7,
    warmup=2,
    lead=1,
    seconds=160,
    forked=True,
    unit="batch",
)
