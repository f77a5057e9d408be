"""What the Trainer, the loader, the optimizers and the model are set to: facts that need no watching."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo.doctor.environment import count_cores
from lightning_turbo.doctor.facts import BatchTensor, Loader, OptimizerFacts, Part, SchedulerFacts, Site
from lightning_turbo.doctor.source import Sources

__all__ = [
    "batch_tensors",
    "compiler_counts",
    "count_epochs",
    "loader_facts",
    "model_facts",
    "optimizer_facts",
    "process_facts",
    "scheduler_facts",
    "setting_sites",
    "shapes_of",
    "unused_parameters",
]

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip
_SETTINGS = {
    "accumulate_grad_batches": ("accumulate_grad_batches",),
    "anomaly": ("detect_anomaly", "set_detect_anomaly"),
    "benchmark": ("benchmark",),
    "compile": ("compile",),
    "deterministic": ("deterministic", "use_deterministic_algorithms"),
    "precision": ("precision",),
    "profiler": ("profiler",),
}


def process_facts(device: torch.device) -> dict[str, Any]:
    """Return what this process and its device are set to, as fields of ``Facts``."""
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # torch 2.9; the older one then may refuse
    matmul = torch.get_float32_matmul_precision() if newer is None else "high" if newer == "tf32" else "highest"
    return {
        "device": str(device),
        "capability": torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        "cores": count_cores(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "matmul_precision": matmul,
    }


def compiler_counts() -> tuple[Counter[str], int]:
    """Return the graph breaks of ``torch.compile`` so far by reason, and the graphs that it made.

    Its compiler is not imported for it.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    counters = utils.counters if utils is not None else {}
    reasons = {**counters.get("graph_break", {}), **counters.get("unimplemented", {})}
    breaks: Counter[str] = Counter()
    for reason, count in reasons.items():
        breaks[reason.partition("\n")[0]] += count
    return breaks, counters.get("stats", {}).get("unique_graphs", 0)


def loader_facts(trainer: Any, sources: Sources) -> Loader:
    """Return the settings of the training loader; nothing is known if there are several or it has not been made."""
    loader: Any = trainer.train_dataloader
    if loader is None or isinstance(loader, (list, tuple, dict)):
        return Loader()
    names = ("DataLoader", type(loader).__name__)
    owners = (type(trainer.datamodule), type(trainer.lightning_module))
    sites = [sources.call(owner, "train_dataloader", *names) for owner in owners] + [sources.call_anywhere(*names)]
    standard = isinstance(loader, DataLoader)
    held = [loader] if standard else [*getattr(loader, "__dict__", {}).values(), loader]
    inner = next((each for each in held if isinstance(each, DataLoader)), loader)
    return Loader(
        type=names[1],
        standard=standard,
        sampler=type(getattr(inner, "sampler", None)).__name__,
        sharded=_sharded(inner),
        iterable_dataset=isinstance(getattr(inner, "dataset", None), IterableDataset),
        site=next(filter(None, sites), None),
        **(_worker_facts(loader, loader.dataset) if standard else {}),
    )


def _worker_facts(loader: DataLoader[Any], dataset: Any) -> dict[str, Any]:
    return {
        "workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "persistent_workers": loader.persistent_workers,
        "prefetch_factor": loader.prefetch_factor,
        "dataset_set_epoch": callable(getattr(dataset, "set_epoch", None)),
    }


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
    return tuple(_describe(name, tensor) for name, tensor in _leaves(batch, "batch"))


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a batch's tensors."""
    return tuple(tuple(tensor.shape) for _, tensor in _leaves(batch, "batch"))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if not value.is_nested:  # such a tensor has no shape
            yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(each, f"{name}[{key!r}]")


def _describe(name: str, tensor: torch.Tensor) -> BatchTensor:
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


def model_facts(module: nn.Module, biases: dict[int, Site | None], sources: Sources) -> dict[str, Any]:
    """Return what the model is made of, as fields of ``Facts``.

    Args:
        module: The LightningModule.
        biases: The ids of biases that a batch norm was seen to take away, and where the layer was called.
        sources: Finds the lines that make the layers.
    """
    layers, parallel, convolutions = [], [], False
    for name, each in module.named_modules():
        if isinstance(each, _CONVOLUTIONS):
            convolutions = True
            layers.append(_part(module, name, sources, (each.in_channels, each.out_channels)))
        elif isinstance(each, nn.Linear):
            layers.append(_part(module, name, sources, (each.in_features, each.out_features)))
        elif isinstance(each, nn.DataParallel) and name:
            parallel.append(_part(module, name, sources))
    cancelled = [
        Part(
            name=path.removesuffix(".bias"), site=sources.layer(module, path.removesuffix(".bias")) or biases[id(bias)]
        )
        for path, bias in module.named_parameters()
        if id(bias) in biases
    ]
    return {
        "layers": tuple(layers),
        "data_parallel": tuple(parallel),
        "convolutions": convolutions,
        "biases": tuple(cancelled),
    }


