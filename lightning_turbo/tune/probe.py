"""What goes into the first Trainer of a script: the settings, and a probe that counts its steps and ends it.

The script is not edited and no class of Lightning is patched. Lightning asks the entry point in ``doctor.script`` for
callbacks while it constructs a Trainer; at that moment the settings are applied, as the Trainer's arguments would be.
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

import lightning_turbo
from lightning_turbo._lightning import Callback, MixedPrecision, Precision, Trainer
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo._trainer import replace_strategy, supports_lean_loop
from lightning_turbo.doctor.callback import Doctor
from lightning_turbo.doctor.ending import end_program
from lightning_turbo.doctor.facts import Facts
from lightning_turbo.measure import RoundTimer
from lightning_turbo.tune.endless import Endless
from lightning_turbo.tune.muted import Muted

__all__ = [
    "LookingProbe",
    "Probe",
    "apply_settings",
    "change_loader",
    "look_of",
    "period_of",
    "trainer_in_construction",
]

STRATEGIES = ("SingleDeviceStrategy", "TurboStrategy", "DDPStrategy")
REPLACED = ("SingleDeviceStrategy", "DDPStrategy")  # the strategies in whose place another one may be put
VALIDATION = ("validation start", "validation", "metrics")  # parts of a fit


class Probe(Callback):
    """Counts the steps of ``fit``, in turns with other processes, and ends the script after the last one.

    A turn lasts from the end of one batch to that of another one: what lies between them is in it, with validations and
    borders between epochs. Where the training would end, it starts over (``Endless``).

    ``worker.measure_program`` creates a probe for each Trainer of the script; the first Trainer that runs starts it. It
    ends itself, together with the process, after the last measured step or after an error. It is the first callback of
    its Trainer, and no step includes the time during which it waits for its turn.

    Args:
        timer: Counts and times the steps.
        task: What ``ScriptRunner`` sends: ``settings``, and a ``folder`` for files that a script writes by Lightning.
    """

    def __init__(self, timer: RoundTimer, task: Mapping[str, Any]) -> None:
        self.timer = timer
        self.task = task
        self.muted = Muted(task["folder"])
        self.found: dict[str, Any] | None = None  # what is reported; None before the last step
        self.refusal = ""
        self.error: BaseException | None = None  # ended fit, or prevented the settings from being applied
        self._begun = False
        self._waited = False

    def refuse(self, reason: str) -> None:
        """End the script because it cannot be measured."""
        self.refusal = reason
        end_program()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """End the script on an error inside the block, because the script's own handlers might save its state."""
        try:
            yield
        except Exception as error:
            self.on_exception(None, None, error)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the script, as its first callback, before any of its handlers learns of the error."""
        self.error = exception if isinstance(exception, Exception) else None
        traceback.print_exception(exception)
        end_program(1)

    def prepare(self, trainer: Any) -> list[Callback]:
        """Apply the settings to a Trainer under construction, and return what goes into its callbacks."""
        settings = self.task["settings"]
        old = trainer.strategy
        name, devices = type(old).__name__, len(getattr(old, "parallel_devices", None) or [old.root_device])
        # Checked before it starts processes for further ranks.
        if name not in STRATEGIES or devices != 1:
            expected = "one device with the default strategy, 'turbo' or 'ddp'"
            self.refuse(f"its Trainer has strategy {name} and {devices} devices; expected {expected}.")
        made = apply_settings(trainer, settings)

        def begin(set_up: Callable[[], None]) -> None:
            # A learning rate search runs without the script's callbacks, and without the probe.
            if self in trainer.callbacks and not self._begun:
                self._begun = True
                self.begin(trainer)
            set_up()

        ReplacedMethod(trainer.strategy, "setup_environment", begin)  # a run calls this first
        return [*made, self]

    def begin(self, trainer: Any) -> None:
        """Mute a run, and receive all its events first."""
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]
        self.muted.mute(trainer)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait for this process's turn."""
        self._wait(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait for this process's turn, and make ``fit`` endless."""
        self._wait(trainer)
        gc.collect()  # what was left by the set-up, a full collection of which takes longer than some steps
        Endless(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch."""
        self._step()

    def _wait(self, trainer: Any) -> None:
        """Wait, in a step that does not count, for this process's turn; other processes start meanwhile."""
        self.timer.device = trainer.strategy.root_device
        if not self._waited and trainer.state.fn == "fit":
            self._waited = True
            self._step()

    def _step(self) -> None:
        """Count a step, and end the script after the last one."""
        if not self.timer.step():
            self.found = {}
            end_program()  # no further code of the script runs


class LookingProbe(Probe):
    """Looks at the script as it is with a Doctor, until the end of an epoch if that is near, and ends it."""

    def begin(self, trainer: Any) -> None:
        """Mute a run; the Doctor comes before any that the script has."""
        super().begin(trainer)
        self.trainer = trainer
        trainer.callbacks = [self, _EndingDoctor(self, self.task["look"] / 60), *trainer.callbacks[1:]]

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Nothing is waited for."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note when the training begins."""
        self.trains = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Steps are the Doctor's to count."""


class _EndingDoctor(Doctor):
    """A Doctor that ends the script with its report."""

    def __init__(self, probe: LookingProbe, minutes: float) -> None:
        super().__init__(minutes=minutes, stop=True)
        self.probe = probe

    def complete(self, why: str = "", may_end: bool = True) -> None:
        """Report, note what candidates need, and end the script, however much of it was seen."""
        with self.probe.failing():
            super().complete(why, may_end=False)
            facts = None if self.report is None else self.report.facts
            if facts is None or not facts.timed:
                self.probe.refuse("no step was timed before the time was over. Give it more time with --minutes.")
            else:
                trained = time.perf_counter() - self.probe.trains
                self.probe.found = {**look_of(self.probe.trainer, facts), "trained": trained}
        end_program()


def look_of(trainer: Any, facts: Facts) -> dict[str, Any]:
    """Return the fields of ``candidates.Look``."""
    fit, run = facts.fit, facts.run
    batches = fit.batches if fit.is_epoch else None if run.batches == math.inf else int(run.batches)
    period = None if batches is None else period_of(trainer, batches, run.epochs)
    return {
        "phases": facts.phases,
        "device": run.device.partition(":")[0],
        "lacks": _lacks(trainer, facts),
        "accumulate": int(run.accumulate),
        "workers": facts.loader.workers,
        "draws": None if facts.loader.workers else facts.loader.loading_draws,
        "batches": batches,
        "period": period,
        "seconds": 0.0 if period is None or batches is None else _seconds(facts, batches, period),
        "is_seen": fit.is_epoch,
    }


def period_of(trainer: Any, batches: int, epochs: float) -> int:
    """Return after how many batches training and validation repeat themselves."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if loop._combined_loader is None or loop.skip:
        return batches
    every = trainer.check_val_every_n_epoch
    if every is None:  # validates after so many batches, in whichever epoch
        return max(batches, int(min(trainer.val_check_batch, batches * epochs)))
    return batches * every if every <= epochs else batches


def _seconds(facts: Facts, batches: int, period: int) -> float:
    """Return what a period takes: an epoch that was seen, with its validations, or its steps."""
    fit = facts.fit
    if not fit.is_epoch:
        return period * facts.step
    validation = fit.of(*VALIDATION)
    if period == batches or not fit.validations:
        return fit.of() * period / batches
    return (fit.of() - validation) * period / batches + validation / fit.validations


def _lacks(trainer: Any, facts: Facts) -> list[str]:
    """Return the keys of ``candidates.NEEDS`` that script and machine do not fulfil."""
    loader, strategy = facts.loader, trainer.strategy
    weights = trainer.lightning_module.parameters()
    has = {
        "dataloader": loader.standard,
        "no thread": not loader.prefetches,
        "new workers": loader.workers > 0 and not loader.persistent_workers,
        "not pinned": not loader.pin_memory,
        # Options that a script passes to DDP, such as find_unused_parameters, would be lost in another strategy.
        "own strategy": type(strategy).__name__ in REPLACED and not getattr(strategy, "_ddp_kwargs", {}),
        # A plugin of another class also sets the precision, whatever its name.
        "own precision": type(trainer.precision_plugin) is Precision,
        "float32 weights": all(weight.dtype is not torch.float64 for weight in weights),
        "optimizer": any(each.can_fuse for each in facts.optimizers),
        "Lightning 2.6": supports_lean_loop(),
        "compiler": facts.cuda or shutil.which(os.environ.get("CXX", "c++")),
        "convolutions": facts.convolutions,
        "cuda": facts.cuda,
        "cpu": not facts.cuda,
    }
    return [need for need, there in has.items() if not there]


def apply_settings(trainer: Any, settings: Mapping[str, Any]) -> list[Callback]:
    """Apply settings to a Trainer under construction, as its arguments would be.

    Args:
        trainer: The Trainer.
        settings: Fields of ``candidates.Settings`` with their values; the environment is not for this function.

    Returns:
        The callbacks to add to it.
    """
    old = trainer.strategy
    if settings["strategy"]:
        place = {"accelerator": old.accelerator, "device": old.root_device}
        new = lightning_turbo.TurboStrategy(**place, **settings["strategy"])
        new.precision_plugin = old.precision_plugin
        replace_strategy(trainer, new)
    strategy = trainer.strategy
    if settings["precision"]:
        strategy.precision_plugin = MixedPrecision(settings["precision"], strategy.root_device.type)
    if settings["opt_level"]:
        strategy.precision_plugin = lightning_turbo.ApexAMP(settings["opt_level"])
    if settings["loader"]:

        def process(given: Callable[[Any], Any], loader: Any) -> Any:
            return given(change_loader(loader, settings["loader"]))

        ReplacedMethod(strategy, "process_dataloader", process)
    return [getattr(lightning_turbo, name)(**given) for name, given in settings["callbacks"].items()]


def change_loader(loader: Any, settings: Mapping[str, Any]) -> Any:
    """Give a DataLoader other arguments, before anyone iterates it; any other loader stays as it is."""
    if not isinstance(loader, DataLoader):
        return loader
    number = settings.get("num_workers", loader.num_workers)
    given = {"prefetch_factor": loader.prefetch_factor or 2, **settings} if number else settings
    for name, value in given.items():
        if number or name != "persistent_workers":  # which needs workers
            vars(loader)[name] = value  # like torch's constructor; some cannot be set later
    return loader


def trainer_in_construction() -> Any:
    """Return the Trainer whose constructor is running; Lightning calls entry points without passing it."""
    frame = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer):
            return frame.f_locals["self"]
        frame = frame.f_back
    raise RuntimeError("No Trainer is under construction: this version of Lightning calls its entry points elsewhere.")
