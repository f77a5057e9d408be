"""Record of one level: losses, accuracy, time and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_turbo._lightning import Callback, LightningModule, Trainer
from lightning_turbo.plugins.apex_amp import ApexAMP

__all__ = ["RunHistory", "training_bytes"]

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
    """Record a training whose epochs are runs of their own. Losses stay on the device until the end of an epoch.

    Args:
        samples: Training samples per epoch.

    Note:
        The time of an epoch is measured from its first batch to its last, without validation and checkpoints. On CUDA
        the device is synchronised before and after. An interrupted epoch is not recorded.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.step_losses: list[float] = []
        self.val_accuracies: list[float] = []
        self.epoch_seconds: list[float] = []
        self.loss_scale = 1.0
        self.skipped_steps = 0
        self.bytes: dict[str, int] = {}
        self._pending: list[Tensor] = []
        self._started = 0.0
        self._seconds = 0.0
        self._steps_seen = 0

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
        self.val_accuracies.append(float(trainer.callback_metrics["val_accuracy"]))
        if isinstance(plugin := trainer.precision_plugin, ApexAMP):
            self.loss_scale = plugin.loss_scale
            self.skipped_steps += plugin.skipped_steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
