"""Random numbers that follow from (seed, epoch, index), whichever process loads the sample."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import numbers
import operator
import random
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from lightning_turbo._checks import expect
from lightning_turbo._random import GENERATORS, is_a, parts_in, same_random_numbers

__all__ = [
    "BatchKey",
    "SeededCollate",
    "SeededDataset",
    "Seeder",
    "check_seed",
    "check_seeds",
    "keyed",
    "loads_batches",
    "seed_sample",
    "seeds_of",
]

LARGEST = 2**32  # NumPy's generator and seed_everything take seeds below it


def seeds_of(seed: int, epoch: int, index: int, kind: str = "sample") -> tuple[int, int, int]:
    """Return the seeds of a sample, for generators of torch, Python and NumPy.

    They are the first 20 bytes of BLAKE2b over the arguments, so that neighbors have nothing in common: neither
    samples, epochs, nor the generators of torch and NumPy, which would draw the same numbers from one seed.

    Args:
        seed: The seed of the run, from 0 to ``2**32 - 1``.
        epoch: The epoch, from 0.
        index: The index of the sample in its dataset, or the number of a batch in its epoch.
        kind: What is seeded; each kind has seeds of its own.

    Returns:
        Two integers below ``2**64``, for ``torch.Generator.manual_seed`` and ``random.seed``, and one below ``2**32``
        for ``numpy.random.seed``.
    """
    digest = hashlib.blake2b(f"{kind} {seed} {epoch} {index}".encode(), digest_size=20).digest()
    for_torch, for_python, for_numpy = struct.unpack("<QQI", digest)
    return for_torch, for_python, for_numpy


class _Batch(threading.local):
    """The batch that a thread loads by ``__getitems__``: what seeds its samples, while it is loaded."""

    seeder: Callable[[int], None] | None = None


_batch = _Batch()


@contextlib.contextmanager
def _seeding_samples(seeder: Callable[[int], None]) -> Iterator[None]:
    # A dataset may iterate another seeded loader meanwhile.
    before = _batch.seeder
    _batch.seeder = seeder
    try:
        yield
    finally:
        _batch.seeder = before


def seed_sample(index: int) -> None:
    """Seed the generators for one sample of a batch, in a dataset's ``__getitems__``.

    Where sample seeds are on, the numbers drawn after it follow from the seed, the epoch and ``index``, as those of a
    dataset that loads sample by sample; elsewhere it does nothing.
    """
    if _batch.seeder is not None:
        _batch.seeder(index)


class BatchKey(list[Any]):
    """The indices of a batch on their way to the process that loads it, with the epoch and the number of the batch.

    ``keyed`` makes one for each batch. ``SeededDataset`` and ``SeededCollate`` read it.
    """

    def __init__(self, indices: Any = (), epoch: int = 0, number: int = 0) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.number = number


def keyed(entries: Iterator[Any], epoch: int, first: int, is_batched: bool) -> Iterator[BatchKey]:
    """Yield the key of each entry of a sampler.

    Args:
        entries: The entries.
        epoch: The number of the epoch.
        first: The number of the first batch, which is above 0 in the rest of an epoch.
        is_batched: Whether an entry is a list of indices. Otherwise it is an index, and makes a batch of one.

    Raises:
        TypeError: If an entry is something else.
    """
    for number, entry in enumerate(entries, first):
        try:
            key = BatchKey(entry if is_batched else [entry], epoch, number)
            for item in key:
                _first_index(item)
        except TypeError:
            what = "integers, because random numbers that belong to samples follow from their index"
            raise TypeError(f"The sampler yields {entry!r}; expected {what}.") from None
        yield key


class SeededDataset(Dataset[Any]):
    """Stands around a dataset, and seeds the generators before each sample is loaded; see ``seed_samples``.

    It takes the place of the dataset in torch's iterator, as long as that. Always: in the training process the global
    generators are as before once samples are loaded. All other attributes and methods are the dataset's own, to read
    and to set: a ``worker_init_fn`` reaches it as it would without seeds.

    Args:
        dataset: The dataset inside.
        seed: An integer from 0 to ``2**32 - 1``.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        # Other attributes that are set belong to the dataset, see __setattr__.
        vars(self).update(_seeded_dataset=dataset, _seeder=Seeder(dataset, seed))

    def __len__(self) -> int:
        return len(self._seeded_dataset)

    def __getitem__(self, key: BatchKey) -> tuple[BatchKey, Any]:
        """Load the one entry of ``key``: an index, or a list of them where the sampler yields lists."""
        (item,) = _check_key(key)
        with _put_back():
            self._seeder("sample", key.epoch, _first_index(item))
            return key, self._seeded_dataset[item]

    def __getitems__(self, key: BatchKey) -> tuple[BatchKey, Any]:
        """Load the samples of ``key``, one after another or, if the dataset can, in one call."""
        dataset = self._seeded_dataset
        samples = []
        with _put_back():
            if loads_batches(dataset):
                self._seeder("sample", _check_key(key).epoch, _first_index(key))
                with _seeding_samples(functools.partial(self._seeder, "sample", key.epoch)):
                    return key, dataset.__getitems__(list(key))
            for index in _check_key(key):
                self._seeder("sample", key.epoch, operator.index(index))
                samples.append(dataset[index])
        return key, samples

    def __getattr__(self, name: str) -> Any:
        # Not those that Python and pickle ask of this object itself, which may have no attributes yet.
        if name.startswith("__") or "_seeded_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._seeded_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._seeded_dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._seeded_dataset, name)


