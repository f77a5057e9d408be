"""Intensity transforms. They only change images."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_turbo._checks import expect, is_list
from lightning_turbo.data.augment import kernels
from lightning_turbo.data.augment.draws import Draws
from lightning_turbo.data.augment.kernels import on_rows
from lightning_turbo.data.augment.transform import (
    Parts,
    Transform,
    along_axes,
    check_range,
    per_sample,
)

__all__ = [
    "NormalizeIntensity", "RandomBrightness", "RandomContrast", "RandomGamma", "RandomGaussianBlur",
    "RandomGaussianNoise", "RandomLowResolution",
]  # fmt: skip

# Radius of the blur filter in standard deviations; beyond it lies less than a ten-thousandth of its weight.
REACH = 4.0


class _Intensity(Transform):
    """Base class: draws one number per sample from a range and changes the image by it.

    Args:
        p: Probability that a sample is changed.
        name: Name of the range, for messages.
        ends: The range.
        least: Smallest valid value in the range.
    """

    def __init__(self, p: float, name: str, ends: Sequence[float], least: float = 0.0) -> None:
        super().__init__(p)
        self.range = check_range(self, name, ends, least)

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Transform the images."""
        rows = draws.rows(self.p)
        values = draws.uniform(*self.range)[rows]
        parts.images = [on_rows(image, rows, lambda x: self.change(x, values)) for image in parts.images]

    @abstractmethod
    def change(self, image: Tensor, value: Tensor) -> Tensor:
        """Return images, each transformed by one number.

        Args:
            image: float32 of shape ``(n, channels, *space)``.
            value: One number per image, on the CPU.
        """


class RandomGamma(_Intensity):
    """Apply a power to intensities scaled to [0, 1]: ``((x - min) / range) ** gamma * range + min``.

    Minimum and range are those of each sample and channel.

    Args:
        gamma: Range of the exponent, 0 or more; above 1 darkens.
        p: Probability that a sample is changed, from 0 to 1.

    Raises:
        ValueError: If an argument is out of range.

    Source: ``GammaTransform`` of batchgeneratorsv2, MONAI's ``RandAdjustContrast``.
    """

    def __init__(self, gamma: Sequence[float] = (0.7, 1.5), *, p: float = 0.3) -> None:
        super().__init__(p, "gamma", gamma)

    def change(self, image: Tensor, value: Tensor) -> Tensor:
        """Return the images raised to the power ``value``."""
        low, high = _bounds(image)
        span = high - low
        # A constant channel has a range of 0 and a quotient of 0.
        return (image - low).div_(torch.where(span == 0, 1, span)).pow_(per_sample(value, image)).mul_(span).add_(low)


class RandomContrast(_Intensity):
    """Scale the distance of intensities to their mean; the result stays in the range of its sample and channel.

    Args:
        factor: Range of the factor, 0 or more.
        p: Probability that a sample is changed, from 0 to 1.

    Raises:
        ValueError: If an argument is out of range.

    Source: ``ContrastTransform`` of batchgeneratorsv2, MONAI's ``RandScaleIntensityFixedMean``.
    """

    def __init__(self, factor: Sequence[float] = (0.75, 1.25), *, p: float = 0.15) -> None:
        super().__init__(p, "factor", factor)

    def change(self, image: Tensor, value: Tensor) -> Tensor:
        """Return the images with their contrast multiplied by ``value``."""
        # Like MONAI's ``preserve_range``, no voxel becomes brighter than the brightest one or darker than the darkest.
        mean = image.mean(_space(image), keepdim=True)
        factor = per_sample(value, image)
        low, high = _bounds(image)
        changed = (image * factor).add_(mean * (1 - factor))
        # Not clamp_, which takes ten times as long with tensors as bounds.
        torch.maximum(changed, low, out=changed)
        return torch.minimum(changed, high, out=changed)


class RandomBrightness(_Intensity):
    """Multiply the intensities.

    Args:
        factor: Range of the factor, 0 or more.
        p: Probability that a sample is changed, from 0 to 1.

    Raises:
        ValueError: If an argument is out of range.

    Source: ``MultiplicativeBrightnessTransform`` of batchgeneratorsv2, MONAI's ``RandScaleIntensity``.
    """

    def __init__(self, factor: Sequence[float] = (0.75, 1.25), *, p: float = 0.15) -> None:
        super().__init__(p, "factor", factor)

    def change(self, image: Tensor, value: Tensor) -> Tensor:
        """Return the images multiplied by ``value``."""
        return image * per_sample(value, image)


