"""``SeededSampler``: an order that follows from (seed, epoch), whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._distributed import rank_and_size
from lightning_turbo.data.sample_seeds import check_seed

__all__ = ["SeededSampler"]


class SeededSampler(DistributedSampler[Any]):
    """A sampler whose order follows from (seed, epoch) alone, for any number of ranks.

    The order is one permutation of the dataset for each epoch, that of ``DistributedSampler``, dealt out in turn: of
    two ranks the first takes samples 0, 2, 4, ... of it. Without a process group there is one rank. The number of
    ranks is asked for at each pass, because a Trainer may begin the group after the sampler is made.

    Args:
        dataset: What is sampled from; only its length is used.
        seed: An integer from 0 to ``2**32 - 1``, the same on all ranks.
        shuffle: ``False`` for the order of the dataset.
        drop_last: Whether samples that do not make a full turn of the ranks are left out; otherwise the first ones
            are taken again to fill it.
        num_replicas: The number of ranks; ``None`` for that of the process group.
        rank: The number of this rank; ``None`` for that of the process group.

    Raises:
        TypeError: If ``seed`` is not an integer.
        ValueError: If ``seed`` or ``rank`` is out of range.

    Note:
        Call ``set_epoch`` before each epoch, as with ``DistributedSampler``; Lightning does.

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
        self.epoch = 0
        self._given = {"shuffle": shuffle, "drop_last": drop_last, "seed": check_seed(seed)}
        self._ranks = num_replicas, rank
        self._reshard(dataset)

    def _reshard(self, dataset: Any) -> None:
        """Count the ranks and share the dataset out among them."""
        epoch, (rank, size) = self.epoch, rank_and_size()
        replicas, own = self._ranks
        super().__init__(dataset, size if replicas is None else replicas, rank if own is None else own, **self._given)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self._reshard(self.dataset)
        return super().__iter__()

    def __len__(self) -> int:
        self._reshard(self.dataset)
        return super().__len__()
