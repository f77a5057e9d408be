"""What a loader is set to, and what it draws from: the one place where a loader is looked at."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._random import GeneratorWatch, generators_in
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.data.sample_seeds import SeededDataset
from lightning_turbo.doctor.clock import Listener, Plan
from lightning_turbo.doctor.facts import Loader, Site
from lightning_turbo.doctor.source import Sources

__all__ = ["Draws", "describe_loader", "inner_loader"]

TRANSFORMS = ("transform", "transforms", "target_transform")
READS = (
    r"\b(np|numpy)\.load\((?!.*mmap_mode)|\bReadImage\(|\btorch\.load\((?!.*mmap=True)"
    r"|\.get_fdata\(|\basarray\([^)]*\.dataobj\b(?!\[)"
)
"""How a line has a whole file read, by NumPy, SimpleITK, torch and nibabel."""
GENERATORS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)


def describe_loader(loader: Any, sources: Sources | None = None, site: Site | None = None, draws: str = "") -> Loader:
    """Return what is known of a loader; nothing of ``None`` and of several.

    Args:
        loader: The loader.
        sources: Finds the lines of its dataset; ``None`` finds none.
        site: The line that makes it.
        draws: What loading was seen to draw from, as a clause.
    """
    if loader is None or isinstance(loader, (list, tuple, dict)):
        return Loader()
    inner = inner_loader(loader)
    dataset = getattr(inner, "dataset", None)
    line = sources.line(type(_innermost(dataset)), READS) if sources is not None else None
    return Loader(
        type=type(loader).__name__,
        sampler=type(getattr(inner, "sampler", None)).__name__,
        sharded=_sharded(inner),
        iterable_dataset=isinstance(dataset, IterableDataset),
        whole_read=line,
        site=site,
        draws=draws,
        **(_standard_facts(loader) if isinstance(loader, DataLoader) else {}),
    )


def inner_loader(loader: Any) -> Any:
    """Return the DataLoader that a loader of another kind wraps, else the loader itself."""
    # A wrapper names its loader as it likes, so that all its attributes are looked at.
    held = (loader, *getattr(loader, "__dict__", {}).values())
    return next((each for each in held if isinstance(each, DataLoader)), loader)


class Draws(Listener):
    """Looks whether loading draws random numbers in this process, which keeps a loader from loading in a thread.

    Who starts it: the clock, with the last step that is not timed. What ends it: the batch of that step. What always
    holds: it looks at one batch that is not the first one of the fit, as ``PrefetchLoader`` does by the same watch.

    Args:
        plan: The steps, of which those that are timed are left alone.
        trainer: The Trainer.
    """

    def __init__(self, plan: Plan, trainer: Any) -> None:
        self.drew = ""
        self.step = plan.needed - 1 if plan.watched else plan.warmup - 1
        self._trainer = trainer
        self._watch: GeneratorWatch | None = None

    def begin_step(self, step: int) -> None:
        """Look from here, if this is the step."""
        loader = self._trainer.train_dataloader
        if step != self.step or step < 1 or not isinstance(loader, DataLoader) or loader.num_workers:
            return
        if isinstance(loader.dataset, SeededDataset):
            self.drew = "draws from generators that sample_seeds seeds"
        else:
            self._watch = GeneratorWatch(generators_in(loader.dataset))
            self._watch.__enter__()

    def fetched(self, step: int) -> None:
        """Look to here."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__()
            self.drew = watch.found

    def end_step(self, step: int) -> None:
        """Look no more; ``fetched`` was not called where ``training_step`` fetches."""
        self.fetched(step)

    def drop_step(self, step: int) -> None:
        """Look no more."""
        self.fetched(step)


def _innermost(dataset: Any) -> Any:
    """Return the dataset below subsets and seeds."""
    while isinstance(dataset, (Subset, SeededDataset)):
        dataset = dataset._seeded_dataset if isinstance(dataset, SeededDataset) else dataset.dataset
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
    """Return the generators of a dataset and its transforms that each worker gets in the same state.

    A ``worker_init_fn`` may seed them, and in a dataset with sample seeds the samples do.
    """
    dataset: Any = loader.dataset
    if loader.num_workers < 2 or loader.worker_init_fn is not None or isinstance(dataset, SeededDataset):
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
    """Return whether a loader gives each rank its own part; only torch's own samplers tell."""
    batches = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    samplers = {type(each) for each in found} - {type(None)}
    if any(issubclass(each, DistributedSampler) for each in samplers):
        return True
    # A sampler of somebody else's may split the data or not: nothing is said about it.
    names = " ".join({each.__module__.rpartition(".")[0] for each in samplers})
    return {"torch.utils.data": False}.get(names)