class RandomGaussianNoise(Transform):
    """Add independent normal noise to every voxel.

    Args:
        std: Range of the standard deviation in units of the image, 0 or more.
        p: Probability that a sample is changed, from 0 to 1.

    Raises:
        ValueError: If an argument is out of range.

    Source: MONAI's ``RandGaussianNoise``; numbers from SplitMix64 with the Box-Muller transform.
    """

    def __init__(self, std: Sequence[float] = (0.0, 0.1), *, p: float = 0.1) -> None:
        super().__init__(p)
        self.range = check_range(self, "std", std, least=0.0)

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Transform the images."""
        rows = draws.rows(self.p)
        std = draws.uniform(*self.range)[rows]
        parts.images = [
            on_rows(
                image, rows, lambda x: draws.normal(rows, x.shape[1:], x.device).mul_(per_sample(std, x)).add_(x)
            )
            for image in parts.images
        ]  # fmt: skip


class RandomGaussianBlur(_Intensity):
    """Blur with a Gaussian that is integrated over each voxel. Weights outside the image are dropped.

    In 2D, for ``sigma`` up to 1.5, weights beyond four times the largest ``sigma`` are dropped too.

    Args:
        sigma: Range of the standard deviation in voxels, 0 or more.
        p: Probability that a sample is changed, from 0 to 1.

    Raises:
        ValueError: If an argument is out of range.

    Source: MONAI's ``RandGaussianSmooth``.
    """

    def __init__(self, sigma: Sequence[float] = (0.5, 1.0), *, p: float = 0.2) -> None:
        super().__init__(p, "sigma", sigma)

    def change(self, image: Tensor, value: Tensor) -> Tensor:
        """Return the images blurred with standard deviation ``value``."""
        # Avoids a division by 0; a deviation of a thousandth of a voxel blurs nothing.
        scale = value.view(-1, 1).float().clamp(min=1e-3) * 2**0.5
        reach = max(1, math.ceil(REACH * self.range[1]))
        filters = _gaussian(torch.arange(-reach, reach + 1), scale)
        done = kernels.blur(image, (filters / filters.sum(1, keepdim=True)).to(image.device, non_blocking=True))
        if done is not None:
            return done
        wide = scale[:, :, None].to(image.device, non_blocking=True)

        def weights(size: int) -> Tensor:
            at = torch.arange(size, device=image.device, dtype=image.dtype)
            whole = _gaussian(at[:, None] - at, wide)
            return whole / whole.sum(2, keepdim=True)

        return along_axes(image, weights)


def _gaussian(far: Tensor, scale: Tensor) -> Tensor:
    """Return a Gaussian integrated over voxels at these distances; ``scale`` is the square root of 2, times sigma."""
    return torch.erf((far + 0.5) / scale) - torch.erf((far - 0.5) / scale)


class RandomLowResolution(_Intensity):
    """Downsample by nearest neighbor and upsample linearly to the original size.

    Args:
        zoom: Range of the fraction of voxels kept along each axis, above 0 and up to 1.
        p: Probability that a sample is changed, from 0 to 1.

    Raises:
        ValueError: If an argument is out of range.

    Source: ``SimulateLowResolutionTransform`` of batchgeneratorsv2, MONAI's ``RandSimulateLowResolution``.
    """

    def __init__(self, zoom: Sequence[float] = (0.5, 1.0), *, p: float = 0.25) -> None:
        super().__init__(p, "zoom", zoom, least=1e-3)
        if self.range[1] > 1:
            raise ValueError(f"RandomLowResolution: zoom: expected fractions up to 1, got {zoom!r}.")

    def change(self, image: Tensor, value: Tensor) -> Tensor:
        """Return the images at a resolution of ``value`` times the original along each axis."""
        sizes = torch.tensor(image.shape[2:])
        kept = (value.view(-1, 1).float() * sizes).round().clamp(min=1).int()
        return kernels.low_resolution(image, kept.tolist())


class NormalizeIntensity(Transform):
    """Subtract the mean of each sample and channel and divide by the standard deviation, unless that is 0.

    With dataset statistics, these are the mean and standard deviation of the dataset, after clipping to its percentiles
    0.5 and 99.5.

    Args:
        intensities: A dictionary per channel with ``mean``, ``std``, ``percentile_00_5`` and ``percentile_99_5``, such
            as ``PatchDataset(...).intensities["volumes"]`` of a folder packed with label volumes. Default: the
            statistics of each sample.

    Raises:
        KeyError: If one of the four is missing.
        TypeError: If ``intensities`` is not a sequence of dictionaries of numbers.
        ValueError: At the first batch, if the number of channels differs.

    Source: MONAI's ``NormalizeIntensity(channel_wise=True)``; nnU-Net's ``CTNormalization`` with statistics. For
    constants, use ``Normalize``.
    """

    def __init__(self, intensities: Sequence[Mapping[str, float]] | None = None) -> None:
        super().__init__(1.0)
        valid = intensities is None or (is_list(intensities) and all(isinstance(each, Mapping) for each in intensities))
        what = "a dictionary of statistics per channel, such as PatchDataset(...).intensities['volumes'], or None"
        expect(
            valid and (intensities is None or intensities),
            "NormalizeIntensity: intensities",
            intensities,
            what,
            TypeError,
        )
        self.statistics = None if intensities is None else _columns(intensities)

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Transform the images."""
        parts.images = [self.change(image) for image in parts.images]

    def change(self, image: Tensor) -> Tensor:
        """Return the normalized images."""
        if self.statistics is not None:
            channels = self.statistics.shape[1]
            expect(
                image.shape[1] == channels,
                "NormalizeIntensity: channels",
                image.shape[1],
                f"{channels}, like intensities",
            )
            columns = self.statistics.to(image.device, non_blocking=True)
            mean, std, low, high = columns.view(4, 1, channels, *[1] * (image.dim() - 2))
            return image.clamp(low, high).sub_(mean).div_(std)
        # A constant channel becomes 0, not NaN, as in MONAI.
        std, mean = torch.std_mean(image, _space(image), correction=0, keepdim=True)
        return (image - mean) / torch.where(std == 0, 1, std)


def _columns(intensities: Sequence[Mapping[str, float]]) -> Tensor:
    """Return mean, standard deviation and the two percentiles as rows, with a column per channel."""
    names = ("mean", "std", "percentile_00_5", "percentile_99_5")
    for each in intensities:
        missing = [name for name in names if name not in each]
        expect(not missing, "NormalizeIntensity: intensities", sorted(each), f"the names {names}", KeyError)
    rows = torch.tensor([[float(each[name]) for each in intensities] for name in names])
    rows[1] = torch.where(rows[1] == 0, 1, rows[1])
    return rows


def _space(image: Tensor) -> list[int]:
    return list(range(2, image.dim()))


def _bounds(image: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum of each sample and channel."""
    axes = _space(image)
    return image.amin(axes, keepdim=True), image.amax(axes, keepdim=True)
