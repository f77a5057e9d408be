"""Which files a rank reads, in which order and in how many batches: plain arithmetic, without DALI."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

__all__ = ["LastBatch", "ShardOrder", "check_last_batch"]

LastBatch = Literal["fill", "drop", "partial"]


def check_last_batch(last_batch: str) -> LastBatch:
    """Return ``last_batch`` in lower case, or refuse it.

    Raises:
        ValueError: If it is none of ``"fill"``, ``"drop"`` and ``"partial"``.
    """
    for known in get_args(LastBatch):
        if isinstance(last_batch, str) and last_batch.lower() == known:
            return known
    raise ValueError(f"last_batch={last_batch!r}: accepted are 'fill', 'drop' and 'partial'.")


class ShardOrder:
    """The batches of one rank: every epoch a pure function of seed, epoch, rank and batch.

    The files are put in an order that is the same on every rank, and rank ``r`` of ``w`` takes the places ``r``,
    ``r + w``, ``r + 2 w``, ... of it. When shuffling, each epoch has an order of its own, so that the shards change
    too. Every rank has the same number of batches:

    * ``"partial"``: each file exactly once; the last batches of an epoch may be smaller. Only with a batch size of
      one, and a number of files that the ranks do not divide, some ranks repeat one file.
    * ``"fill"``: each file at least once; the last batch is filled up from the beginning of the order.
    * ``"drop"``: each file at most once; only full batches.

    Args:
        samples: Number of files, at least ``world_size``.
        batch_size: Files a batch and rank, at least 1.
        rank: This rank, from 0.
        world_size: Number of ranks.
        shuffle: Whether each epoch has a new order; otherwise the order is 0, 1, 2, ...
        last_batch: ``"partial"``, ``"fill"`` or ``"drop"``.
        seed: Seed of the orders, at least 0, the same on every rank.

    Raises:
        ValueError: If there are fewer files than ranks, or not one full batch a rank with ``"drop"``.

    Example:
        >>> order = ShardOrder(5, batch_size=2, rank=1, world_size=2, shuffle=False, last_batch="partial", seed=0)
        >>> [order.batch(0, k).tolist() for k in range(len(order))]
        [[1], [3]]
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        last_batch: LastBatch,
        seed: int,
    ) -> None:
        if samples < world_size:
            raise ValueError(
                f"{samples} files for {world_size} ranks: every rank needs at least one. "
                "Give more files or use fewer devices."
            )
        self.samples, self.batch_size, self.rank, self.world_size = samples, batch_size, rank, world_size
        self.shuffle, self.last_batch, self.seed = shuffle, last_batch, seed
        longest = -(-samples // world_size)
        self._batches = samples // world_size // batch_size if last_batch == "drop" else -(-longest // batch_size)
        if self._batches == 0:
            raise ValueError(
                f"last_batch='drop' leaves no batch: {samples} files over {world_size} ranks are "
                f"{samples // world_size} a rank, fewer than batch_size={batch_size}. "
                "Use a smaller batch_size or last_batch='partial'."
            )
        self._shuffled: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self._batches

    def batch(self, epoch: int, index: int) -> np.ndarray:
        """Return the numbers of the files in batch ``index`` of ``epoch``, int64 of shape (1 to batch_size,)."""
        if self.last_batch == "partial" and self.batch_size > 1:
            # Each later batch keeps one file at least, so that a rank one file short has as many batches.
            shard = (self.samples - self.rank - 1) // self.world_size + 1
            first, last = (
                min(k * self.batch_size, shard - (self._batches - k)) if k else 0 for k in (index, index + 1)
            )
        else:
            first, last = index * self.batch_size, (index + 1) * self.batch_size
        places = (np.arange(first, last, dtype=np.int64) * self.world_size + self.rank) % self.samples
        return self._order(epoch)[places] if self.shuffle else places

    def _order(self, epoch: int) -> np.ndarray:
        if self._shuffled is None or self._shuffled[0] != epoch:
            self._shuffled = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.samples))
        return self._shuffled[1]
