"""The suites ``loading`` (arrays in memory, batches from worker processes) and ``starts`` (start of the workers)."""

# pyright: reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from benchmarks.loaders import forever
from benchmarks.suite import Aim, Case, CaseTimer, Suite
from lightning_turbo.data import PrefetchLoader

__all__ = ["STARTS", "SUITE", "Fields", "Files", "Images"]

BATCH, WORKERS = 16, 2


class Fields(Dataset[dict[str, Tensor]]):
    """Samples with a small image and seven small tensors, as in detection and video data."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        fields = {f"field {number}": torch.full((number + 1, 4), float(index)) for number in range(7)}
        return {"image": torch.full((3, 64, 64), float(index)), **fields}


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Samples with an image and a mask of the same size. A batch has two large tensors."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3, 96, 96), float(index)), torch.full((1, 96, 96), float(index))


class Files(Dataset[Tensor]):
    """A list of file names and labels, as a dataset of an image folder has it."""

    def __init__(self, count: int) -> None:
        self.items = [(f"train/class{n % 1000:04d}/image_{n:08d}.jpg", n % 1000) for n in range(count)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.items[index][1])


def _torchdata(*args: Any, **kwargs: Any) -> Iterable[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(*args, **kwargs)


LOADERS: dict[str, Callable[..., Iterable[Any]]] = {
    "DataLoader": DataLoader,
    "PrefetchLoader": PrefetchLoader,
    "torchdata's StatefulDataLoader": _torchdata,
}


def _drain(timer: CaseTimer, batches: Iterable[Any], size: int) -> dict[str, float]:
    for _ in batches:
        if not timer.step(samples=size):
            break
    return {}


def arrays(timer: CaseTimer, *, by: str) -> dict[str, float]:
    """Load batches of 256 of 50,000 rows of 20 and of 5 numbers, without worker processes."""
    generator = torch.Generator().manual_seed(timer.seed)
    data = TensorDataset(torch.rand(50_000, 20, generator=generator), torch.rand(50_000, 5, generator=generator))
    return _drain(timer, forever(LOADERS[by](data, 256, shuffle=True)), 256)


def small(timer: CaseTimer, *, by: str) -> dict[str, float]:
    """Load lists of 16 samples with eight small tensors each, with two worker processes."""
    return _drain(timer, LOADERS[by](Fields(), BATCH, shuffle=True, collate_fn=list, num_workers=WORKERS), BATCH)


def large(timer: CaseTimer, *, by: str) -> dict[str, float]:
    """Load batches of two large tensors, 1.8 MB and 0.6 MB, with two worker processes."""
    settings = {"shuffle": True, "collate_fn": default_collate, "num_workers": WORKERS}
    return _drain(timer, LOADERS[by](Images(), BATCH, **settings), BATCH)


def start(
    timer: CaseTimer, *, by: str, method: str, persistent: bool = False, files: int = 400_000
) -> dict[str, float]:
    """Time the first batch of each epoch with two worker processes over a list of files.

    Returns:
        The time of the first epoch, in seconds.
    """
    data = Files(20_000 if timer.quick else files)
    settings = {"num_workers": WORKERS, "multiprocessing_context": method, "persistent_workers": persistent}
    loader = LOADERS[by](data, BATCH, **settings)
    started, first = time.perf_counter(), 0.0
    while True:
        batches = iter(loader)
        next(batches)
        first = first or time.perf_counter() - started
        if not timer.step(samples=BATCH):
            return {"first_epoch_seconds": first}
        del batches


ARRAYS, SMALL, LARGE = "arrays in memory: ", "small tensors: ", "two large tensors: "
TORCH, OURS, TORCHDATA = LOADERS
KINDS = dict(zip(LOADERS, ("torch", "ours", "peer"), strict=True))
NEEDS = {TORCHDATA: ("torchdata",)}


def _cases() -> Iterator[Case]:
    groups = ((ARRAYS, arrays, (TORCH, OURS, TORCHDATA)), (SMALL, small, LOADERS), (LARGE, large, LOADERS))
    for group, run, names in groups:
        for name in names:
            yield Case(
                name=group + name, run=run, config={"by": name}, base=group + TORCH, kind=KINDS[name],
                needs=NEEDS.get(name, ()),
            )  # fmt: skip


def _starts() -> Iterator[Case]:
    for method in ("forkserver", "spawn"):
        for name in (TORCH, OURS, TORCHDATA):
            yield Case(
                name=f"{method}: {name}", run=start, config={"method": method, "by": name}, base=f"{method}: {TORCH}",
                kind=KINDS[name], needs=NEEDS.get(name, ()),
            )  # fmt: skip
    kept = {"method": "forkserver", "by": TORCH, "persistent": True}
    yield Case(name="forkserver: DataLoader, persistent_workers", run=start, config=kept, base="forkserver: DataLoader")
    yield Case(
        name="fork: DataLoader", run=start, config={"by": TORCH, "method": "fork"}, base="forkserver: DataLoader"
    )


SUITE = Suite(
    name="loading",
    about="A batch of 256 rows of a TensorDataset; or a batch from two worker processes: a list of 16 samples with "
    "eight small tensors each, or two large tensors.",
    cases=list(_cases()),
    aims=[
        Aim(ARRAYS + OURS, ARRAYS + TORCH, at_most=0.2),
        Aim(SMALL + OURS, SMALL + TORCH, at_most=0.2),
        Aim(LARGE + OURS, LARGE + TORCH, at_most=1.03),
    ],
    quick=(ARRAYS + TORCH, ARRAYS + OURS, SMALL + TORCH, SMALL + OURS),
    rounds=13,
    lead=16,  # more than the queues hold, so that no batch that was loaded ahead while the process was held is measured
    round_seconds=0.4,
    seconds=150,
    unit="batch",
)

STARTS = Suite(
    name="starts",
    about="The first batch of each epoch after the first, with two worker processes that start in each epoch, over a "
    "list of 400,000 file names and labels.",
    cases=list(_starts()),
    aims=[
        Aim(f"forkserver: {OURS}", f"forkserver: {TORCH}", at_most=0.7),
    ],
    quick=(f"forkserver: {TORCH}", f"forkserver: {OURS}"),
    steps=1,
    rounds=5,
    warmup=1,
    lead=1,
    seconds=150,
    unit="epoch",
)
