"""Examines loaders: their settings, and what they draw random numbers from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._random import GeneratorWatch, changed_generators, generators_in, shared_state
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.data.loading.whole_batches import is_quiet
from lightning_turbo.doctor.facts import Loader, Site

__all__ = ["Draws", "describe_loader", "inner_loader"]

TRANSFORMS = ("transform", "transforms", "target_transform")
GENERATORS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)


def describe_loader(loader: Any, site: Site | None = None, draws: Draws | None = None) -> Loader:
    """Return the facts about a loader; none for ``None`` and for several loaders.

    Args:
        loader: The loader.
        site: The line that creates it.
        draws: What was seen of its steps.
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
        draws=draws.drew if draws is not None else "",
        loading_draws=draws is not None and draws.loading,
        **(_standard_facts(loader) if isinstance(loader, DataLoader) else {}),
    )


def inner_loader(loader: Any) -> Any:
    """Return the DataLoader inside a wrapper, otherwise the loader itself."""
    # A wrapper may use any attribute name, so all attributes are searched.
    held = (loader, *getattr(loader, "__dict__", {}).values())
    return next((each for each in held if isinstance(each, DataLoader)), loader)


class Draws:
    """Checks whether loading or the step draws random numbers in this process, which prevents loading in a thread.

    A ``Session`` calls ``begin`` before each watched batch is fetched, ``fetched`` after it, and ``end`` after its
    step, or ``drop`` if it was none. The loaders of this package look at the same.

    Attributes:
        drew: Who drew from what, as a clause; empty if nobody did.
        loading: Whether loading drew, from generators that nobody seeds for each sample.
    """

    def __init__(self) -> None:
        self.drew = ""
        self.loading = False
        self._watch: GeneratorWatch | None = None
        self._states: dict[str, Any] | None = None  # of the global generators as the step began

    def begin(self, loader: Any) -> None:
        """Start watching a loader that loads in this process, unless somebody was seen to draw."""
        if self.drew or not isinstance(loader, DataLoader) or loader.num_workers:
            return
        if getattr(loader, "sample_seeds", None) is not None:
            self.drew = "loading draws from generators that sample_seeds seeds"
        elif not is_quiet(loader):
            self._watch = GeneratorWatch(generators_in(loader.dataset))
            self._watch.__enter__()

    def fetched(self) -> None:
        """Find out whether loading has drawn, and go on to watch the step."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__()
            self.loading = bool(watch.found)
            self.drew = f"loading {watch.found}" if watch.found else ""
            self._states = shared_state()

    def end(self) -> None:
        """Find out whether the step has drawn, and stop watching."""
        states, self._states = self._states, None
        if states is not None and not self.drew and (names := changed_generators(states, shared_state())):
            self.drew = f"the step draws from the global RNG of {' and '.join(names)}, which loading may use too"

    def drop(self) -> None:
        """Stop watching, without a result."""
        self._watch = self._states = None


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
