"""``LengthBatchSampler``: batches of samples of similar length, the same number of batches on every rank."""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from lightning_turbo._checks import check_count, check_switches, expect
from lightning_turbo._distributed import data_rank_and_size
from lightning_turbo.data.orders.seeded_sampler import SeededSampler
from lightning_turbo.data.sample_seeds import check_seed

__all__ = ["LengthBatchSampler"]


class LengthBatchSampler(BatchSampler):
    """A batch sampler whose batches hold samples of similar length, for any number of ranks.

    All samples of an epoch are sorted by length, those of equal length at random, and cut into batches. The batches of
    one step follow one another in the sorted order, so that all ranks have similar costs, and the steps are shuffled.
    If the number of batches is not a multiple of the number of ranks, the most expensive ones are halved. Always: every
    rank gets the same number of batches, each sample is in one batch (if there are at least as many samples as ranks),
    and the order follows from (seed, epoch) and the number of ranks, which is asked for at each pass.

    Args:
        lengths: The length of each sample of the dataset, integers above 0: tokens, frames or voxels. A sequence or a
            tensor of shape ``(samples,)``.
        batch_size: The most samples of a batch; ``None`` for no limit.
        max_cost: The most elements of a batch after padding: its longest padded length times its number of samples;
            ``None`` for no limit. At least one of the two limits is given.
        pad_to_multiple_of: To what multiple the longest length of a batch is padded, as by a tokenizer's ``pad``.
            Lengths that are padded to the same one count as equal, and fewer shapes occur.
        shuffle: ``False`` for the batches from the longest to the shortest, the same in each epoch.
        seed: An integer from 0 to ``2**32 - 1``, the same on all ranks.
        num_replicas: The number of ranks; ``None`` for that of the process group, without tensor-parallel peers.
        rank: The number of this rank; ``None`` for that of the process group, the same for tensor-parallel peers.
        sampler: Ignored. Lightning passes a sampler of its own when it makes a batch sampler again.
        drop_last: Ignored, for the same reason; no sample is left out.

    Attributes:
        sampler: The order of the samples before they are sorted; Lightning sets its epoch.

    Raises:
        TypeError: If ``lengths`` are not integers, or another argument is of the wrong kind.
        ValueError: If a length is below 1, a single sample is above ``max_cost``, no limit is given, or there are more
            ranks than samples.

    Note:
        Call ``set_epoch`` before each epoch; Lightning does. The same samples meet in each epoch where few have equal
        lengths; ``pad_to_multiple_of`` lets more of them count as equal.

    Example:
        >>> sampler = LengthBatchSampler([5, 1, 4, 2], batch_size=2, shuffle=False, seed=0)
        >>> list(sampler)
        [[0, 2], [3, 1]]
        >>> round(sampler.padding, 2)  # of 14 elements 2 are padding
        0.14
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        *,
        batch_size: int | None = None,
        max_cost: int | None = None,
        pad_to_multiple_of: int = 1,
        shuffle: bool = True,
        seed: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        sampler: Any = None,
        drop_last: bool = False,
    ) -> None:
        check_switches(shuffle=shuffle)
        self.lengths = _check_lengths(lengths)
        self.batch_size = None if batch_size is None else check_count("batch_size", batch_size)
        self.max_cost = None if max_cost is None else check_count("max_cost", max_cost)
        expect(batch_size is not None or max_cost is not None, "batch_size, max_cost", None, "at least one of them")
        multiple = check_count("pad_to_multiple_of", pad_to_multiple_of)
        self.padded = (self.lengths + multiple - 1) // multiple * multiple
        self.shuffle = shuffle
        self.drop_last = False
        # It gives the order of all samples, as if there were one rank: ranks share the batches, not the samples.
        self.sampler = SeededSampler(
            range(len(self.lengths)), check_seed(seed), shuffle=shuffle, num_replicas=1, rank=0
        )
        self._ranks = num_replicas, rank
        # The sorted lengths are the same in every epoch, as only samples of equal length change places, and so are the
        # places where they are cut.
        self._cuts = self._cut()
        self._tell_lightning(
            lengths=lengths, batch_size=batch_size, max_cost=max_cost, pad_to_multiple_of=pad_to_multiple_of,
            shuffle=shuffle, seed=seed, num_replicas=num_replicas, rank=rank,
        )  # fmt: skip

    def _tell_lightning(self, **arguments: Any) -> None:
        """Keep the arguments where Lightning keeps those of batch samplers that are made in its hooks.

        On several ranks Lightning makes each batch sampler again, with a sampler that shares the samples among the
        ranks, and refuses one whose arguments it does not know. This one ignores that sampler, so that the one that is
        made is equal to it.
        """
        for name, value in {
            "args": (),
            "kwargs": arguments,
            "default_kwargs": {"sampler": None, "drop_last": False},
            "arg_names": (),
        }.items():
            setattr(self, f"__pl_saved_{name}", value)

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, from 0."""
        self.sampler.set_epoch(epoch)

    def ranks(self) -> tuple[int, int]:
        """Return the number of this rank and how many there are, as they are now."""
        rank, size = data_rank_and_size()
        size_given, rank_given = self._ranks
        size = size if size_given is None else check_count("num_replicas", size_given)
        rank = rank if rank_given is None else check_count("rank", rank_given, least=0)
        expect(rank < size, "rank", rank, f"a number below that of the ranks, {size}")
        return rank, size

    def __len__(self) -> int:
        _, ranks = self.ranks()
        return -(-(len(self._cuts) - 1) // ranks)

    def __iter__(self) -> Iterator[list[int]]:
        rank, ranks = self.ranks()
        return iter(self.draw(self.epoch, ranks)[rank::ranks])

    def draw(self, epoch: int, ranks: int) -> list[list[int]]:
        """Return the batches of an epoch over all ranks, those of one step side by side.

        Args:
            epoch: The number of the epoch, from 0.
            ranks: The number of ranks; rank ``r`` takes the batches ``r``, ``r + ranks``, ...

        Raises:
            ValueError: If there are fewer samples than ranks.
        """
        if len(self.lengths) < ranks:
            raise ValueError(
                f"{len(self.lengths)} samples cannot make a batch for each of {ranks} ranks. Take fewer ranks, or more "
                "samples."
            )
        self.sampler.set_epoch(epoch)
        batches = self.fill(self._sorted_batches(), ranks)
        if not self.shuffle:
            return batches
        generator = torch.Generator().manual_seed(self.sampler.seed + epoch)
        steps = torch.arange(len(batches)).view(-1, ranks)
        steps = steps[torch.randperm(len(steps), generator=generator)]
        # Within a step too, so that no rank always has the longest samples.
        within = torch.argsort(torch.rand(steps.shape, generator=generator), dim=1)
        return [batches[number] for number in steps.gather(1, within).flatten().tolist()]

    def fill(self, batches: list[list[int]], ranks: int) -> list[list[int]]:
        """Return batches that ranks can share evenly: the most expensive ones are halved until they can.

        Once every batch has one sample, the first batches are taken again, as ``DistributedSampler`` does.

        Args:
            batches: The batches.
            ranks: The number of ranks.
        """
        missing = -len(batches) % ranks
        if not missing:
            return batches
        # Halves stay where their batch was, so that like costs stay side by side.
        parts = [[batch] for batch in batches]
        heap = [self._entry(batch, number, 0) for number, batch in enumerate(batches) if len(batch) > 1]
        heapq.heapify(heap)
        while missing and heap:
            _, number, place = heapq.heappop(heap)
            for half in _halve(parts[number], place):
                if len(parts[number][half]) > 1:
                    heapq.heappush(heap, self._entry(parts[number][half], number, half))
            missing -= 1
        filled = list(itertools.chain.from_iterable(parts))
        # Over and over, as there may be fewer batches than ranks.
        return filled + (filled * missing)[:missing]

    def _entry(self, batch: list[int], number: int, place: int) -> tuple[int, int, int]:
        """Return an entry of the heap, the most expensive batch first: part ``place`` of batch ``number``."""
        return -self._cost(batch), number, place

    @functools.cached_property
    def digest(self) -> str:
        """A hash of all that the order follows from beside seed, epoch and ranks."""
        limits = f"{self.batch_size} {self.max_cost}".encode()
        return hashlib.blake2b(self.padded.numpy().tobytes() + limits, digest_size=8).hexdigest()

    def check_fits(self, dataset: Any) -> None:
        """Raise a ``ValueError`` if there is not one length for each sample of a dataset."""
        expected = f"{len(dataset)}, the number of samples of {type(dataset).__name__}"
        expect(len(self.lengths) == len(dataset), "number of lengths", len(self.lengths), expected)

    def _cost(self, batch: list[int]) -> int:
        return int(self.padded[batch].max()) * len(batch)

    @property
    def padding(self) -> float:
        """The share of elements of all batches that are padding, from 0 up to, not including, 1."""
        cost = sum(self._cost(batch) for batch in self.fill(self._sorted_batches(), self.ranks()[1]))
        return 1 - int(self.lengths.sum()) / cost

    def _sorted_batches(self) -> list[list[int]]:
        """Return the batches of the sampler's epoch from the longest samples to the shortest."""
        order = torch.tensor(list(self.sampler))
        order = order[torch.argsort(self.padded[order], descending=True, stable=True)].tolist()
        return [order[start:stop] for start, stop in zip(self._cuts, self._cuts[1:], strict=False)]

    def _cut(self) -> list[int]:
        """Return where the sorted samples are cut, both ends included."""
        longest_first = torch.sort(self.padded, descending=True).values.tolist()
        if self.max_cost is not None and longest_first[0] > self.max_cost:
            index = int(self.padded.argmax())
            raise ValueError(
                f"lengths[{index}]: expected at most max_cost={self.max_cost} after padding, got {longest_first[0]}. "
                "Leave the sample out, cut it, or raise max_cost."
            )
        cuts = [0]
        while cuts[-1] < len(longest_first):
            start = cuts[-1]
            most = len(longest_first) if self.batch_size is None else self.batch_size
            if self.max_cost is not None:
                # The first sample of a batch is its longest one.
                most = min(most, self.max_cost // longest_first[start])
            cuts.append(min(start + most, len(longest_first)))
        return cuts


def _halve(parts: list[list[int]], place: int) -> tuple[int, int]:
    """Halve one of the parts of a batch, put the second half behind all parts, and return the places of both halves."""
    batch = parts[place]
    parts[place] = batch[: len(batch) // 2]
    parts.append(batch[len(batch) // 2 :])
    return place, len(parts) - 1


def _check_lengths(lengths: Any) -> Tensor:
    """Return the lengths as a tensor of integers, or raise an error that ``LengthBatchSampler`` documents."""
    expected = "an integer for each sample of the dataset, in a sequence or a tensor of one axis"
    try:
        found = torch.as_tensor(lengths).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"lengths: expected {expected}, got {type(lengths).__name__}.") from None
    expect(found.dim() == 1 and len(found) > 0, "lengths", f"shape {tuple(found.shape)}", expected)
    whole = not (found.is_floating_point() or found.is_complex() or found.dtype is torch.bool)
    expect(whole, "lengths", found.dtype, expected, TypeError)
    found = found.long()
    if (found < 1).any():
        index = int((found < 1).nonzero()[0])
        raise ValueError(f"lengths[{index}]: expected 1 or more, got {int(found[index])}.")
    return found
