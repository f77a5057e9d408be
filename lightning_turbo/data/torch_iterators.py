"""What is done with the iterators of torch's ``DataLoader`` and of the classes that inherit from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lightning_turbo.data.batches import pin_batch
from lightning_turbo.data.resume import IndexTape, Place

__all__ = ["copied", "end_workers", "leave", "load", "undivided"]


def load(source: Any, indices: Any) -> Any:
    """Load one batch as torch's iterator ``source`` does; several threads may at the same time."""
    batch = source._dataset_fetcher.fetch(indices)
    return pin_batch(batch) if source._pin_memory else batch


def undivided(loader: Any, source: Any) -> str:
    """Return why several threads cannot load what the iterator ``source`` of ``loader`` would; empty if they can."""
    if isinstance(loader.dataset, IterableDataset):
        return f"the dataset is an IterableDataset ({type(loader.dataset).__name__}), which one thread runs through"
    if loader.num_workers:
        return f"num_workers={loader.num_workers} processes load, and a thread takes what they have ready"
    if not isinstance(source, _SingleProcessDataLoaderIter):
        return f"{type(loader).__name__} does not load by torch's own iterator"
    return ""


def end_workers(source: Any) -> None:
    """End the worker processes of an iterator, if it has any."""
    end = getattr(source, "_shutdown_workers", None)
    if end is not None:
        end()


def leave(source: Any, tape: IndexTape | None, place: Place) -> None:
    """Let go of an iterator: end its worker processes, and take back what its sampler drew ahead."""
    end_workers(source)
    if tape is not None:
        tape.put_back(place)


def copied(state_dict: Callable[[], Any]) -> Any:
    """Return a state, cut loose from objects that go on changing."""
    return copy.deepcopy(state_dict())
