"""The suite ``getitem``: batches of data in memory, made of samples or by one call of the dataset."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, StackDataset, default_collate

from benchmarks.loaders import forever
from benchmarks.suite import Aim, Case, CaseTimer, Suite
from lightning_turbo.data import PrefetchLoader

__all__ = ["SUITE", "Cells", "InOneCall", "Windows"]

LOADERS: dict[str, Callable[..., Any]] = {"DataLoader": DataLoader, "PrefetchLoader": PrefetchLoader}
ONE, CALL, LIST, STACK = "__getitem__", "__getitems__", "batch_size=None", "StackDataset"


class Windows(Dataset[Any]):
    """Windows of a long table of numbers: up to 36 known rows, and 6 to predict; as in pytorch-forecasting.

    Attributes:
        size: Samples of a batch.
    """

    known, ahead, size = 36, 6, 64

    def __init__(self, seed: int = 0, rows: int = 21_000) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.reals = torch.randn(rows, 20, generator=generator)
        self.classes = torch.randint(12, (rows, 10), generator=generator)
        self.target = torch.randn(rows, generator=generator)
        last = rows - self.known - self.ahead
        self.starts = torch.randint(last, (rows // 2,), generator=generator)
        self.lengths = torch.randint(self.known // 2, self.known + 1, (rows // 2,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, length = int(self.starts[index]), int(self.lengths[index])
        window = slice(start, start + length + self.ahead)
        reals, classes, target = self.reals[window], self.classes[window], self.target[window]
        return {"reals": reals.clone(), "classes": classes.clone(), "target": target[length:], "length": length}

    @staticmethod
    def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return the samples as a batch whose known rows are padded with zeros."""
        lengths = [sample["length"] for sample in samples]
        pairs = list(zip(samples, lengths, strict=True))
        batch = {"lengths": torch.tensor(lengths), "target": torch.stack([sample["target"] for sample in samples])}
        for name in ("reals", "classes"):
            batch[f"known {name}"] = pad_sequence([sample[name][:n] for sample, n in pairs], batch_first=True)
            batch[f"next {name}"] = torch.stack([sample[name][n:] for sample, n in pairs])
        return batch

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return what ``collate`` makes of the samples at ``indices``, without them."""
        starts, lengths = self.starts[indices][:, None], self.lengths[indices]
        steps = torch.arange(int(lengths.max()))
        known, following = starts + steps, starts + lengths[:, None] + torch.arange(self.ahead)
        is_padding = steps >= lengths[:, None]
        batch = {"lengths": lengths, "target": self.target[following]}
        for name, table in (("reals", self.reals), ("classes", self.classes)):
            batch[f"known {name}"] = table[known].masked_fill_(is_padding[..., None], 0)
            batch[f"next {name}"] = table[following]
        return batch


class Cells(Dataset[Any]):
    """Rows of a matrix of counts with two labels each, as in scvi-tools.

    Attributes:
        size: Samples of a batch.
    """

    size = 128

    def __init__(self, seed: int = 0, rows: int = 5_000) -> None:
        generator = np.random.default_rng(seed)
        counts = generator.poisson(1.0, (rows, 1_000)).astype(np.float32)
        labels = {name: generator.integers(5, size=(rows, 1)) for name in ("batch", "type")}
        self.arrays = {"counts": counts, **labels}

    def __len__(self) -> int:
        return len(self.arrays["counts"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: array[index] for name, array in self.arrays.items()}

    collate = staticmethod(default_collate)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return what ``collate`` makes of the samples at ``indices``, without them."""
        return {name: torch.from_numpy(array[indices]) for name, array in self.arrays.items()}


class InOneCall(Dataset[Any]):
    """Batches of another dataset, by ``__getitems__`` or by ``__getitem__`` with a list of indices."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return self.data.batch(indices)

    def __getitem__(self, indices: list[int]) -> dict[str, Tensor]:
        return self.data.batch(indices)


def as_it_is(batch: Any) -> Any:
    """Return a batch that its dataset has made."""
    return batch


def make_loader(data: Any, way: str, by: str) -> Any:
    """Return a loader whose batches are made in one of the four ways."""
    if way == LIST:
        order = BatchSampler(RandomSampler(data), data.size, drop_last=True)
        return LOADERS[by](InOneCall(data), batch_size=None, sampler=order)
    batches = {"batch_size": data.size, "shuffle": True, "drop_last": True}
    if way == STACK:
        return LOADERS[by](StackDataset(**data.arrays), **batches)
    if way == CALL:
        return LOADERS[by](InOneCall(data), collate_fn=as_it_is, **batches)
    return LOADERS[by](data, collate_fn=data.collate, **batches)


def load(timer: CaseTimer, *, kind: str, way: str, by: str) -> dict[str, float]:
    """Load batches in this process, and return the processor time of one, with that of a thread."""
    data = KINDS[kind](timer.seed)
    batches, count, started = forever(make_loader(data, way, by)), 0, time.process_time()
    for count, _ in enumerate(batches, start=1):  # noqa: B007
        if not timer.step(samples=data.size):
            break
    return {"processor_us": 1e6 * (time.process_time() - started) / count}


KINDS: dict[str, Callable[[int], Any]] = {"windows": Windows, "cells": Cells}


def _cases() -> Iterator[Case]:
    for kind in KINDS:
        for way in (ONE, CALL, LIST, *([STACK] if kind == "cells" else [])):
            for by in LOADERS:
                config = {"kind": kind, "way": way, "by": by}
                color = "torch" if by == "DataLoader" else "ours"
                base = f"{kind}: {ONE}, DataLoader"
                yield Case(name=f"{kind}: {way}, {by}", run=load, config=config, base=base, kind=color)


SUITE = Suite(
    name="getitem",
    about="A batch of data in memory, in one process: 64 windows of a long table with a collate_fn that pads them, or "
    "128 rows of a matrix; made of its samples (`__getitem__`), or by one call of the dataset (`__getitems__`; "
    "`batch_size=None` with a BatchSampler). Ratios are of processor time, threads included.",
    cases=list(_cases()),
    aims=[
        Aim(f"windows: {CALL}, DataLoader", f"windows: {ONE}, DataLoader", 0.3, "processor_us"),
        Aim(f"windows: {CALL}, PrefetchLoader", f"windows: {ONE}, PrefetchLoader", 0.4, "processor_us"),
        Aim(f"cells: {LIST}, DataLoader", f"cells: {ONE}, DataLoader", 0.3, "processor_us"),
        Aim(f"cells: {LIST}, PrefetchLoader", f"cells: {ONE}, PrefetchLoader", 0.4, "processor_us"),
    ],
    quick=(f"windows: {ONE}, DataLoader", f"windows: {CALL}, DataLoader"),
    rounds=13,
    lead=16,
    round_seconds=0.2,
    seconds=150,
    quantity="processor_us",
    unit="batch",
)
