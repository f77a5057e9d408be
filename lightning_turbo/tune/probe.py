"""What is put into the first Trainer of a script: the settings, and a probe that counts its steps and ends it.

The script is not edited and nothing of Lightning is patched. Lightning asks the entry point of ``doctor.script`` for
callbacks while it constructs a Trainer; at that moment the settings are put into it, as its arguments would be.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

import lightning_turbo
from lightning_turbo._lightning import (
    Callback,
    DDPStrategy,
    DummyLogger,
    MixedPrecision,
    Precision,
    TorchElasticEnvironment,
    Trainer,
)
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo._trainer import combined_loader, replace_strategy, supports_lean_loop
from lightning_turbo.callbacks.fused_optimizers import can_fuse
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.doctor.ending import end_program
from lightning_turbo.measure import Meter, huge_pages
from lightning_turbo.nn.bias import LAYERS, NORMS
from lightning_turbo.nn.memory_format import has_format
from lightning_turbo.tune.pipeline import MovedAugmentation, describe_packing, describe_random_part

__all__ = ["Probe", "WholeEpoch", "prepare_trainer", "trainer_in_construction"]

LOSSES = 400  # of the first steps, to compare
# Callbacks, by the name of their class or of one that it inherits, that write, draw, search or stop.
UNWANTED = {
    *("BatchSizeFinder", "Checkpoint", "DeviceStatsMonitor", "EarlyStopping", "LearningRateFinder"),
    *("LearningRateMonitor", "ModelSummary", "ProgressBar", "SaveConfigCallback", "Timer"),
}
STRATEGIES = ("SingleDeviceStrategy", "TurboStrategy")
STRATEGIES_OF_RANKS = ("SingleDeviceStrategy", "DDPStrategy")


class Repeat:
    """The first batch of a loader again and again, in epochs of the same length."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self.batches = self.batches or [next(iter(self.loader))]
        return itertools.cycle(self.batches)

    def __len__(self) -> int:
        return len(self.loader)


class Probe(Callback):
    """Counts the steps of ``fit``, with one batch again and again, or of the loader alone; and ends the script."""

    def __init__(self, meter: Meter, mode: str) -> None:
        self.meter = meter
        self.mode = mode
        self.losses: list[Tensor] = []
        self.facts: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}  # what else is reported
        self.refusal = ""
        self.error: BaseException | None = None  # ended fit, or kept the settings out of the Trainer

    def refuse(self, reason: str) -> None:
        """End the script, because it cannot be measured."""
        self.refusal = reason
        end_program()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """End the script at an error within the block; the script's own handlers might save what it has."""
        try:
            yield
        except Exception as error:
            self.on_exception(None, None, error)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the script, as the first of its callbacks, before any handler of it hears of the error."""
        self.error = exception if isinstance(exception, Exception) else None
        traceback.print_exception(exception)
        end_program(1)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let ``fit`` go on for as long as is measured, in this process's turn; schedules have an end, and wait."""
        trainer.fit_loop.max_epochs = -1
        trainer.fit_loop.epoch_loop.max_steps = -1
        if pl_module.automatic_optimization:
            trainer.strategy.lr_scheduler_configs = []
        self.meter.device = trainer.strategy.root_device
        self.facts = describe(trainer, pl_module)
        self.numbers["batches"] = describe_batches(trainer)
        self.step()  # that is none: it waits for the turn, as nothing is computed beside processes that start
        if self.mode == "loader":
            loader = combined_loader(trainer)
            self.facts["packing"] = describe_packing(loader.flattened[0])
            self.load(loader)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if len(self.losses) < LOSSES and isinstance(loss, Tensor) and loss.numel() == 1:
            self.losses.append(loss.detach().clone())
        self.step()

    def load(self, loader: Any) -> None:
        """Count batches, epoch after epoch."""
        while True:
            for _ in loader:
                self.step()

    def step(self) -> None:
        """Count a step, and end the script after the last one."""
        if not self.meter.step():
            end_program()  # nothing of the script runs any more


