"""Augmentation of whole batches on the device, in 2D and 3D, with random numbers that are tied to the samples.

``BatchAugmentation`` applies transforms to a batch; ``IndexedDataset`` adds the indices of the samples to it.

Example:
    >>> from lightning_turbo import augment
    >>> steps = [augment.RandomAffine(degrees=20), augment.RandomFlip(), augment.RandomGamma()]
    >>> augmentation = augment.BatchAugmentation(steps, seed=0, image="image", mask="mask")
"""

from __future__ import annotations

from lightning_turbo.data.augment.batch import BatchAugmentation
from lightning_turbo.data.augment.indexed import Indexed, IndexedCollate, IndexedDataset
from lightning_turbo.data.augment.intensity import (
    NormalizeIntensity,
    RandomBrightness,
    RandomContrast,
    RandomGamma,
    RandomGaussianBlur,
    RandomGaussianNoise,
    RandomLowResolution,
)
from lightning_turbo.data.augment.mix import CutMix, MixUp
from lightning_turbo.data.augment.per_sample import PerSample
from lightning_turbo.data.augment.spatial import RandomAffine, RandomCrop, RandomElastic, RandomFlip

__all__ = [
    "BatchAugmentation",
    "CutMix",
    "Indexed",
    "IndexedCollate",
    "IndexedDataset",
    "MixUp",
    "NormalizeIntensity",
    "PerSample",
    "RandomAffine",
    "RandomBrightness",
    "RandomContrast",
    "RandomCrop",
    "RandomElastic",
    "RandomFlip",
    "RandomGamma",
    "RandomGaussianBlur",
    "RandomGaussianNoise",
    "RandomLowResolution",
]