def _part(module: nn.Module, name: str, sources: Sources, sizes: tuple[int, ...] = ()) -> Part:
    return Part(name=name, sizes=sizes, site=sources.layer(module, name))


def unused_parameters(trainer: Any, used: set[int], sources: Sources) -> tuple[Part, ...]:
    """Return the module's parameters that want a gradient and are not among ``used`` (their ids).

    Nothing is said where optimizers hold other tensors than the module's: masters take its gradients away early.
    """
    module: nn.Module = trainer.lightning_module
    own = {id(parameter) for parameter in module.parameters()}
    if any(id(p) not in own for each in trainer.optimizers for group in each.param_groups for p in group["params"]):
        return ()
    return tuple(
        _part(module, name, sources)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in used
    )


def optimizer_facts(trainer: Any, sources: Sources) -> tuple[OptimizerFacts, ...]:
    """Return the settings of the run's optimizers."""
    return tuple(
        OptimizerFacts(
            name=type(each).__name__,
            foreach=each.param_groups[0].get("foreach"),
            fused=each.param_groups[0].get("fused"),
            can_fuse="fused" in each.param_groups[0],
            parameters=sum(len(group["params"]) for group in each.param_groups),
            site=sources.call(type(trainer.lightning_module), "configure_optimizers", type(each).__name__),
        )
        for each in trainer.optimizers
    )


def scheduler_facts(trainer: Any, sources: Sources, batches: int | None) -> tuple[SchedulerFacts, ...]:
    """Return the settings of the run's learning-rate schedulers; ``batches`` are those of an epoch, if known."""
    found = []
    for config in trainer.lr_scheduler_configs:
        each: Any = config.scheduler
        cyclic = isinstance(each, CyclicLR)
        turn = int(each.total_size * each.step_ratio) if cyclic else None
        found.append(
            SchedulerFacts(
                name=type(each).__name__,
                interval=config.interval,
                length=each.total_steps - 1 if isinstance(each, OneCycleLR) else turn,
                turn=turn,
                steps=_scheduler_steps(trainer, config, batches),
                cycles_beta=cyclic and bool(each.cycle_momentum) and "betas" in each.optimizer.defaults,
                site=sources.call(type(trainer.lightning_module), "configure_optimizers", type(each).__name__),
            )
        )
    return tuple(found)


def count_epochs(trainer: Any, batches: int | None) -> int | None:
    """Return the epochs that the run may last, ``None`` if it has no such end."""
    by_steps = None
    if trainer.max_steps >= 0 and batches and trainer.lightning_module.automatic_optimization:
        by_steps = -(-trainer.max_steps // -(-batches // trainer.accumulate_grad_batches))
    return _least(trainer.max_epochs, by_steps)


def _scheduler_steps(trainer: Any, config: Any, batches: int | None) -> int | None:
    """Return the steps of a scheduler in the whole run at most.

    ``None`` if it is stepped by the epoch, by hand or without an end.
    """
    if config.interval != "step" or not trainer.lightning_module.automatic_optimization:
        return None
    together = trainer.accumulate_grad_batches  # batches of an optimizer step; the frequency counts batches, too
    by_epochs = None
    if _least(trainer.max_epochs) is not None and batches is not None:
        by_epochs = trainer.max_epochs * -(-batches // together)
    steps = _least(trainer.max_steps, by_epochs)
    return None if steps is None else -(-steps // (math.lcm(together, config.frequency) // together))


def _least(*ends: int | None) -> int | None:
    """The least of some ends of a run, of which ``None`` and -1 are none."""
    return min((each for each in ends if each is not None and each >= 0), default=None)


def setting_sites(sources: Sources, module: type, names: Iterable[str] = _SETTINGS) -> dict[str, Site]:
    """Return where the user's code sets the settings that rules speak of."""
    found = {name: sources.setting(*_SETTINGS[name]) for name in names}
    found["inference_mode"] = sources.setting("inference_mode", off=True)
    found["validation"] = sources.call(module, "validation_step", "enable_grad", "set_grad_enabled")
    return {key: site for key, site in found.items() if site is not None}
