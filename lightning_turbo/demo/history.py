"""Record of one level: losses, accuracy, time and memory, saved in checkpoints."""

from __future__ import annotations

import copy
import pickle
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_turbo._lightning import Callback, LightningModule, Trainer
from lightning_turbo.demo.settings import DemoError
from lightning_turbo.plugins.apex_amp import ApexAMP

__all__ = ["RunHistory", "past_history", "training_bytes"]

KEPT = (
    "bytes",
    "epoch_seconds",
    "half_dtype",
    "loss_scale",
    "peak_device_bytes",
    "skipped_steps",
    "step_losses",
    "val_accuracies",
    "val_losses",
)
MEASURED_STEPS = 3  # the optimizer's state exists before the second step


def training_bytes(parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> dict[str, int]:
    """Count the bytes of weights, gradients and optimizer state, each storage once.

    Args:
        parameters: Parameters of the model. Other parameters of an optimizer, such as float32 masters, count as
            weights too.
        optimizers: Optimizers of the parameters.

    Returns:
        Current bytes under ``"weights"``, ``"gradients"`` and ``"optimizer_state"``.
    """
    optimizers = list(optimizers)
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    weights = {id(p): p for p in (*parameters, *held)}.values()
    states = [values for optimizer in optimizers for values in optimizer.state.values()]
    return {
        "weights": _bytes(weights),
        "gradients": _bytes(p.grad for p in weights),
        "optimizer_state": _bytes(value for values in states for value in values.values()),
    }


def _bytes(values: Iterable[Any]) -> int:
    """Count the bytes of the tensors among the values."""
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class RunHistory(Callback):
    """Record a training run. Losses stay on the device until the end of the epoch, to avoid synchronisation.

    Args:
        samples: Training samples per epoch.

    Note:
        The time of an epoch is measured from its first batch to its last, without validation and checkpoints. On CUDA
        the device is synchronised before and after. An interrupted epoch is not recorded.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.step_losses: list[float] = []
        self.val_losses: list[float] = []
        self.val_accuracies: list[float] = []
        self.epoch_seconds: list[float] = []
        self.half_dtype: str | None = None
        self.loss_scale = 1.0
        self.skipped_steps = 0
        self.bytes: dict[str, int] = {}
        self.peak_device_bytes: int | None = None
        self._pending: list[Tensor] = []
        self._started = 0.0
        self._seconds = 0.0
        self._steps_seen = 0
        self._skipped_before = 0

    @property
    def epochs(self) -> int:
        """Number of complete epochs."""
        return len(self.epoch_seconds)

    @property
    def seconds_per_epoch(self) -> float | None:
        """Median time of an epoch. The first epoch is a warm-up: it counts only if it is the only one."""
        return statistics.median(self.epoch_seconds[1:] or self.epoch_seconds) if self.epoch_seconds else None

    @property
    def samples_per_second(self) -> float | None:
        """Training samples per second of the median epoch."""
        seconds = self.seconds_per_epoch
        return self.samples / seconds if seconds else None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the peak memory of the device."""
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._pending = []
        _wait(pl_module.device)
        self._started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count bytes at their peak: all gradients exist, those of masters too, and none is released yet."""
        if self._steps_seen < MEASURED_STEPS:
            self._steps_seen += 1
            now = training_bytes(pl_module.parameters(), trainer.optimizers)
            self.bytes = max(self.bytes, now, key=lambda found: sum(found.values()))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Store the loss, and stop the clock after the last batch."""
        self._pending.append(outputs["loss"].detach())
        if trainer.is_last_batch:
            _wait(pl_module.device)
            self._seconds = time.perf_counter() - self._started

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the results of the epoch from the device."""
        self.epoch_seconds.append(self._seconds)
        self.step_losses += torch.stack(self._pending).float().tolist()
        self.val_losses.append(float(trainer.callback_metrics["val_loss"]))
        self.val_accuracies.append(float(trainer.callback_metrics["val_accuracy"]))
        if isinstance(plugin := trainer.precision_plugin, ApexAMP):
            self.half_dtype = None if plugin.opt_level == "O0" else str(plugin.half_dtype).removeprefix("torch.")
            self.loss_scale = plugin.loss_scale
            self.skipped_steps = self._skipped_before + plugin.skipped_steps
        if pl_module.device.type == "cuda":
            self.peak_device_bytes = max(self.peak_device_bytes or 0, torch.cuda.max_memory_allocated(pl_module.device))

    def state_dict(self) -> dict[str, Any]:
        """Return the record as plain Python values."""
        return {name: getattr(self, name) for name in KEPT}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the record of an earlier run."""
        for name in KEPT:
            setattr(self, name, copy.copy(state_dict[name]))
        self._skipped_before = self.skipped_steps


def past_history(checkpoint: Path) -> dict[str, Any]:
    """Read the record of a ``RunHistory`` from a checkpoint, without building a model.

    Raises:
        DemoError: If the file cannot be read as a checkpoint of the demo.
    """
    try:
        return torch.load(checkpoint, map_location="cpu", weights_only=True)["callbacks"][RunHistory.__qualname__]
    except (OSError, EOFError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise DemoError(
            f"checkpoint: expected one of the demo, got {str(checkpoint)!r}, which cannot be read "
            f"({type(error).__name__}). Delete it to train its level again."
        ) from error


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
