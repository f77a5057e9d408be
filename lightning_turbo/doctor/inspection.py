"""What the Trainer, the loader, the optimizers and the model are set to: facts that need no watching."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo.doctor.facts import BatchTensor, Call, Layer, Loader, OptimizerFacts, SchedulerFacts, Site, Unused
from lightning_turbo.doctor.machine import huge_pages
from lightning_turbo.doctor.source import Sources
from lightning_turbo.doctor.watch import Watch

__all__ = [
    "batch_tensors",
    "biases",
    "convolves",
    "cores",
    "data_parallel",
    "epochs",
    "layers",
    "loader",
    "optimizers",
    "page_faults",
    "schedulers",
    "settings",
    "shapes_of",
    "spare_huge_pages",
    "unused",
]

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def page_faults() -> int:
    """Return the page faults of this process so far that no disk had a part in; 0 where the system does not tell."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource is not None else 0


def spare_huge_pages() -> bool:
    """Return whether the kernel gives large pages to who asks for them, and torch is not told to ask."""
    return huge_pages() == "madvise" and os.environ.get("THP_MEM_ALLOC_ENABLE") != "1"


def loader(trainer: Any, sources: Sources) -> Loader | None:
    """Return the settings of the training loader, ``None`` if there are several or it has not been made."""
    each: Any = trainer.train_dataloader
    if each is None or isinstance(each, (list, tuple, dict)):
        return None
    site = None
    for owner in (trainer.datamodule, trainer.lightning_module):
        site = site or sources.call(type(owner), "train_dataloader", "DataLoader", type(each).__name__)
    site = site or sources.call_anywhere("DataLoader", type(each).__name__)
    dataset = getattr(each, "dataset", None)
    if not isinstance(each, DataLoader):
        inner = next((held for held in getattr(each, "__dict__", {}).values() if isinstance(held, DataLoader)), each)
        return Loader(
            type=type(each).__name__,
            standard=False,
            sampler=_sampler(inner),
            sharded=_sharded(inner),
            iterable_dataset=isinstance(getattr(inner, "dataset", None), IterableDataset),
            site=site,
        )
    return Loader(
        type=type(each).__name__,
        standard=True,
        workers=each.num_workers,
        pin_memory=each.pin_memory,
        persistent_workers=each.persistent_workers,
        prefetch_factor=each.prefetch_factor,
        sampler=_sampler(each),
        sharded=_sharded(each),
        iterable_dataset=isinstance(dataset, IterableDataset),
        dataset_set_epoch=callable(getattr(dataset, "set_epoch", None)),
        site=site,
    )


def _sampler(loader: Any) -> str:
    return type(loader.sampler).__name__ if isinstance(loader, DataLoader) else ""


def _sharded(loader: Any) -> bool | None:
    """Whether a loader gives each rank its own part; of others than torch's plain samplers nothing is known."""
    batches = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    samplers = [each for each in found if each is not None]
    if any(isinstance(each, DistributedSampler) for each in samplers):
        return True
    plain = samplers and all(type(each).__module__.startswith("torch.utils.data.") for each in samplers)
    return False if plain else None


def batch_tensors(batch: Any) -> tuple[BatchTensor, ...]:
    """Return the tensors of a batch, nested in lists, tuples and dicts as they may be."""
    return tuple(_described(name, tensor) for name, tensor in _leaves(batch, "batch"))


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a batch's tensors."""
    return tuple(tuple(tensor.shape) for _, tensor in _leaves(batch, "batch"))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if not value.is_nested:  # such a tensor has no shape
            yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from _leaves(each, f"{name}[{i}]")


def _described(name: str, tensor: torch.Tensor) -> BatchTensor:
    narrow = None
    with torch._C.DisableTorchFunctionSubclass():  # MONAI's tensors look at their metadata when they are cut
        size = tensor.numel() * tensor.element_size()
        if tensor.is_floating_point() and tensor.dim() >= 3 and tensor.numel() and tensor.layout == torch.strided:
            sample = tensor.detach().flatten()[:4096].double()
            if _are_bytes(sample) or _are_bytes(sample * 255):
                narrow = tensor.numel()
    return BatchTensor(name=name, dtype=str(tensor.dtype), shape=tuple(tensor.shape), bytes=size, bytes_as_uint8=narrow)


def _are_bytes(sample: torch.Tensor) -> bool:
    whole = (sample.round() - sample).abs().max() < 1e-4
    return bool(whole and sample.min() >= 0 and 1 < sample.max() < 255.5)


def layers(module: nn.Module, sources: Sources) -> tuple[Layer, ...]:
    """Return the linear layers and convolutions of a model."""
    found = []
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear):
            found.append(
                Layer(name=name, sizes=(each.in_features, each.out_features), site=sources.layer(module, name))
            )
        elif isinstance(each, _CONVOLUTIONS):
            found.append(
                Layer(name=name, sizes=(each.in_channels, each.out_channels), site=sources.layer(module, name))
            )
    return tuple(found)


def convolves(module: nn.Module) -> bool:
    """Return whether a model has convolutions."""
    return any(isinstance(each, _CONVOLUTIONS) for each in module.modules())


