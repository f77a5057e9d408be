"""Random numbers for the samples of a batch: each is a function of (seed, epoch, index, transform, number)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_turbo.data.sample_seeds import seeds_of

__all__ = ["Draws", "draws_of"]

# The constants of SplitMix64 as signed integers, which is what torch has.
STEP = 0x9E3779B97F4A7C15 - 2**64
FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


Numbers = TypeVar("Numbers", np.ndarray, Tensor)


def _mix(numbers: Numbers) -> Numbers:
    """Mix the bits of int64 numbers in place with SplitMix64; products wrap in NumPy, and in torch on any device."""
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        numbers ^= _shifted(numbers, shift)
        numbers *= factor
    numbers ^= _shifted(numbers, 31)
    return numbers


def _shifted(numbers: Numbers, count: int) -> Numbers:
    """Shift right and fill with zeros; the operators repeat the sign bit."""
    shifted = numbers >> count
    shifted &= (1 << (64 - count)) - 1
    return shifted


class Draws:
    """The random numbers that one transform draws for the samples of a batch.

    The draws are vectors on the CPU, a few dozen numbers per batch, so the host knows which samples a transform changes
    without waiting for the device. They are made by NumPy, whose calls cost less than torch's for so few numbers. Only
    the noise of ``normal`` is generated on the device.

    Args:
        keys: The keys of the samples, int64 of shape ``(n,)``.
        position: The position of the transform in the list, from 0.
        samples: Seed, epoch and indices of the samples, for transforms that are seeded with them.
    """

    def __init__(self, keys: np.ndarray, position: int, samples: tuple[int, int, list[int]]) -> None:
        self.position = position
        self.samples = samples
        # One key per sample and transform: however much one transform draws, the next one gets the same numbers.
        self._keys = _mix(keys + STEP * np.array([position + 1], dtype=np.int64))
        self._drawn = 0

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Draw numbers in ``[low, high)`` for each sample.

        Returns:
            float64 of shape ``(n, *shape)``, on the CPU.
        """
        count = math.prod(shape)
        numbers = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.int64)
        self._drawn += count
        bits = _mix(self._keys[:, None] + STEP * numbers)
        unit = _shifted(bits, 11) * 2.0**-53
        return torch.from_numpy(low + (high - low) * unit).view(-1, *shape)

    def rows(self, p: float) -> Tensor:
        """Draw which samples change, each with probability ``p``; return their positions in the batch."""
        # Drawn for every sample, changed or not, so that later draws have the same position for each sample.
        return (self.uniform(0, 1) < p).nonzero()[:, 0]

    def beta(self, alpha: float) -> Tensor:
        """Draw from a symmetric beta distribution: float64 of shape ``(n,)``.

        Uses Bailey's polar method for Student's t, which takes two uniform numbers for any ``alpha`` (Devroye, 1986).
        """
        radius = ((1 - self.uniform(0, 1)) ** (-1 / alpha) - 1).sqrt()
        ratio = radius * (2 * math.pi * self.uniform(0, 1)).cos()
        # With a small alpha, a small number makes the radius overflow to infinity.
        part = torch.where(ratio.abs() > 1e150, ratio.sign(), ratio / (1 + ratio**2).sqrt())
        return (1 + part) / 2

    def normal(self, rows: Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
        """Draw standard normal noise for some samples, on the device.

        The bits are the same on every device; logarithm and cosine may differ in their last bits.

        Args:
            rows: Positions of the samples in the batch, on the CPU.
            shape: Shape of the noise of one sample.
            device: Device of the result.

        Returns:
            float32 of shape ``(len(rows), *shape)``.
        """
        count = math.prod(shape)
        self._drawn += 1
        # Each field has its own key, so that it shares no numbers with the vectors.
        own = _mix(_mix(self._keys[rows.numpy()] + STEP * np.array([self._drawn], dtype=np.int64)) + 1)
        keys = torch.from_numpy(own).to(device)
        bits = _mix(keys[:, None] + STEP * torch.arange((count + 1) // 2, device=device))
        low, high = bits & 0xFFFFFF, (bits >> 40).bitwise_and_(0xFFFFFF)
        radius = high.float().add_(0.5).mul_(2.0**-24).log_().mul_(-2).sqrt_()
        angle = low.float().mul_(2 * math.pi * 2.0**-24)
        noise = torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)], 1)
        return noise[:, :count].reshape(-1, *shape)


def draws_of(seed: int, epoch: int, indices: Sequence[int], count: int) -> list[Draws]:
    """Return the random numbers of a batch for each of ``count`` transforms.

    Args:
        seed: The seed of the run, from 0 to ``2**32 - 1``.
        epoch: The epoch, from 0.
        indices: The index of each sample in its dataset.
        count: Number of transforms.
    """
    # In signed integers, which is what torch has: the seed, below 2**64, is shifted into their range.
    base = seeds_of(seed, epoch, 0, kind="augment")[0] - 2**63
    keys = _mix(np.array(list(indices), dtype=np.int64) * STEP + base)
    return [Draws(keys, position, (seed, epoch, list(indices))) for position in range(count)]
