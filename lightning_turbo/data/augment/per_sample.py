"""``PerSample``: applies transforms of other packages to one sample at a time, with the seed of the sample."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from lightning_turbo._checks import expect
from lightning_turbo._random import same_random_numbers
from lightning_turbo.data.augment.draws import Draws
from lightning_turbo.data.augment.transform import Parts, Transform
from lightning_turbo.data.sample_seeds import Seeder

__all__ = ["PerSample"]

PACKAGES = ("kornia", "monai", "torchvision")


class PerSample(Transform):
    """Apply a transform of MONAI, torchvision (v2) or kornia to one sample at a time, each with its own seed.

    These packages draw from the global RNGs or from generators of their own. Both are seeded for each sample with
    ``(seed, epoch, index, position of the transform)``, and the global RNGs are restored afterwards. Where a package
    draws one number for a whole batch, it draws one per sample here. This is slower than a transform of this package.

    Args:
        transform: From MONAI, a dictionary transform, which gets ``{"image": ..., "mask": ...}``, with ``image1``,
            ``mask1``, ... for further ones, or without masks an array transform, which gets the image. From
            ``torchvision.transforms.v2``, a transform that gets a ``tv_tensors.Image`` and, in 2D, a ``Mask``. From
            kornia, an ``AugmentationSequential``, which gets images and masks, or without masks any module.

    Raises:
        TypeError: If ``transform`` is from another package, whose random numbers cannot be seeded.
        ValueError: At the first batch, if there are masks or several images and the transform only takes one image.
    """

    def __init__(self, transform: Any) -> None:
        super().__init__(1.0)
        package = next((name for kind in type(transform).__mro__ if (name := _package(kind)) in PACKAGES), "")
        what = "a transform of MONAI, torchvision.transforms.v2 or kornia, which can be seeded per sample"
        expect(callable(transform) and package, "transform", transform, what, TypeError)
        self.transform = transform
        self.package = package

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Transform images and masks."""
        seed, epoch, indices = draws.samples
        images = len(parts.images)
        masks = len(parts.masks)
        done = []
        if images + masks > 1 and not self._takes_several():
            raise ValueError(
                f"PerSample: expected a transform that changes several images, or masks with an image, alike, got "
                f"{self.transform!r}, {images} image(s) and {masks} mask(s). Use a MONAI dictionary transform, "
                "torchvision's v2, or kornia's AugmentationSequential."
            )
        # Finds the transform's own generators and seeds them, as well as the global RNGs, for each sample.
        seeder = Seeder(self.transform, seed)
        device = parts.images[0].device
        with same_random_numbers(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for row, index in enumerate(indices):
                seeder(f"augment {draws.position}", epoch, index)
                # torchvision and kornia draw on the device of the image, which the seeder does not cover.
                if device.type == "cuda":
                    torch.cuda.manual_seed(torch.default_generator.initial_seed())
                # Cloned, because a transform may modify its argument, which may be the caller's batch.
                own = [[each[row].clone() for each in kind] for kind in (parts.images, parts.masks)]
                done.append(self._change(*own))
        columns = [torch.stack(column) for column in zip(*done, strict=True)]
        parts.images = columns[:images]
        parts.masks = columns[images : images + masks]

    def _takes_several(self) -> bool:
        """Return whether the transform can apply the same numbers to several images, or to masks and an image."""
        if self.package == "torchvision":
            return True
        if self.package == "kornia":
            return type(self.transform).__name__ == "AugmentationSequential"
        return _has_keys(self.transform)

    def _change(self, images: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        """Return the images, then the masks of one sample, transformed."""
        if self.package == "monai":
            return self._by_monai(images, masks)
        if self.package == "torchvision":
            tv_tensors = importlib.import_module("torchvision.tv_tensors")  # installed, like its transform
            result: Any = self.transform(*map(tv_tensors.Image, images), *map(tv_tensors.Mask, masks))
            result = result if isinstance(result, (tuple, list)) else [result]
            return [each.as_subclass(Tensor) for each in result]
        whole = [each[None] for each in images] + [each[None].float() for each in masks]
        keys = ["input"] * len(images) + ["mask"] * len(masks)
        result: Any = self.transform(*whole, **({"data_keys": keys} if self._takes_several() else {}))
        result = [result] if isinstance(result, Tensor) else result
        return [each[0].to(old.dtype) for each, old in zip(result, images + masks, strict=True)]

    def _by_monai(self, images: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        if not _has_keys(self.transform):
            return [_plain(self.transform(images[0]))]
        names = [
            f"{kind}{number or ''}"
            for kind, each in (("image", images), ("mask", masks))
            for number in range(len(each))
        ]
        result: Any = self.transform(dict(zip(names, images + masks, strict=True)))
        return [_plain(result[name]).to(old.dtype) for name, old in zip(names, images + masks, strict=True)]


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _has_keys(transform: Any) -> bool:
    """Return whether a MONAI transform, or the first one of a ``Compose``, takes a dictionary."""
    # All transforms of a chain take the same type, so the first one decides.
    inside = getattr(transform, "transforms", None)
    return _has_keys(inside[0]) if inside else hasattr(transform, "keys")


def _plain(value: Any) -> Tensor:
    """Return a plain tensor without MONAI's metadata."""
    return value.as_tensor() if hasattr(value, "as_tensor") else torch.as_tensor(value)
