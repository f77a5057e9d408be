"""What the Trainer, the loader, the optimizers and the model are set to: facts that need no watching."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo._machine import count_cores
from lightning_turbo.data.loader import PrefetchLoader
from lightning_turbo.doctor.draws import find_draws
from lightning_turbo.doctor.facts import Loader, OptimizerFacts, Part, SchedulerFacts, Site
from lightning_turbo.doctor.source import Sources
from lightning_turbo.nn.memory_format import LAST

__all__ = [
    "batch_facts",
    "cancelled_biases",
    "count_epochs",
    "has_contiguous_convolutions",
    "loader_facts",
    "optimizer_facts",
    "process_facts",
    "scheduler_facts",
    "unused_parameters",
]


def process_facts(device: torch.device) -> dict[str, Any]:
    """Return what this process and its device are set to, as fields of ``Facts``."""
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # torch 2.9; the older one then may refuse
    return {
        "device": str(device),
        "capability": torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        "cores": count_cores(),
        "tf32": torch.get_float32_matmul_precision() != "highest" if newer is None else newer == "tf32",
    }


def loader_facts(trainer: Any, sources: Sources, fit: Site | None = None, probe: bool = False) -> Loader:
    """Return the settings of the training loader; nothing is known if there are several or it has not been made.

    Args:
        trainer: The Trainer.
        sources: Finds the line that makes the loader.
        fit: The line that began the run, for a loader that was made elsewhere.
        probe: Whether to load a sample in a worker, to see whether it draws random numbers.
    """
    loader: Any = trainer.train_dataloader
    if loader is None or isinstance(loader, (list, tuple, dict)):
        return Loader()
    names = ("DataLoader", type(loader).__name__)
    owner = type(trainer.fit_loop._data_source.instance)  # the module or DataModule, or the loader that fit got
    inner = _inner(loader)
    return Loader(
        type=names[1],
        sampler=type(getattr(inner, "sampler", None)).__name__,
        sharded=_sharded(inner),
        iterable_dataset=isinstance(getattr(inner, "dataset", None), IterableDataset),
        site=sources.call(owner, "train_dataloader", *names) or fit,
        **(_standard_facts(loader, probe) if isinstance(loader, DataLoader) else {}),
    )


def _inner(loader: Any) -> Any:
    """Return the DataLoader that a loader of another kind wraps, else the loader itself."""
    held = (loader, *getattr(loader, "__dict__", {}).values())
    return next((each for each in held if isinstance(each, DataLoader)), loader)


def _standard_facts(loader: DataLoader[Any], probe: bool) -> dict[str, Any]:
    return {
        "standard": True,
        "prefetches": isinstance(loader, PrefetchLoader),
        "workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "persistent_workers": loader.persistent_workers,
        **(find_draws(loader) if probe else {}),
    }


def _sharded(loader: Any) -> bool | None:
    """Return whether a loader gives each rank its own part; only torch's own samplers tell."""
    batches = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    samplers = {type(each) for each in found} - {type(None)}
    if any(issubclass(each, DistributedSampler) for each in samplers):
        return True
    names = " ".join({each.__module__.rpartition(".")[0] for each in samplers})
    return {"torch.utils.data": False}.get(names)


def batch_facts(batch: Any) -> dict[str, Any]:
    """Return what a batch holds, nested in lists, tuples and dicts as it may be, as fields of ``Facts``."""
    tensors = dict(_leaves(batch, "batch"))
    return {
        "batch": sum(each.numel() * each.element_size() for each in tensors.values()),
        "wide": tuple(name for name, each in tensors.items() if each.dtype in (torch.float64, torch.complex128)),
    }


def _leaves(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor) and not value.is_nested:  # a nested tensor has no shape
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(each, f"{name}[{key!r}]")


def has_contiguous_convolutions(module: nn.Module) -> bool:
    """Return whether a weight of four or five dimensions is in the default memory format."""
    return any(each.ndim in LAST and each.is_contiguous() for each in module.parameters())


def cancelled_biases(module: nn.Module, biases: set[int], sources: Sources) -> tuple[Part, ...]:
    """Return the layers whose biases are among ``biases``, the ids of those that a batch norm was seen to cancel."""
    names = [name for name, bias in module.named_parameters() if id(bias) in biases]
    return tuple(Part(name=name.removesuffix(".bias"), site=sources.layer(module, name)) for name in names)


def unused_parameters(trainer: Any, used: set[int], sources: Sources) -> tuple[Part, ...]:
    """Return the module's parameters that require a gradient and are not among ``used`` (their ids).

    Nothing is said where optimizers hold other tensors than the module's: masters take its gradients away early.
    """
    module: nn.Module = trainer.lightning_module
    groups = chain.from_iterable(each.param_groups for each in trainer.optimizers)
    optimized = set(map(id, chain.from_iterable(group["params"] for group in groups)))
    if not optimized <= set(map(id, module.parameters())):
        return ()
    unused = [name for name, each in module.named_parameters() if each.requires_grad and id(each) not in used]
    return tuple(Part(name=name, site=sources.layer(module, name)) for name in unused)


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
