"""The indices of the samples of a batch, on their way from the dataset to what draws from them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from lightning_turbo._checks import check_functions, expect
from lightning_turbo.data.sample_seeds import loads_batches

__all__ = ["Indexed", "IndexedCollate", "IndexedDataset"]


class _Pair(NamedTuple):
    index: Any
    data: Any


class Indexed(_Pair):
    """A sample and its index, or a batch and the list of its indices.

    torch and Lightning keep this tuple around what they collate, pin and move. The indices of a batch are integers, not
    a tensor, and so stay on the host: nothing has to wait for the device to read them.
    """

    __slots__ = ()

    def __new__(cls, index: Any, data: Any) -> Indexed:
        """Make the pair; indices that were collated to a tensor become a list again."""
        return super().__new__(cls, index.tolist() if isinstance(index, Tensor) else index, data)


class _Loaded(list[Indexed]):
    """Samples that a dataset loaded in one call, and the list that it returned, which its own collate may know."""

    samples: Any


class IndexedDataset(Dataset[Indexed]):
    """A dataset whose samples come with their index, for ``BatchAugmentation``, which takes it off again.

    Args:
        dataset: A dataset with ``__getitem__`` and integers as indices.

    Raises:
        TypeError: If ``dataset`` is an ``IterableDataset``, whose samples have no index.

    Note:
        A ``collate_fn`` of your own gets samples with their index: wrap it in ``IndexedCollate``. Call
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

    # A property: where it is ``None``, torch loads sample by sample, as it would without such a method.
    @property
    def __getitems__(self) -> Callable[[Any], list[Indexed]] | None:
        """What loads a batch in one call, where the dataset does."""
        return self._load_batch if loads_batches(self.dataset) else None

    def _load_batch(self, indices: Any) -> list[Indexed]:
        samples = self.dataset.__getitems__(indices)
        loaded = _Loaded(Indexed(int(index), sample) for index, sample in zip(indices, samples, strict=True))
        loaded.samples = samples
        return loaded


class IndexedCollate:
    """A ``collate_fn`` for an ``IndexedDataset``: calls another one on the samples without their indices.

    Args:
        collate_fn: Makes a batch of a list of samples.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any] = default_collate) -> None:
        check_functions(collate_fn=collate_fn)
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Indexed]) -> Indexed:
        """Return the batch with its indices."""
        # The very list that the dataset returned: ``PackedDataset.collate`` finds the whole batch on it.
        data = [each.data for each in samples]
        loaded: list[Any] = getattr(samples, "samples", [])
        if len(loaded) == len(data) and all(map(operator.is_, loaded, data)):
            data = loaded
        return Indexed([each.index for each in samples], self.collate_fn(data))
