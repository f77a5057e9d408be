"""Carries the indices of the samples of a batch from the dataset to the transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from lightning_turbo._checks import check_functions, expect
from lightning_turbo.data.packed.structure import WholeBatch
from lightning_turbo.data.sample_seeds import loads_batches

__all__ = ["Indexed", "IndexedCollate", "IndexedDataset"]


class _Pair(NamedTuple):
    index: Any
    data: Any


class Indexed(_Pair):
    """A sample and its index, or a batch and the list of its indices.

    torch and Lightning preserve this tuple when they collate, pin and move a batch. The indices of a batch are
    integers, not a tensor, so they stay on the host and can be read without synchronization.
    """

    __slots__ = ()

    def __new__(cls, index: Any, data: Any) -> Indexed:
        """Create the pair; indices that were collated into a tensor become a list again."""
        return super().__new__(cls, index.tolist() if isinstance(index, Tensor) else index, data)


class IndexedDataset(Dataset[Indexed]):
    """A dataset that returns its samples with their indices, for ``BatchAugmentation``, which removes the indices.

    Args:
        dataset: A dataset with ``__getitem__`` and integer indices.

    Raises:
        TypeError: If ``dataset`` is an ``IterableDataset``, whose samples have no index.

    Note:
        A custom ``collate_fn`` receives samples with their indices: wrap it in ``IndexedCollate``. Call
        ``seed_samples`` on a loader of this dataset, not before.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(IndexedDataset([7.0, 8.0, 9.0]), batch_size=2)
        >>> [batch.index for batch in loader]
        [[0, 1], [2]]
    """

    def __init__(self, dataset: Any) -> None:
        valid = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
        expect(
            valid, "IndexedDataset: dataset", dataset, "one with __getitem__, whose samples have an index", TypeError
        )
        self.dataset: Any = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Indexed:
        return Indexed(int(index), self.dataset[index])

    # A property, because torch loads sample by sample if it is ``None``.
    @property
    def __getitems__(self) -> Callable[[Any], list[Indexed]] | None:
        """Loads a batch in one call, if the dataset can."""
        return self._load_batch if loads_batches(self.dataset) else None

    def _load_batch(self, indices: Any) -> list[Indexed]:
        samples = self.dataset.__getitems__(indices)
        indexed = (Indexed(int(index), sample) for index, sample in zip(indices, samples, strict=True))
        # The list that the dataset returned goes on to ``collate``, which may find the whole batch on it.
        return WholeBatch(indexed, samples)


class IndexedCollate:
    """A ``collate_fn`` for an ``IndexedDataset`` that calls another one on the samples without their indices.

    Args:
        collate_fn: Collates a list of samples into a batch.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any] = default_collate) -> None:
        check_functions(collate_fn=collate_fn)
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Indexed]) -> Indexed:
        """Return the batch with its indices."""
        data = WholeBatch.of(samples)
        data = [each.data for each in samples] if data is None else data
        return Indexed([each.index for each in samples], self.collate_fn(data))
