"""Samples of many small tensors, as in detection, from two worker processes: ``DataLoader`` and ``PrefetchLoader``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_turbo import PrefetchLoader

BATCH = 16


class Boxes(Dataset[dict[str, Any]]):
    """Samples of an image and six small tensors."""

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


def collate_list(samples: list[Any]) -> list[Any]:
    """Collate samples as in detection, where a batch is a list of samples."""
    return samples


def measure(seconds: float, step: Callable[[str], Any]) -> dict[str, Any]:
    """Return the milliseconds per batch of both loaders, measured in alternating epochs.

    Args:
        seconds: About how long to measure.
        step: Called with the name of each step before it starts.
    """
    step("boxes from worker processes")
    made = {"plain": DataLoader, "ours": PrefetchLoader}
    loaders = {name: kind(Boxes(), BATCH, num_workers=2, collate_fn=collate_list) for name, kind in made.items()}
    spent, counts = dict.fromkeys(loaders, 0.0), dict.fromkeys(loaders, 0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not all(counts.values()):
        for name, loader in loaders.items():
            batches = iter(loader)
            next(batches)  # the worker processes have started
            began = time.perf_counter()
            for _ in batches:
                counts[name] += 1
            spent[name] += time.perf_counter() - began
    milliseconds = {name: 1000 * spent[name] / counts[name] for name in loaders}
    return {"milliseconds_a_batch": milliseconds, "factor": milliseconds["plain"] / milliseconds["ours"]}
