"""Many small tensors a sample from two worker processes, as in detection: ``DataLoader`` and ``PrefetchLoader``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_turbo import PrefetchLoader

BATCH = 16


class Boxes(Dataset[dict[str, Any]]):
    """An image and six small tensors a sample."""

    def __len__(self) -> int:
        return 40 * BATCH

    def __getitem__(self, index: int) -> dict[str, Any]:
        count = 1 + index % 9
        return {
            "image": torch.zeros(3, 32, 32),
            "boxes": torch.ones(count, 4),
            "labels": torch.ones(count, dtype=torch.int64),
            "area": torch.ones(count),
            "crowd": torch.zeros(count, dtype=torch.int64),
            "id": torch.tensor([index]),
            "size": torch.tensor([32, 32]),
        }


def as_they_are(samples: list[Any]) -> list[Any]:
    """Collate as detection does: a list of samples."""
    return samples


def measure(seconds: float, step: Callable[[str], Any]) -> dict[str, Any]:
    """Return the milliseconds a batch of both, epoch by epoch in turns."""
    step("boxes from worker processes")
    made = {"plain": DataLoader, "ours": PrefetchLoader}
    loaders = {name: kind(Boxes(), BATCH, num_workers=2, collate_fn=as_they_are) for name, kind in made.items()}
    spent, counts = dict.fromkeys(loaders, 0.0), dict.fromkeys(loaders, 0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not all(counts.values()):
        for name, loader in loaders.items():
            batches = iter(loader)
            next(batches)  # the processes have started
            began = time.perf_counter()
            for _ in batches:
                counts[name] += 1
            spent[name] += time.perf_counter() - began
    milliseconds = {name: 1000 * spent[name] / counts[name] for name in loaders}
    return {"milliseconds_a_batch": milliseconds, "factor": milliseconds["plain"] / milliseconds["ours"]}
