"""``WeightedSampler``: samples are drawn by weight, in one order for all ranks."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from lightning_turbo._checks import check_count, check_switches, expect
from lightning_turbo.data.orders.seeded_sampler import SeededSampler

__all__ = ["WeightedSampler", "balanced_weights", "mixture_weights"]

# torch.multinomial draws from no more categories than this.
MOST_WEIGHTS = 2**24


class WeightedSampler(SeededSampler):
    """A sampler that draws samples by weight, in an order that follows from (seed, epoch) on any number of ranks.

    The order of an epoch is what ``torch.utils.data.WeightedRandomSampler`` draws with a generator that was seeded with
    ``seed + epoch``. It is interleaved over the ranks, as that of ``SeededSampler``: with two ranks, the first one has
    positions 0, 2, 4, ... Lightning keeps this sampler under every strategy, because it is a ``DistributedSampler``.
    Tensor-parallel peers have the same samples, as with ``SeededSampler``.

    Args:
        weights: One weight for each sample of the dataset, not negative and finite, not all zero; they need not sum up
            to 1. A sequence or a tensor of shape ``(samples,)``.
        num_samples: How many samples an epoch draws over all ranks; ``None`` for as many as there are weights.
        replacement: Whether a sample may be drawn more than once in an epoch.
        seed: An integer from 0 to ``2**32 - 1``, the same on all ranks.
        drop_last: Whether the last positions are dropped to make the order evenly divisible by the number of ranks;
            otherwise the first ones are repeated.
        num_replicas: The number of ranks; ``None`` for that of the process group, asked for at each pass.
        rank: The number of this rank; ``None`` for that of the process group.

    Raises:
        TypeError: If ``weights`` are no numbers, ``num_samples`` or ``seed`` is not an integer, or ``replacement`` or
            ``drop_last`` is not a bool.
        ValueError: If a weight is negative or not finite, all are zero, or there are more than ``2**24``; if without
            replacement more samples are asked for than have a weight above zero; if another argument is out of range.

    Note:
        Call ``set_epoch`` before each epoch, as with ``DistributedSampler``; Lightning does.

    Example:
        >>> sampler = WeightedSampler([0.0, 1.0, 1.0], num_samples=4, seed=0)
        >>> 0 in list(sampler), len(sampler)
        (False, 4)

    Source: ``torch.utils.data.WeightedRandomSampler``, which knows nothing of ranks (pytorch/pytorch#77154).
    """

    def __init__(
        self,
        weights: Sequence[float] | Tensor,
        num_samples: int | None = None,
        *,
        replacement: bool = True,
        seed: int,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        check_switches(replacement=replacement, drop_last=drop_last)
        self.weights = _check_weights(weights)
        self.replacement = replacement
        self.draws = len(self.weights) if num_samples is None else check_count("num_samples", num_samples)
        drawable = int((self.weights > 0).sum())
        expect(
            replacement or self.draws <= drawable,
            "num_samples",
            self.draws,
            f"at most {drawable} without replacement, the number of weights above zero",
        )
        super().__init__(
            range(self.draws), seed, shuffle=False, drop_last=drop_last, num_replicas=num_replicas, rank=rank
        )

    def draw(self, epoch: int) -> list[int]:
        """Return the order of an epoch over all ranks: ``num_samples`` indices of the dataset."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.multinomial(self.weights, self.draws, self.replacement, generator=generator).tolist()

    @functools.cached_property
    def digest(self) -> str:
        """A hash of all that the order follows from beside seed and epoch."""
        settings = f"{self.draws} {self.replacement}".encode()
        return hashlib.blake2b(self.weights.numpy().tobytes() + settings, digest_size=8).hexdigest()

    def check_fits(self, dataset: Any) -> None:
        """Raise a ``ValueError`` if there is not one weight for each sample of a dataset."""
        expected = f"{len(dataset)}, the number of samples of {type(dataset).__name__}"
        expect(len(self.weights) == len(dataset), "number of weights", len(self.weights), expected)

    def __iter__(self) -> Iterator[int]:
        positions = super().__iter__()
        order = self.draw(self.epoch)
        return (order[position] for position in positions)


def _check_weights(weights: Any) -> Tensor:
    """Return the weights as a tensor of doubles, or raise an error that ``WeightedSampler`` documents."""
    expected = "one number for each sample of the dataset, in a sequence or a tensor of one axis"
    try:
        found = torch.as_tensor(weights, dtype=torch.double).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"weights: expected {expected}, got {type(weights).__name__}.") from None
    expect(found.dim() == 1, "weights", f"shape {tuple(found.shape)}", expected)
    expect(0 < len(found) <= MOST_WEIGHTS, "weights", f"{len(found)} of them", f"1 to {MOST_WEIGHTS}")
    wrong = ~torch.isfinite(found) | (found < 0)
    if wrong.any():
        index = int(wrong.nonzero()[0])
        raise ValueError(f"weights[{index}]: expected a finite number of 0 or more, got {found[index].item()}.")
    expect(bool(found.any()), "weights", "zeros only", "a weight above zero")
    return found


def balanced_weights(labels: Sequence[Any] | Tensor) -> Tensor:
    """Return weights for ``WeightedSampler`` with which each class is drawn equally often.

    Args:
        labels: The class of each sample: integers, strings or a tensor of shape ``(samples,)``.

    Returns:
        A tensor of doubles of shape ``(samples,)``: 1 divided by the number of samples of the class.

    Raises:
        TypeError: If ``labels`` are neither a sequence nor a tensor with an axis.
        ValueError: If there are no labels, or a tensor of them has more than one axis.

    Example:
        >>> balanced_weights(["cat", "cat", "dog"]).tolist()
        [0.5, 0.5, 1.0]
    """
    if hasattr(labels, "tolist"):
        labels = labels.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    expect(isinstance(labels, Sequence), "labels", labels, "a sequence or a tensor of shape (samples,)", TypeError)
    expect(len(labels) > 0, "labels", labels, "the class of each sample")
    expect(not isinstance(labels[0], list), "labels", "more than one axis", "one class for each sample")
    counts: dict[Any, int] = {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    return torch.tensor([1 / counts[label] for label in labels], dtype=torch.double)


def mixture_weights(dataset: ConcatDataset[Any], shares: Sequence[float]) -> Tensor:
    """Return weights for ``WeightedSampler`` with which the parts of a ``ConcatDataset`` are drawn by shares.

    Args:
        dataset: The parts, one after another.
        shares: How often each part is drawn, relative to the others; ``[3, 1]`` draws the first in three of four cases,
            however many samples it has.

    Returns:
        A tensor of doubles of shape ``(samples,)``: the share of a sample's part divided by the part's length.

    Raises:
        TypeError: If ``dataset`` is not a ``ConcatDataset``.
        ValueError: If there is not one share of 0 or more for each part.

    Example:
        >>> mixture_weights(ConcatDataset([range(1), range(4)]), [1, 2]).tolist()
        [1.0, 0.5, 0.5, 0.5, 0.5]
    """
    expect(isinstance(dataset, ConcatDataset), "dataset", dataset, "a torch.utils.data.ConcatDataset", TypeError)
    given = _check_weights(shares)
    parts = torch.tensor([len(part) for part in dataset.datasets])  # pyright: ignore[reportArgumentType]
    expect(len(given) == len(parts), "shares", list(shares), f"{len(parts)} numbers, one for each part")
    return torch.repeat_interleave(given / parts, parts)
