"""What the Trainer, the loader, the optimizers and the model are set to: facts that need no watching."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._machine import count_cores
from lightning_turbo._trainer import owner_of_training_data
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.data.sample_seeds import SeededDataset
from lightning_turbo.doctor.facts import Loader, OptimizerFacts, Run, SchedulerFacts, Site
from lightning_turbo.doctor.source import Sources
from lightning_turbo.nn.memory_format import LAST

__all__ = [
    "batch_facts",
    "count_epochs",
    "has_contiguous_convolutions",
    "leaves",
    "loader_facts",
    "optimizer_facts",
    "run_facts",
    "scheduler_facts",
]


TRANSFORMS = ("transform", "transforms", "target_transform")
READS = r"\b(np|numpy)\.load\((?!.*mmap_mode)|\bReadImage\(|\btorch\.load\((?!.*mmap=True)"
NIFTI = r"\.get_fdata\(|\basarray\([^)]*\.dataobj\b(?!\[)"
"""How a line has a whole file read: by NumPy, SimpleITK and torch, and by nibabel."""
GENERATORS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)


def run_facts(trainer: Any) -> Run:
    """Return what the machine, the process and the Trainer are set to."""
    device, newer = trainer.strategy.root_device, getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return Run(
        device=str(device),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        cores=count_cores(),
        # torch 2.9 brought the newer setting; the older one may refuse to tell then.
        tf32=torch.get_float32_matmul_precision() != "highest" if newer is None else newer == "tf32",
        precision=str(trainer.precision),
        strategy=type(trainer.strategy).__name__,
        world_size=trainer.world_size,
        local_ranks=trainer.num_devices,
        gives_sampler=trainer._accelerator_connector.use_distributed_sampler,
        automatic=trainer.lightning_module.automatic_optimization,
        epochs=count_epochs(trainer),
        batches=trainer.num_training_batches,
        ends_epoch=trainer.max_steps < 0
        or trainer.max_steps * trainer.accumulate_grad_batches >= trainer.num_training_batches,
        accumulate=trainer.accumulate_grad_batches,
        exact_windows=any(type(each).__name__ == "ExactAccumulation" for each in trainer.callbacks),
    )


def loader_facts(trainer: Any, sources: Sources, fit: Site | None = None) -> Loader:
    """Return the settings of the training loader; nothing is known if there are several or it has not been made.

    Args:
        trainer: The Trainer.
        sources: Finds the line that makes the loader.
        fit: The line that began the run, for a loader that was made elsewhere.
    """
    loader: Any = trainer.train_dataloader
    if loader is None or isinstance(loader, (list, tuple, dict)):
        return Loader()
    names = ("DataLoader", type(loader).__name__)
    owner = type(owner_of_training_data(trainer))
    inner = _inner(loader)
    dataset = type(_innermost(getattr(inner, "dataset", None)))
    return Loader(
        type=names[1],
        sampler=type(getattr(inner, "sampler", None)).__name__,
        sharded=_sharded(inner),
        iterable_dataset=isinstance(getattr(inner, "dataset", None), IterableDataset),
        whole_read=sources.line(dataset, f"{READS}|{NIFTI}"),
        whole_nifti=sources.line(dataset, NIFTI),
        site=sources.call(owner, "train_dataloader", *names) or fit,
        **(_standard_facts(loader) if isinstance(loader, DataLoader) else {}),
    )


def _inner(loader: Any) -> Any:
    """Return the DataLoader that a loader of another kind wraps, else the loader itself."""
    # A wrapper names its loader as it likes, so that all its attributes are looked at.
    held = (loader, *getattr(loader, "__dict__", {}).values())
    return next((each for each in held if isinstance(each, DataLoader)), loader)


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


def batch_facts(batch: Any) -> dict[str, Any]:
    """Return what a batch holds, however its lists, tuples, mappings and dataclasses are nested, for ``Facts``."""
    tensors = dict(leaves(batch, "batch"))
    return {
        "batch": sum(each.numel() * each.element_size() for each in tensors.values()),
        "wide": tuple(name for name, each in tensors.items() if each.dtype in (torch.float64, torch.complex128)),
    }


def leaves(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors within a value, with what a user would write for them."""
    if isinstance(value, torch.Tensor) and not value.is_nested:  # a nested tensor has no shape
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(each, f"{name}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name, None), f"{name}.{field.name}")


def has_contiguous_convolutions(module: nn.Module) -> bool:
    """Return whether a weight of four or five dimensions is in the default memory format."""
    return any(each.ndim in LAST and each.is_contiguous() for each in module.parameters())


def optimizer_facts(trainer: Any, sources: Sources) -> tuple[OptimizerFacts, ...]:
    """Return the settings of the run's optimizers."""
    return tuple(_optimizer_facts(each, _made(trainer, sources, each)) for each in trainer.optimizers)


def _optimizer_facts(optimizer: Any, site: Site | None) -> OptimizerFacts:
    group = optimizer.param_groups[0]
    plain = not group.get("fused")
    return OptimizerFacts(
        name=type(optimizer).__name__,
        one_by_one=plain and group.get("foreach") is False,
        can_fuse=plain and "fused" in group,
        site=site,
    )


def scheduler_facts(trainer: Any, sources: Sources) -> tuple[SchedulerFacts, ...]:
    """Return the settings of the run's learning-rate schedulers."""
    return tuple(
        SchedulerFacts(
            name=type(each.scheduler).__name__,
            interval=each.interval,
            site=_made(trainer, sources, each.scheduler),
            **_length_of(each.scheduler),
        )
        for each in trainer.lr_scheduler_configs
    )


def _length_of(scheduler: Any) -> dict[str, Any]:
    if isinstance(scheduler, OneCycleLR):
        return {"length": scheduler.total_steps - 1, "aim": "its end"}
    if isinstance(scheduler, CyclicLR):
        return {"length": int(scheduler.total_size * scheduler.step_ratio), "aim": "its first turn"}
    return {}


def _made(trainer: Any, sources: Sources, each: Any) -> Site | None:
    return sources.call(type(trainer.lightning_module), "configure_optimizers", type(each).__name__)


def count_epochs(trainer: Any) -> float:
    """Return the epochs that the run may last."""
    ends = {trainer.max_epochs} - {None, -1}
    batches = trainer.num_training_batches
    if trainer.max_steps >= 0 and batches < math.inf:
        ends.add(-(-trainer.max_steps // -(-batches // trainer.accumulate_grad_batches)))
    return min(ends, default=math.inf)
