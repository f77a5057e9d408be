"""``PerSample``: transforms of other packages, one sample after another, with the seeds of the samples."""

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
    """Call a transform of MONAI, torchvision (v2) or kornia on one sample after another, each with its own seeds.

    These packages draw from the global RNGs, or from generators that they hold: for each sample, both are seeded from
    ``(seed, epoch, index, position of the transform)``, and the global RNGs are put back afterwards. Where a package
    draws one number for a whole batch it still draws one a sample here. It is slower than a transform of this package.

    Args:
        transform: Of MONAI, one with keys, which gets ``{"image": ..., "mask": ...}``, with ``image1``, ``mask1``, ...
            for further ones, or where there are no masks one of arrays, which gets the image; of ``torchvision.
            transforms.v2``, which gets a ``tv_tensors.Image`` and a ``Mask`` in 2D; of kornia, an
            ``AugmentationSequential``, which gets images and masks, or where there are no masks another module.

    Raises:
        TypeError: If ``transform`` is of another package: where that draws from is not known, so it cannot be seeded.
        ValueError: At the first batch, if there are masks or several images and the transform takes one image alone.
    """

    def __init__(self, transform: Any) -> None:
        super().__init__(1.0)
        package = next((name for kind in type(transform).__mro__ if (name := _package(kind)) in PACKAGES), "")
        what = "a transform of MONAI, torchvision.transforms.v2 or kornia, which can be seeded by sample"
        expect(callable(transform) and package, "transform", transform, what, TypeError)
        self.transform = transform
        self.package = package

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Change images and masks."""
        seed, epoch, indices = draws.samples
        images, masks, done = len(parts.images), len(parts.masks), []
        if images + masks > 1 and not self._takes_several():
            raise ValueError(
                f"PerSample: expected a transform that changes several images, or masks with an image, alike, got "
                f"{self.transform!r}, {images} image(s) and {masks} mask(s). Take MONAI's with keys, torchvision's "
                "v2, or kornia's AugmentationSequential."
            )
        # It finds the generators that the transform holds, and seeds them by the sample, as it does the global RNGs.
        seeder = Seeder(self.transform, seed)
        device = parts.images[0].device
        with same_random_numbers(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for row, index in enumerate(indices):
                seeder(f"augment {draws.position}", epoch, index)
                # torchvision and kornia draw on the device of the image, where the seeder seeds nothing.
                if device.type == "cuda":
                    torch.cuda.manual_seed(torch.default_generator.initial_seed())
                # Copies, because a transform may change its argument, which may be the caller's batch.
                own = [[each[row].clone() for each in kind] for kind in (parts.images, parts.masks)]
                done.append(self._change(*own))
        columns = [torch.stack(column) for column in zip(*done, strict=True)]
        parts.images = columns[:images]
        parts.masks = columns[images : images + masks]

    def _takes_several(self) -> bool:
        """Whether the transform is one that changes several images, or masks with an image, by the same numbers."""
        if self.package == "torchvision":
            return True
        if self.package == "kornia":
            return type(self.transform).__name__ == "AugmentationSequential"
        return _has_keys(self.transform)

    def _change(self, images: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        """Return the images and then the masks of one sample, changed."""
        if self.package == "monai":
            return self._by_monai(images, masks)
        if self.package == "torchvision":
            tv_tensors = importlib.import_module("torchvision.tv_tensors")  # there, since its transform is
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
    """Whether a transform of MONAI, or the first one of a ``Compose``, takes a dictionary."""
    # All of a chain take the same, so that its first one tells.
    inside = getattr(transform, "transforms", None)
    return _has_keys(inside[0]) if inside else hasattr(transform, "keys")


def _plain(value: Any) -> Tensor:
    """Return a tensor without the data that MONAI adds to it."""
    return value.as_tensor() if hasattr(value, "as_tensor") else torch.as_tensor(value)
