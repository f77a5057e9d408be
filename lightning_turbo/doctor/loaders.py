"""Examines loaders: their settings, and what they draw random numbers from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._random import GeneratorWatch, generators_in
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.doctor.facts import Loader, Site

__all__ = ["Draws", "describe_loader", "inner_loader"]

TRANSFORMS = ("transform", "transforms", "target_transform")
GENERATORS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)


def describe_loader(loader: Any, site: Site | None = None, draws: str = "") -> Loader:
    """Return the facts about a loader; none for ``None`` and for several loaders.

    Args:
        loader: The loader.
        site: The line that creates it.
        draws: What loading was seen to draw from, as a clause.
    """
    if loader is None or isinstance(loader, (list, tuple, dict)):
        return Loader()
    inner = inner_loader(loader)
    dataset = getattr(inner, "dataset", None)
    return Loader(
        type=type(loader).__name__,
        sampler=type(getattr(inner, "sampler", None)).__name__,
        sharded=_sharded(inner),
        iterable_dataset=isinstance(dataset, IterableDataset),
        site=site,
        draws=draws,
        **(_standard_facts(loader) if isinstance(loader, DataLoader) else {}),
    )


def inner_loader(loader: Any) -> Any:
    """Return the DataLoader inside a wrapper, otherwise the loader itself."""
    # A wrapper may use any attribute name, so all attributes are searched.
    held = (loader, *getattr(loader, "__dict__", {}).values())
    return next((each for each in held if isinstance(each, DataLoader)), loader)


class Draws:
    """Checks whether loading draws random numbers in this process, which prevents loading in a thread.

    A ``Session`` calls ``begin`` and ``end`` around the fetch of each watched batch.

    Attributes:
        drew: What was drawn from, as a clause; empty if nothing was.
    """

    def __init__(self) -> None:
        self.drew = ""
        self._watch: GeneratorWatch | None = None

    def begin(self, loader: Any) -> None:
        """Start watching a loader that loads in this process, unless it was seen to draw."""
        if self.drew or not isinstance(loader, DataLoader) or loader.num_workers:
            return
        if getattr(loader, "sample_seeds", None) is not None:
            self.drew = "draws from generators that sample_seeds seeds"
        else:
            self._watch = GeneratorWatch(generators_in(loader.dataset))
            self._watch.__enter__()

    def end(self) -> None:
        """Stop watching."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__()
            self.drew = watch.found


def _innermost(dataset: Any) -> Any:
    """Return the dataset inside subsets and seeded datasets."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _standard_facts(loader: DataLoader[Any]) -> dict[str, Any]:
    return {
        "standard": True,
        "prefetches": isinstance(loader, PrefetchLoader),
        "workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "persistent_workers": loader.persistent_workers,
        "copied_generators": _copied_generators(loader),
    }


def _copied_generators(loader: DataLoader[Any]) -> tuple[str, ...]:
    """Return the generators of a dataset and its transforms that every worker gets in the same state.

    A ``worker_init_fn`` may seed them, and with sample seeds the samples do.
    """
    dataset: Any = loader.dataset
    if loader.num_workers < 2 or loader.worker_init_fn is not None or getattr(loader, "sample_seeds", None) is not None:
        return ()
    dataset = _innermost(dataset)
    owners = {f"dataset.{name}": getattr(dataset, name, None) for name in TRANSFORMS}
    return tuple(
        f"{path}.{name}"
        for path, owner in {"dataset": dataset, **owners}.items()
        for name, value in getattr(owner, "__dict__", {}).items()
        if isinstance(value, GENERATORS)
    )


def _sharded(loader: Any) -> bool | None:
    """Return whether a loader gives each rank its own part of the data; only torch's own samplers tell."""
    batches = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    samplers = {type(each) for each in found} - {type(None)}
    if any(issubclass(each, DistributedSampler) for each in samplers):
        return True
    # A custom sampler may or may not split the data, so nothing is known about it.
    names = " ".join({each.__module__.rpartition(".")[0] for each in samplers})
    return {"torch.utils.data": False}.get(names)
