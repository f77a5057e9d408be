"""Reads the settings of Trainer, loaders, optimizers and model: facts that need no watching."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from lightning_turbo._machine import count_cores
from lightning_turbo._trainer import owner_of_training_data
from lightning_turbo.doctor.facts import Loader, OptimizerFacts, Part, RunSettings, SchedulerFacts, Site
from lightning_turbo.doctor.loaders import Draws, describe_loader
from lightning_turbo.doctor.source import Sources
from lightning_turbo.nn.memory_format import LAST

__all__ = [
    "BatchFacts",
    "batch_facts",
    "cancelled_biases",
    "count_epochs",
    "has_contiguous_convolutions",
    "leaves",
    "loader_facts",
    "optimizer_facts",
    "run_facts",
    "scheduler_facts",
    "validation_loader_facts",
]


GROUP_NAMES = ("params", "param_names", "name")
"""Entries of a parameter group that are not settings."""


def run_facts(trainer: Any) -> RunSettings:
    """Return the settings of the machine, the process and the Trainer."""
    device = trainer.strategy.root_device
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return RunSettings(
        device=str(device),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        cores=count_cores(),
        threads=torch.get_num_threads(),
        # torch 2.9 introduced the newer setting; reading the older one may then raise an error.
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


def loader_facts(trainer: Any, sources: Sources, draws: Draws, fit: Site | None = None) -> Loader:
    """Return the facts about the training loader.

    Args:
        trainer: The Trainer.
        sources: Finds the line that creates the loader.
        draws: What was seen of the steps.
        fit: The line that started the run, in case the loader was created elsewhere.
    """
    loader: Any = trainer.train_dataloader
    names = ("DataLoader", type(loader).__name__)
    site = sources.call(type(owner_of_training_data(trainer)), "train_dataloader", *names) or fit
    return describe_loader(loader, site, draws)


def validation_loader_facts(trainer: Any, sources: Sources, fit: Site | None = None) -> Loader:
    """Return the facts about the validation loader, if there is one."""
    given: Any = trainer.val_dataloaders
    loader = given[0] if isinstance(given, (list, tuple)) and len(given) == 1 else given
    owner = type(trainer.datamodule or trainer.lightning_module)
    return describe_loader(loader, sources.call(owner, "val_dataloader", "DataLoader") or fit)


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """The contents of a batch.

    Attributes:
        size: Bytes of its tensors.
        objects: Number of tensors.
        wide: Tensors in double precision, as a user would write them.
    """

    size: int = 0
    objects: int = 0
    wide: tuple[str, ...] = ()


def batch_facts(batch: Any) -> BatchFacts:
    """Return the contents of a batch of any nested lists, tuples, mappings and dataclasses."""
    tensors = dict(leaves(batch, "batch"))
    return BatchFacts(
        size=sum(each.numel() * each.element_size() for each in tensors.values()),
        objects=len(tensors),
        wide=tuple(name for name, each in tensors.items() if each.dtype in (torch.float64, torch.complex128)),
    )


def leaves(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value, with the expressions that a user would write for them."""
    if isinstance(value, torch.Tensor) and not value.is_nested:  # a nested tensor has no shape
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(each, f"{name}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name, None), f"{name}.{field.name}")


def has_contiguous_convolutions(module: nn.Module) -> bool:
    """Return whether a weight with four or five dimensions has the default memory format."""
    return any(each.ndim in LAST and each.is_contiguous() for each in module.parameters())


def optimizer_facts(trainer: Any, sources: Sources) -> tuple[OptimizerFacts, ...]:
    """Return the settings of the run's optimizers."""
    return tuple(_optimizer_facts(each, _made(trainer, sources, each)) for each in trainer.optimizers)


def _optimizer_facts(optimizer: Any, site: Site | None) -> OptimizerFacts:
    groups = optimizer.param_groups
    group = groups[0]
    plain = not group.get("fused")
    return OptimizerFacts(
        name=type(optimizer).__name__,
        one_by_one=plain and group.get("foreach") is False,
        can_fuse=plain and "fused" in group,
        groups=len(groups),
        kinds=len({_kind(each) for each in groups}),
        site=site,
    )


def _kind(group: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the settings of a parameter group, without its names."""
    return tuple((name, repr(value)) for name, value in sorted(group.items()) if name not in GROUP_NAMES)


def cancelled_biases(module: nn.Module, biases: set[int], sources: Sources) -> tuple[Part, ...]:
    """Return the layers whose biases are in ``biases``, the ids of those that a norm was seen to cancel."""
    names = [name for name, bias in module.named_parameters() if id(bias) in biases]
    return tuple(Part(name=name.removesuffix(".bias"), site=sources.layer(module, name)) for name in names)


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
        return {"length": int(scheduler.total_size * scheduler.step_ratio), "aim": "its first cycle"}
    return {}


def _made(trainer: Any, sources: Sources, each: Any) -> Site | None:
    return sources.call(type(trainer.lightning_module), "configure_optimizers", type(each).__name__)


def count_epochs(trainer: Any) -> float:
    """Return the largest number of epochs that the run may have."""
    ends = {trainer.max_epochs} - {None, -1}
    batches = trainer.num_training_batches
    if trainer.max_steps >= 0 and batches < math.inf:
        ends.add(-(-trainer.max_steps // -(-batches // trainer.accumulate_grad_batches)))
    return min(ends, default=math.inf)
