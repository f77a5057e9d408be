"""Random numbers that follow from (seed, epoch, index), whichever process loads the sample."""

from __future__ import annotations

import contextlib
import copy
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
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, Subset, get_worker_info

from lightning_turbo._checks import expect
from lightning_turbo._random import GENERATORS, is_a, parts_in, same_random_numbers

__all__ = [
    "CountedEpochs",
    "EpochBatchSampler",
    "EpochSampler",
    "SeededCollate",
    "SeededDataset",
    "seed_sample",
    "seed_samples",
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


def seed_samples(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return a loader like ``loader`` whose random numbers belong to the samples, whichever process loads them.

    Before a sample is loaded, the generators of torch (CPU), Python and NumPy in that process are seeded from ``seed``,
    the epoch and the index of the sample; before ``collate_fn`` is called, from ``seed``, the epoch and the number of
    the batch. So is what the dataset and its transforms hold: generators of the three, and objects with a method
    ``set_random_seed(seed)``, as the transforms of Albumentations 2, or ``set_random_state(seed=)``, as MONAI's.
    Augmentation is then the same for any ``num_workers`` and start method, and after a restart. In the training process
    the generators of the process are put back afterwards.

    The epoch is that of the sampler if it has ``set_epoch`` and ``epoch``, as ``DistributedSampler`` has; Lightning
    sets it. With other samplers each ``iter()`` is one epoch, counted from 0; to start at another, call
    ``loader.batch_sampler.set_epoch(epoch)``.

    Args:
        loader: A ``DataLoader`` of any class, over a dataset with ``__getitem__``. It is not changed; its dataset and
            samplers are shared.
        seed: An integer from 0 to ``2**32 - 1``.

    Returns:
        A loader of the same class. Its ``dataset`` is a wrapper that passes attributes and methods of the dataset of
        ``loader`` through, in worker processes too.

    Raises:
        TypeError: If ``loader`` is not a ``DataLoader`` or has an ``IterableDataset``, or ``seed`` is not an integer;
            while it is iterated, if the sampler yields something else than indices, or a ``set_random_state`` takes no
            ``seed``.
        ValueError: If ``seed`` is out of range.

    Note:
        A dataset with ``__getitems__`` loads a batch in one call: its numbers follow from the index of the first
        sample, and so from the batches too, unless it calls ``seed_sample(index)`` before it draws for a sample, as
        ``PatchDataset`` does. CUDA's generators are not seeded.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> class Noise(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         return torch.rand(1)
        >>> alone, batched = (seed_samples(DataLoader(Noise(), batch_size=size), seed=1) for size in (1, 4))
        >>> torch.equal(torch.cat(list(alone)), next(iter(batched)))
        True

    Source: The keys of Grain and of JAX's random numbers; ``set_rnd`` in ``monai.data.utils``.
    """
    expect(isinstance(loader, DataLoader), "loader", loader, "a torch.utils.data.DataLoader", TypeError)
    seeded = copy.copy(loader)
    vars(seeded)["_iterator"] = None
    add_seeds(seeded, seed)
    return seeded


def add_seeds(loader: DataLoader[Any], seed: int) -> None:
    """Do to ``loader`` itself what ``seed_samples`` does to a copy; one that is seeded gets the new seed."""
    dataset = loader.dataset
    collate_fn = loader.collate_fn
    name = index_sampler_name(loader)
    sampler: Any = getattr(loader, name)
    if isinstance(dataset, SeededDataset):
        # The samplers know their epoch already, inside of what a Trainer may have put around them.
        dataset = dataset._seeded_dataset
        collate_fn = getattr(collate_fn, "collate_fn", collate_fn)
    else:
        sampler = _with_epochs(sampler, batched=name == "batch_sampler")
    changes = {name: sampler, "dataset": SeededDataset(dataset, seed), "collate_fn": SeededCollate(collate_fn, seed)}
    # DataLoader lets none of these be set after __init__, so that they fit together; these do.
    vars(loader).update(changes)
    for saved in [saved for saved in vars(loader) if saved.startswith("__pl_saved_")]:
        # Lightning keeps the arguments of loaders made in its hooks and would make this one of them, without seeds.
        del vars(loader)[saved]


def _with_epochs(sampler: Any, batched: bool) -> Any:
    """Return a sampler like ``sampler`` whose batches know their epoch and number."""
    # A Trainer makes a batch sampler again, of the same class and arguments, with another sampler.
    if type(sampler) is BatchSampler:
        return EpochBatchSampler(sampler.sampler, sampler.batch_size, sampler.drop_last)
    if type(sampler).__name__ != "_IndexBatchSamplerWrapper":
        return EpochSampler(sampler, batched=batched)
    # Lightning's wrapper, which records the indices of the batches in prediction. Lightning finds it by its type, so it
    # has to stay the outermost object.
    around = copy.copy(sampler)
    around._batch_sampler = _with_epochs(sampler._batch_sampler, batched)
    return around


def index_sampler_name(loader: DataLoader[Any]) -> str:
    """Return which attribute of a loader yields what its dataset is asked for."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


class BatchKey(list[Any]):
    """The indices of a batch on their way to the process that loads it, with the epoch and the number of the batch.

    The sampler of a seeded loader makes one for each batch. ``SeededDataset`` and ``SeededCollate`` read it.
    """

    def __init__(self, indices: Any = (), epoch: int = 0, number: int = 0) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.number = number


class CountedEpochs:
    """The common part of the two samplers below: they count passes, and yield the key of each batch.

    ``add_seeds`` puts one around the sampler of a loader, and it stays there as long as the loader. The epoch of a pass
    is ``given`` if a Trainer tells it; otherwise that of the sampler inside if it has one; otherwise ``epoch``. Always:
    it is decided when the first batch of the pass is asked for, and ``epoch`` is the one after it from then on.

    Attributes:
        sampler: The sampler inside.
        epoch: The epoch of the next pass, counted by the passes that have begun.
        given: The epoch of the next pass as a Trainer tells it; ``None`` if there is no Trainer. It holds for one pass.
        first: The number of the first batch, which is above 0 in the rest of an epoch.
    """

    sampler: Any
    epoch = 0
    given: int | None = None
    first = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, and that of the sampler inside if it has one."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def begin_pass(self, epoch: int) -> None:
        """Set the epoch of the next pass alone. Somebody else sets that of the sampler inside."""
        self.epoch = epoch

    def _keyed(self, batches: Iterator[Any]) -> Iterator[BatchKey]:
        sampler_epoch = getattr(self.sampler, "epoch", None) if hasattr(self.sampler, "set_epoch") else None
        epoch = self.epoch if sampler_epoch is None else sampler_epoch
        if self.given is not None:
            epoch = self.given
            self.given = None
        self.epoch = epoch + 1
        for number, batch in enumerate(batches, self.first):
            try:
                key = BatchKey(batch, epoch, number)
                for item in key:
                    _first_index(item)
            except TypeError:
                what = "integers, because random numbers that belong to samples follow from their index"
                raise TypeError(f"{type(self.sampler).__name__} yields {batch!r}; expected {what}.") from None
            yield key


class EpochBatchSampler(CountedEpochs, BatchSampler):
    """A ``BatchSampler`` whose batches know their epoch and number; it takes the same arguments."""

    def __iter__(self) -> Iterator[BatchKey]:
        return self._keyed(super().__iter__())


class EpochSampler(CountedEpochs, Sampler[Any]):
    """Stands around any other sampler of a loader, so that its batches know their epoch and number.

    Args:
        sampler: The sampler inside.
        batched: Whether it yields batches. Otherwise each of its indices is a batch of one.
    """

    def __init__(self, sampler: Any, batched: bool) -> None:
        self.sampler = sampler
        self.batched = batched

    def __iter__(self) -> Iterator[BatchKey]:
        items = iter(self.sampler)
        return self._keyed(items if self.batched else ([item] for item in items))

    def __len__(self) -> int:
        return len(self.sampler)


class SeededDataset(Dataset[Any]):
    """Stands around a dataset, and seeds the generators before each sample is loaded; see ``seed_samples``.

    ``add_seeds`` puts it in the place of the dataset of a loader, and it stays there as long as the loader. Always: in
    the training process the global generators are as before once samples are loaded. All other attributes and methods
    are the dataset's own, to read and to set: a ``worker_init_fn`` and callbacks reach it as they would without seeds.

    Args:
        dataset: The dataset inside.
        seed: An integer from 0 to ``2**32 - 1``.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                f"dataset: expected one with __getitem__, got the IterableDataset {type(dataset).__name__}, whose "
                "samples have no index. Draw inside the stream from a generator that you seed for each sample."
            )
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

    ``add_seeds`` puts it in the place of the ``collate_fn`` of a loader. Always: its argument is from a
    ``SeededDataset``.

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


def _check_key(key: Any) -> BatchKey:
    what = "what the sampler of a seeded loader yields. Call seed_samples on the loader that is iterated"
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