class WholeEpoch(Probe):
    """Takes the time of one epoch, as the script trains and validates it, from the set-up of ``fit`` to its end."""

    def __init__(self, meter: Meter, mode: str) -> None:
        super().__init__(meter, mode)
        self.numbers["steps_seconds"] = 0.0
        self._begun = self._last = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start the clock."""
        self._begun = time.perf_counter()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let ``fit`` go on for one epoch; schedules are made, and keep the length that the script gave them."""
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        self.meter.device = trainer.strategy.root_device
        self.facts = describe(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add the time since the step before: the first one, in which workers start, is not of the steps."""
        now = time.perf_counter()
        self.numbers["steps_seconds"] += now - self._last if batch_idx else 0.0
        self._last = now

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the time of a validation out of the steps."""
        self._last = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the time and what was logged, and end the script before its callbacks hear of the end."""
        self.meter.synchronise()
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        self.numbers |= {"seconds": time.perf_counter() - self._begun, "metrics": metrics}
        self.meter.over = True
        end_program()


def describe(trainer: Any, module: Any) -> dict[str, Any]:
    """Return the fields of ``Facts`` that need no measurement, and how many batches make a step."""
    loader = combined_loader(trainer).flattened[0]
    loader = loader.loader if isinstance(loader, Repeat) else loader
    device, batches = trainer.strategy.root_device.type, trainer.num_training_batches
    has = {
        "dataloader": isinstance(loader, DataLoader),
        "no thread": not isinstance(loader, PrefetchLoader),
        # What a script tells DDP, as to find unused parameters, would be lost in another one.
        "own strategy": type(trainer.strategy).__name__ in STRATEGIES_OF_RANKS
        and not getattr(trainer.strategy, "_ddp_kwargs", {}),
        # A plugin of another class sets the precision too, whatever it is called.
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
        "num_workers": getattr(loader, "num_workers", 0),
        "batches": int(batches) if batches != float("inf") else None,
        "lacks": [need for need, there in has.items() if not there],
        "accumulate": int(trainer.accumulate_grad_batches),
        "random_part": describe_random_part(getattr(loader, "dataset", None)),
    }


def describe_batches(trainer: Any) -> dict[str, Any]:
    """Return what the size of a batch depends on: the script's, the samples of an epoch, and the optimizers."""
    loader = combined_loader(trainer).flattened[0]
    sampler: Any = getattr(loader, "batch_sampler", None)
    return {
        "size": getattr(sampler, "batch_size", None),
        "drop_last": getattr(sampler, "drop_last", False),
        "samples": len(sampler.sampler) if isinstance(getattr(sampler, "sampler", None), Sized) else None,
        "optimizers": sorted({type(optimizer).__name__ for optimizer in trainer.optimizers}),
    }


def describe_network(module: nn.Module) -> dict[str, bool]:
    """Return what the network has that a candidate changes."""
    parts = list(module.modules())
    biased = any(isinstance(part, LAYERS) and part.bias is not None for part in parts)
    return {
        "convolutions": has_format(module),
        "norms": biased and any(isinstance(part, NORMS) for part in parts),
        "float32 weights": all(weight.dtype is not torch.float64 for weight in module.parameters()),
    }


def trainer_in_construction() -> Any:
    """Return the Trainer whose constructor is running; Lightning calls its entry points without it."""
    frame = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer):
            return frame.f_locals["self"]
        frame = frame.f_back
    raise RuntimeError("No Trainer is under construction: this version of Lightning calls its entry points elsewhere.")


def replace_in_construction(trainer: Any, options: Mapping[str, Any], ranks: int, probe: Probe) -> None:
    """Give a Trainer in construction a turbo strategy if there are options for it, and DDP on several ranks."""
    old = trainer.strategy
    name, devices = type(old).__name__, len(getattr(old, "parallel_devices", None) or [old.root_device])
    # Before it starts the processes of further ranks.
    if name not in (STRATEGIES if ranks == 1 else STRATEGIES_OF_RANKS) or devices not in (1, ranks):
        expected = "one device and the default strategy, or 'turbo', or 'ddp' with its number of devices as --ranks"
        probe.refuse(f"its Trainer has strategy {name} and {devices} devices; expected {expected}.")
    if ranks > 1 and (options or name != "DDPStrategy"):
        kind, placed = (lightning_turbo.TurboDDPStrategy if options else DDPStrategy), old.root_device
        where = [placed if placed.type == "cpu" else torch.device(placed.type, rank) for rank in range(ranks)]
        place = {"parallel_devices": where, "cluster_environment": TorchElasticEnvironment()}
    elif options:
        kind, place = lightning_turbo.TurboStrategy, {"device": old.root_device}
    else:
        return
    new: Any = kind(accelerator=old.accelerator, **place, **options)
    new.precision_plugin = old.precision_plugin
    replace_strategy(trainer, new)


def resize(loader: Any, batch_size: int, probe: Probe) -> Any:
    """Give a loader batches of another size."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    if type(sampler) is not BatchSampler:
        probe.refuse("its training loader has no BatchSampler of torch; expected a DataLoader with a batch_size.")
    sampler.batch_size = batch_size
    return loader


def prepare_trainer(trainer: Any, task: Mapping[str, Any], probe: Probe) -> list[Callback]:
    """Put the settings of a task into a Trainer in construction, and silence it when it begins to run."""
    settings = task["settings"]
    replace_in_construction(trainer, settings["strategy"], task["ranks"], probe)
    strategy = trainer.strategy
    if settings["precision"]:
        strategy.precision_plugin = MixedPrecision(settings["precision"], strategy.root_device.type)
    if settings["opt_level"]:
        strategy.precision_plugin = lightning_turbo.ApexAMP(settings["opt_level"])

    def begin_silently(set_up: Callable[[], None]) -> None:
        begun.put_back()
        silence(trainer, probe)
        set_up()

    begun = ReplacedMethod(strategy, "setup_environment", begin_silently)  # which a run calls first
    if settings["augment_batches"]:
        MovedAugmentation(trainer, strategy)
    if size := task["batch_size"]:
        ReplacedMethod(strategy, "process_dataloader", lambda process, loader: process(resize(loader, size, probe)))
    if probe.mode == "one batch":
        ReplacedMethod(strategy, "process_dataloader", lambda process, loader: Repeat(process(loader)))
    return [getattr(lightning_turbo, name)(**arguments) for name, arguments in settings["callbacks"].items()]


def silence(trainer: Any, probe: Probe) -> None:
    """Let a run write nothing, and validate only in a whole epoch; the probe hears of everything first."""
    trainer.loggers = [DummyLogger()] if trainer.loggers else []
    classes = [
        (each, {kind.__name__ for kind in type(each).__mro__}) for each in trainer.callbacks if each is not probe
    ]
    trainer.callbacks = [probe, *(each for each, names in classes if not UNWANTED & names)]
    if probe.mode != "epoch":
        trainer.num_sanity_val_steps = 0
        trainer.limit_val_batches = 0