def biases(watch: Watch, module: nn.Module, sources: Sources) -> tuple[Call, ...]:
    """Return the layers whose bias a batch norm was seen to take away."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return tuple(
        Call(
            kind="bias",
            name=names[key].removesuffix(".bias"),
            site=sources.layer(module, names[key].removesuffix(".bias")) or site,
            count=watch.watched,
            steps=watch.watched,
        )
        for key, site in watch.biases.items()
        if key in names
    )


def data_parallel(module: nn.Module, sources: Sources) -> tuple[Unused, ...]:
    """Return the ``nn.DataParallel`` within a model."""
    return tuple(
        Unused(name=name, site=sources.layer(module, name))
        for name, each in module.named_modules()
        if isinstance(each, nn.DataParallel) and name
    )


def unused(trainer: Any, used: set[int], sources: Sources) -> tuple[Unused, ...]:
    """Return the module's parameters that want a gradient and are not among ``used`` (their ids).

    Nothing is said where optimizers hold other tensors than the module's: masters take its gradients away early.
    """
    module: nn.Module = trainer.lightning_module
    own = {id(parameter) for parameter in module.parameters()}
    if any(id(p) not in own for each in trainer.optimizers for group in each.param_groups for p in group["params"]):
        return ()
    return tuple(
        Unused(name=name, site=sources.layer(module, name))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in used
    )


def optimizers(trainer: Any, sources: Sources) -> tuple[OptimizerFacts, ...]:
    """Return the settings of the run's optimizers."""
    found = []
    for each in trainer.optimizers:
        groups = each.param_groups
        found.append(
            OptimizerFacts(
                name=type(each).__name__,
                foreach=groups[0].get("foreach"),
                fused=groups[0].get("fused"),
                can_fuse="fused" in groups[0],
                parameters=sum(len(group["params"]) for group in groups),
                site=sources.call(type(trainer.lightning_module), "configure_optimizers", type(each).__name__),
            )
        )
    return tuple(found)


def schedulers(
    trainer: Any, sources: Sources, batches: int | None, taken: Sequence[int], done: int, stepped: int
) -> tuple[SchedulerFacts, ...]:
    """Return the settings of the run's learning-rate schedulers.

    Args:
        trainer: The Trainer.
        sources: Finds their lines.
        batches: Training batches of an epoch, ``None`` if unknown.
        taken: How many steps each of them took so far.
        done: In how many training batches.
        stepped: And in how many steps of optimizers.
    """
    found = []
    for config, own in zip(trainer.lr_scheduler_configs, taken, strict=True):
        each: Any = config.scheduler
        cyclic = isinstance(each, torch.optim.lr_scheduler.CyclicLR)
        turn = int(each.total_size * each.step_ratio) if cyclic else None
        found.append(
            SchedulerFacts(
                name=type(each).__name__,
                interval=config.interval,
                length=each.total_steps - 1 if isinstance(each, torch.optim.lr_scheduler.OneCycleLR) else turn,
                turn=turn,
                steps=_scheduler_steps(trainer, config, batches, own, done, stepped),
                cycles_beta=cyclic and bool(each.cycle_momentum) and "betas" in each.optimizer.defaults,
                site=sources.call(type(trainer.lightning_module), "configure_optimizers", type(each).__name__),
            )
        )
    return tuple(found)


def epochs(trainer: Any, batches: int | None) -> int | None:
    """Return the epochs that the run may last, ``None`` if it has no such end."""
    ends = []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        ends.append(trainer.max_epochs)
    if trainer.max_steps >= 0 and batches and trainer.lightning_module.automatic_optimization:
        ends.append(-(-trainer.max_steps // -(-batches // trainer.accumulate_grad_batches)))
    return min(ends, default=None)


def optimizer_steps(trainer: Any, batches: int | None) -> int | None:
    """Return the optimizer steps of the whole run, ``None`` if it has no such end."""
    steps = []
    if trainer.max_steps >= 0:
        steps.append(trainer.max_steps)
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and batches is not None:
        steps.append(trainer.max_epochs * -(-batches // trainer.accumulate_grad_batches))
    return min(steps, default=None)


def _scheduler_steps(trainer: Any, config: Any, batches: int | None, taken: int, done: int, stepped: int) -> int | None:
    """Return the steps of a scheduler in the whole run at most, ``None`` if it is stepped by the epoch or unknown."""
    if trainer.lightning_module.automatic_optimization:
        steps = optimizer_steps(trainer, batches)
        together = trainer.accumulate_grad_batches  # batches of an optimizer step; the frequency counts batches, too
        each = math.lcm(together, config.frequency) // together
        return None if steps is None or config.interval != "step" else -(-steps // each)
    if not taken:  # the module may step it once an epoch
        return None
    ends = []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and batches is not None and done:
        ends.append(-(-trainer.max_epochs * batches * (taken + 1) // done))
    if trainer.max_steps >= 0 and stepped:  # max_steps counts the steps of every optimizer
        ends.append(-(-trainer.max_steps * (taken + 1) // stepped))
    return min(ends, default=None)


def settings(sources: Sources) -> dict[str, Site]:
    """Return where the user's code sets the settings that rules speak of."""
    names = {
        "accumulate_grad_batches": ("accumulate_grad_batches",),
        "anomaly": ("detect_anomaly", "set_detect_anomaly"),
        "benchmark": ("benchmark",),
        "deterministic": ("deterministic", "use_deterministic_algorithms"),
        "precision": ("precision",),
        "profiler": ("profiler",),
    }
    found = {key: sources.setting(*each) for key, each in names.items()}
    found["inference_mode"] = sources.setting("inference_mode", off=True)
    return {key: site for key, site in found.items() if site is not None}
