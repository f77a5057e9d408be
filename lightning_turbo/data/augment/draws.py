"""Random numbers of the samples of a batch: each is a function of (seed, epoch, index, transform, number)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_turbo.data.sample_seeds import seeds_of

__all__ = ["Draws", "draws_of"]

# The constants of SplitMix64, as the signed integers that torch has.
STEP = 0x9E3779B97F4A7C15 - 2**64
FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _mix(numbers: Tensor) -> Tensor:
    """Mix the bits of int64 numbers in place, by SplitMix64: products wrap, on a CPU and on CUDA alike."""
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        numbers.bitwise_xor_(_shifted(numbers, shift)).mul_(factor)
    return numbers.bitwise_xor_(_shifted(numbers, 31))


def _shifted(numbers: Tensor, count: int) -> Tensor:
    """Shift to the right with zeros, where torch's operator repeats the sign."""
    return (numbers >> count).bitwise_and_((1 << (64 - count)) - 1)


class Draws:
    """The random numbers that one transform draws for the samples of a batch, one vector after another.

    What is drawn are vectors on the CPU, some dozen numbers a batch: the host knows then which samples a transform
    changes, without waiting for the device. Only the noise of ``normal`` is made on the device.

    Args:
        keys: The keys of the samples, int64 of shape ``(n,)`` on the CPU.
        position: The position of the transform among those of the batch, from 0.
        samples: Seed and epoch of the run, and the indices of the samples, for transforms that are seeded from these.
    """

    def __init__(self, keys: Tensor, position: int, samples: tuple[int, int, list[int]]) -> None:
        self.position = position
        self.samples = samples
        # A key for each sample and position of a transform: however much one transform draws, the next one gets the
        # numbers that it would get without it.
        self._keys = _mix(keys + STEP * torch.tensor(position + 1))
        self._drawn = 0

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Draw numbers in ``[low, high)`` for each sample.

        Returns:
            float64 of shape ``(n, *shape)``, on the CPU.
        """
        count = math.prod(shape)
        numbers = torch.arange(self._drawn + 1, self._drawn + count + 1)
        self._drawn += count
        bits = _mix(self._keys[:, None] + STEP * numbers)
        unit = _shifted(bits, 11).double() * 2.0**-53
        return (low + (high - low) * unit).view(-1, *shape)

    def rows(self, p: float) -> Tensor:
        """Draw which samples are changed, each with probability ``p``; return their positions in the batch."""
        # One number of every sample, also of those that stay: what is drawn next belongs to the same place in each.
        return (self.uniform(0, 1) < p).nonzero()[:, 0]

    def beta(self, alpha: float) -> Tensor:
        """Draw from the symmetric beta distribution: float64 of shape ``(n,)``.

        By Bailey's polar form of Student's t, which takes two uniform numbers for any ``alpha`` (Devroye, 1986).
        """
        radius = ((1 - self.uniform(0, 1)) ** (-1 / alpha) - 1).sqrt()
        ratio = radius * (2 * math.pi * self.uniform(0, 1)).cos()
        # The radius is infinite where a small alpha takes a small number beyond float64.
        part = torch.where(ratio.abs() > 1e150, ratio.sign(), ratio / (1 + ratio**2).sqrt())
        return (1 + part) / 2

    def normal(self, rows: Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
        """Draw standard normal noise for some samples, on the device.

        The bits are the same on every device; logarithm and cosine differ in their last bits.

        Args:
            rows: Positions of the samples in the batch, on the CPU.
            shape: Of the noise of one sample.
            device: Where the noise is to be.

        Returns:
            float32 of shape ``(len(rows), *shape)``.
        """
        count = math.prod(shape)
        self._drawn += 1
        # A key of its own for each field, so that its numbers are none of those of the vectors.
        keys = _mix(_mix(self._keys[rows] + STEP * torch.tensor(self._drawn)) + 1).to(device)
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
        count: How many transforms there are.
    """
    # torch has no unsigned integers of 64 bits: the seed, from 0 to 2**64, moves into the signed range.
    base = seeds_of(seed, epoch, 0, kind="augment")[0] - 2**63
    keys = _mix(torch.tensor(list(indices), dtype=torch.int64) * STEP + base)
    return [Draws(keys, position, (seed, epoch, list(indices))) for position in range(count)]
