"""Datasets, and what the tests of loaders do again and again."""

import dataclasses
import io
import itertools
import os
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info


def itself(index):
    return index


class Rows(Dataset):
    """So many rows, each of which ``load`` makes of its index."""

    def __init__(self, length=20, load=itself):
        self.length, self.load = length, load

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.load(index)


class Pair(NamedTuple):
    image: Any
    boxes: Any


@dataclasses.dataclass
class Scan:
    volume: Any
    name: str = "x"


class Stream(IterableDataset):
    """The numbers below ``length``, interleaved over the worker processes."""

    def __init__(self, length=20):
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.length) if info is None else range(info.id, self.length, info.num_workers))


class Lazy(Sampler):
    """Draws one index at a time from a generator of its own; ``hook`` is called after each."""

    def __init__(self, length=20, hook=lambda: None):
        self.length, self.own, self.hook = length, seeded(3), hook

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            index = int(torch.randint(self.length, (), generator=self.own))
            self.hook()
            yield index


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def values(batches):
    return [batch.tolist() for batch in batches]


def take(iterator, count):
    """The next batches of an iterator, and no more of it."""
    return values(itertools.islice(iterator, count))


def saved(state):
    """A state that went through a file, as a checkpoint that loads with weights_only=True."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def holds_in_a_fork(check):
    """Whether ``check`` is true in a forked child."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = not check()
        finally:
            os._exit(int(status))
    return os.waitpid(child, 0)[1] == 0


class Custom(DataLoader):
    """A loader class with an argument of its own and an iterator of its own."""

    def __init__(self, path, scale=1, **kwargs):
        self.path, self.scale = path, scale
        super().__init__(range(6), **kwargs)

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * self.scale
