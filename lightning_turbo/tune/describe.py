"""Describes a Trainer before its training begins: its loader, its network, and the length of its epochs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sized
from typing import Any

import torch
from torch import nn

from lightning_turbo._lightning import Precision
from lightning_turbo._trainer import combined_loader, supports_lean_loop
from lightning_turbo.callbacks.fused_optimizers import can_fuse
from lightning_turbo.doctor.loaders import describe_loader
from lightning_turbo.measure import huge_pages
from lightning_turbo.nn.bias import LAYERS, NORMS
from lightning_turbo.nn.memory_format import has_format
from lightning_turbo.tune.pipeline import describe_random_part

__all__ = ["STRATEGIES_OF_RANKS", "describe", "describe_batches", "describe_epoch", "describe_network"]

STRATEGIES_OF_RANKS = ("SingleDeviceStrategy", "DDPStrategy")


def describe(trainer: Any, module: Any) -> dict[str, Any]:
    """Return the fields of ``Baseline`` that need no measurement, and the number of batches per step."""
    loader = _training_loader(trainer)
    device = trainer.strategy.root_device.type
    loading = describe_loader(loader)
    has = {
        "dataloader": loading.standard,
        "no thread": not loading.prefetches,
        "new workers": loading.workers > 0 and not loading.persistent_workers,
        "not pinned": not loading.pin_memory,
        # Options that a script passes to DDP, such as find_unused_parameters, would be lost in another strategy.
        "own strategy": type(trainer.strategy).__name__ in STRATEGIES_OF_RANKS
        and not getattr(trainer.strategy, "_ddp_kwargs", {}),
        # A plugin of another class also sets the precision, whatever its name.
        "own precision": type(trainer.precision_plugin) is Precision,
        "automatic": module.automatic_optimization,
        "optimizer": any(can_fuse(optimizer) for optimizer in trainer.optimizers),
        "Lightning 2.6": supports_lean_loop(),
        "compiler": device == "cuda" or shutil.which(os.environ.get("CXX", "c++")),
        "huge pages": huge_pages() == "madvise",
        "cuda": device == "cuda",
        "cpu": device == "cpu",
        **describe_network(module),
    }
    return {
        "device": device,
        "num_workers": loading.workers,
        **describe_epoch(trainer, _whole(trainer.num_training_batches)),
        "lacks": [need for need, there in has.items() if not there],
        "accumulate": int(trainer.accumulate_grad_batches),
        "random_part": describe_random_part(getattr(loader, "dataset", None)),
    }


def describe_epoch(trainer: Any, batches: int | None) -> dict[str, Any]:
    """Return the fields of ``Baseline`` that depend on how many batches an epoch has; ``None`` is not known."""
    return {
        "batches": batches,
        "epochs": _epochs(trainer, batches),
        "validations": _validations(trainer, batches),
    }


def describe_batches(trainer: Any) -> dict[str, Any]:
    """Return what depends on the batch size: the script's size, the samples per epoch, and the optimizers."""
    sampler: Any = getattr(_training_loader(trainer), "batch_sampler", None)
    return {
        "size": getattr(sampler, "batch_size", None),
        "drop_last": getattr(sampler, "drop_last", False),
        "samples": len(sampler.sampler) if isinstance(getattr(sampler, "sampler", None), Sized) else None,
        "optimizers": sorted({type(optimizer).__name__ for optimizer in trainer.optimizers}),
    }


def describe_network(module: nn.Module) -> dict[str, bool]:
    """Return the features of the network that candidates change."""
    parts = list(module.modules())
    biased = any(isinstance(part, LAYERS) and part.bias is not None for part in parts)
    return {
        "convolutions": has_format(module),
        "norms": biased and any(isinstance(part, NORMS) for part in parts),
        "float32 weights": all(weight.dtype is not torch.float64 for weight in module.parameters()),
    }


def _training_loader(trainer: Any) -> Any:
    """Return the script's first training loader, even if the probe repeats one of its batches."""
    loader = combined_loader(trainer).flattened[0]
    return getattr(loader, "repeated", loader)


def _whole(number: float) -> int | None:
    return int(number) if number != float("inf") else None


def _epochs(trainer: Any, batches: int | None) -> float | None:
    """Return the number of epochs that the script trains, or ``None`` if something else ends it."""
    if trainer.max_steps > 0 and batches:
        of_steps = trainer.max_steps * trainer.accumulate_grad_batches / batches
        return min(of_steps, trainer.max_epochs) if trainer.max_epochs and trainer.max_epochs > 0 else of_steps
    return trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else None


def _validations(trainer: Any, batches: int | None) -> float:
    """Return the mean number of validations per epoch."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    every = trainer.val_check_batch
    if loop._combined_loader is None or loop.skip:
        return 0.0
    if every is None or every == float("inf") or batches is None:  # by wall-clock time, or unknown length
        return 1.0
    if trainer.check_val_every_n_epoch is None:
        return batches / every
    return (batches // every) / trainer.check_val_every_n_epoch