class SeededCollate:
    """Stands around a ``collate_fn``, and seeds the generators before each call; see ``seed_samples``.

    It takes the place of the ``collate_fn`` in torch's iterator. Always: its argument is from a ``SeededDataset``.

    Args:
        collate_fn: The function inside.
        seed: An integer from 0 to ``2**32 - 1``.
    """

    def __init__(self, collate_fn: Any, seed: int) -> None:
        self.collate_fn = collate_fn
        self._seeder = Seeder(collate_fn, seed)

    def __call__(self, loaded: tuple[BatchKey, Any]) -> Any:
        """Return the batch of the samples that ``SeededDataset`` loaded."""
        key, samples = loaded
        with _put_back():
            self._seeder("batch", key.epoch, key.number)
            return self.collate_fn(samples)


class Seeder:
    """Seeds the global generators of this process, and the generators and transforms that an object holds.

    ``SeededDataset`` and ``SeededCollate`` have one each, for what they stand around. Always: what the object holds is
    looked for once in each epoch, so that a transform that is exchanged counts from the next epoch on.

    Args:
        root: The object.
        seed: An integer from 0 to ``2**32 - 1``.
    """

    def __init__(self, root: Any, seed: int) -> None:
        self._root = root
        self._base = check_seed(seed)
        self._searched = -1  # the epoch in which it was searched last
        self._held: list[Any] = []

    def __call__(self, kind: str, epoch: int, index: int) -> None:
        """Seed all of them.

        Args:
            kind: ``"sample"`` or ``"batch"``.
            epoch: The epoch, from 0.
            index: The index of the sample, or the number of the batch.
        """
        if self._searched != epoch:
            parts = [self._root, *parts_in(self._root, _seeds_its_parts)]
            self._searched = epoch
            self._held = [each for each in parts if _is_seeded(each)]
        for_torch, for_python, for_numpy = seeds_of(self._base, epoch, index, kind)
        # torch.manual_seed would prepare the seeding of every device, which takes a hundred times as long.
        torch.default_generator.manual_seed(for_torch)
        random.seed(for_python)
        np.random.seed(for_numpy)
        for position, each in enumerate(self._held, 1):
            _seed(each, (for_numpy + position) % LARGEST)


def _is_seeded(part: Any) -> bool:
    kind = type(part)
    return is_a(part, GENERATORS) or hasattr(kind, "set_random_seed") or hasattr(kind, "set_random_state")


def _seeds_its_parts(part: Any) -> bool:
    """Whether seeding an object seeds what it holds: a transform does, as MONAI's ``Compose``, a dataset does not."""
    return _is_seeded(part) and not is_a(part, Dataset)


def _seed(part: Any, seed: int) -> None:
    """Seed a generator or an object that has generators."""
    if isinstance(part, torch.Generator):
        part.manual_seed(seed)
    elif isinstance(part, (random.Random, np.random.RandomState)):
        part.seed(seed)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = type(part.bit_generator)(seed).state
    # Of the two methods, Albumentations has both.
    elif hasattr(type(part), "set_random_seed"):
        part.set_random_seed(seed)
    else:
        _set_random_state(part, seed)


def _set_random_state(part: Any, seed: int) -> None:
    try:
        part.set_random_state(seed=seed)
    except TypeError as error:
        raise TypeError(
            f"sample seeds: expected {type(part).__name__} to have set_random_state(seed=) as in MONAI, or "
            f"set_random_seed(seed) as in Albumentations. Add one of them, or seed it in __getitem__. Got: {error}"
        ) from error


def check_seed(seed: Any, name: str = "seed") -> int:
    """Return ``seed`` as an int, or raise what ``seed_samples`` promises."""
    whole = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    expect(whole, name, seed, "an integer from 0 to 2**32 - 1", TypeError)
    expect(0 <= int(seed) < LARGEST, name, seed, "an integer from 0 to 2**32 - 1")
    return int(seed)


def check_seeds(dataset: Any) -> None:
    """Raise a ``TypeError`` if the samples of a dataset cannot have seeds."""
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"dataset: expected one with __getitem__, got the IterableDataset {type(dataset).__name__}, whose samples "
            "have no index. Draw inside the stream from a generator that you seed for each sample."
        )


def _check_key(key: Any) -> BatchKey:
    what = "a key of a seeded loader"
    expect(isinstance(key, BatchKey), "index", key, what, TypeError)
    return key


def _first_index(item: Any) -> int:
    """Return an index, or the first one of a list of indices; -1 for an empty list."""
    if not isinstance(item, (list, tuple)):
        return operator.index(item)
    return next(iter([operator.index(index) for index in item]), -1)


def loads_batches(dataset: Any) -> bool:
    """Whether ``dataset`` loads a batch in one call; a ``Subset`` does if what it is a part of does."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def _put_back() -> contextlib.AbstractContextManager[None]:
    """Put the generators back afterwards in the training process; in a worker process nothing else draws from them."""
    return contextlib.nullcontext() if get_worker_info() is not None else same_random_numbers()
