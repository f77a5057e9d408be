"""``SeededSampler``: an order that follows from (seed, epoch) on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._checks import check_switches
from lightning_turbo._distributed import data_rank_and_size
from lightning_turbo.data.sample_seeds import check_seed

__all__ = ["SeededSampler"]


class SeededSampler(DistributedSampler[Any]):
    """A sampler whose order follows from (seed, epoch) alone, on any number of ranks.

    The order of an epoch is one permutation of the dataset, that of ``DistributedSampler``, interleaved over the
    ranks: with two ranks, the first one takes samples 0, 2, 4, ... Without a process group there is one rank. Always:
    the order and the shard of this rank are those of the attributes, the dataset and the process group when iteration
    begins, because a Trainer may start the group after the sampler is created.

    Args:
        dataset: What is sampled from; only its length is used.
        seed: An integer from 0 to ``2**32 - 1``, the same on all ranks.
        shuffle: ``False`` for the order of the dataset.
        drop_last: Whether the last samples are dropped to make the order evenly divisible by the number of ranks;
            otherwise the first ones are repeated.
        num_replicas: The number of ranks; ``None`` for that of the process group, without tensor-parallel peers.
        rank: The number of this rank; ``None`` for that of the process group, the same for tensor-parallel peers.

    Raises:
        TypeError: If ``seed`` is not an integer, or ``shuffle`` or ``drop_last`` is not a bool.
        ValueError: If ``seed`` or ``rank`` is out of range.

    Note:
        Call ``set_epoch`` before each epoch, as with ``DistributedSampler``; Lightning does. Tensor-parallel peers are
        those of the latest ``ModelParallelStrategy`` in this process group.

    Example:
        >>> whole = list(SeededSampler(range(6), seed=3))
        >>> first, second = (list(SeededSampler(range(6), seed=3, num_replicas=2, rank=rank)) for rank in (0, 1))
        >>> [first, second] == [whole[0::2], whole[1::2]]
        True
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        check_switches(shuffle=shuffle, drop_last=drop_last)
        self.dataset = dataset
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = check_seed(seed)
        self.epoch = 0
        self._ranks = num_replicas, rank
        self._count_shares()

    def _count_shares(self) -> None:
        """Set how many ranks there are, and how many samples each has, to the numbers of now."""
        rank, size = data_rank_and_size()
        size_given, rank_given = self._ranks
        epoch = self.epoch
        super().__init__(
            self.dataset,
            size if size_given is None else size_given,
            rank if rank_given is None else rank_given,
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last,
        )
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self._count_shares()
        return super().__iter__()

    def __len__(self) -> int:
        self._count_shares()
        return super().__len__()
