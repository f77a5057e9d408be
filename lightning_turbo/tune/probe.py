"""What goes into the first Trainer of a script: the settings, and a probe that counts its steps and ends it.

The script is not edited and no class of Lightning is patched. Lightning asks the entry point in ``doctor.script`` for
callbacks while it constructs a Trainer; at that moment the settings are applied, as the Trainer's arguments would be.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler

import lightning_turbo
from lightning_turbo._lightning import (
    Callback,
    DDPStrategy,
    MixedPrecision,
    TorchElasticEnvironment,
    Trainer,
    bound_name,
)
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo._trainer import combined_loader, replace_strategy
from lightning_turbo.doctor.ending import end_program
from lightning_turbo.measure import RoundTimer
from lightning_turbo.tune.describe import STRATEGIES_OF_RANKS, describe, describe_batches, describe_epoch
from lightning_turbo.tune.endless import Endless
from lightning_turbo.tune.muted import Muted
from lightning_turbo.tune.pipeline import MovedAugmentation, describe_packing
from lightning_turbo.tune.validation import TimedValidation

__all__ = ["PhaseProbe", "Probe", "WholeEpoch", "prepare_trainer", "trainer_in_construction"]

LOSSES = 400  # of the first steps, for comparison
STRATEGIES = ("SingleDeviceStrategy", "TurboStrategy", "DDPStrategy")
BORDER_SECONDS = 3.0  # of steps until the end of an epoch of unknown length


class Repeat:
    """Repeats the first batch of a loader, in epochs of the same length; other attributes are the loader's."""

    def __init__(self, loader: Any) -> None:
        self.repeated = loader
        self.batches: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self.batches = self.batches or [next(iter(self.repeated))]
        return itertools.cycle(self.batches)

    def __len__(self) -> int:
        return len(self.repeated)

    def __getattr__(self, name: str) -> Any:
        """Return the loader's own attribute, which a script may read."""
        # While a copy is made, it has no loader yet.
        if name == "repeated":
            raise AttributeError(name)
        return getattr(self.repeated, name)


class Probe(Callback):
    """Counts the steps of ``fit``, with one repeated batch, or of the loader alone, and ends the script.

    A step is the time between the ends of two batches. If an epoch ends in between, it is a border instead: the end of
    the epoch with its hooks, the start of loading, and the first batch. Borders and validations are timed separately,
    so that an epoch can be composed of its parts. If Lightning does not know the number of batches, as of a generator
    that runs the trained policy, completed epochs determine it.

    ``worker.measure_program`` creates a probe for each Trainer of the script; the first Trainer that runs starts it. It
    ends itself, together with the process, after the last measured step or after an error. It is the first callback of
    its Trainer, and no step includes the time during which it waits for its turn.

    It collects garbage before the first measured step and before a border. A full collection takes some tenths of a
    second, once in many steps: it would be in the only border that one setting measures, and not in that of another.

    Args:
        timer: Counts and times the steps.
        mode: The mode of the configuration.
        folder: Folder for files that a script writes through Lightning.
    """

    def __init__(self, timer: RoundTimer, mode: str, folder: str = "") -> None:
        self.timer = timer
        self.mode = mode
        self.muted = Muted(folder)
        self.validation: TimedValidation | None = None  # set when the run begins
        self.losses: list[Tensor] = []
        self.facts: dict[str, Any] = {}
        self.borders: list[float] = []  # seconds
        self.numbers: dict[str, Any] = {}  # further reported values
        self.counts_borders = False  # whether borders count as steps
        self._lengths: list[int] = []  # batches of completed epochs, if Lightning does not know their number
        self._gives_up = math.inf  # when to stop waiting for a border
        self._goes_to_border = False
        self.refusal = ""
        self.error: BaseException | None = None  # ended fit, or prevented the settings from being applied
        self._waited = False
        self._is_first = False  # whether the batch is the first one of a later epoch
        self._was_first = False  # whether the previous batch was
        self._ended = 0.0  # when the previous batch ended

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

    def begin(self, trainer: Any) -> None:
        """Mute a run, and receive all its events first."""
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]
        self.muted.mute(trainer)
        loop = trainer.fit_loop.epoch_loop.val_loop
        self.validation = TimedValidation(loop, self.timer, whole=self.mode == "epoch")

    def found(self) -> dict[str, Any]:
        """Return what is reported."""
        validation = self.validation
        return {
            "facts": self.facts,
            "losses": [loss.item() for loss in self.losses],
            "borders": self.borders,
            "validations": [] if validation is None else validation.seconds or validation.sanity,
            **self.numbers,
        }

    def wait(self, trainer: Any) -> None:
        """Wait, in a step that does not count, for this process's turn; other processes start meanwhile."""
        self.timer.device = trainer.strategy.root_device
        if not self._waited and trainer.state.fn == "fit":
            self._waited = True
            self.step()

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait for this process's turn."""
        self.wait(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait for this process's turn, and make ``fit`` endless."""
        self.wait(trainer)
        gc.collect()
        Endless(trainer)
        self.facts = describe(trainer, pl_module)
        self.numbers["lightning"] = bound_name()
        self.numbers["batches"] = describe_batches(trainer)
        if self.mode == "loader":
            loader = combined_loader(trainer)
            self.facts["packing"] = describe_packing(loader.flattened[0])
            self.load(loader)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note that the next batch is the first one of its epoch."""
        # If every epoch has one batch, a step includes its border.
        self._is_first = self._ended > 0.0 and trainer.num_training_batches > 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Count the batches of an epoch if Lightning does not know their number."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if trainer.num_training_batches == math.inf and progress.is_last_batch:
            self._lengths.append(progress.current.ready)
            self.facts |= describe_epoch(trainer, round(statistics.fmean(self._lengths)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch, or time the border before it."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if len(self.losses) < LOSSES and isinstance(loss, Tensor) and loss.numel() == 1:
            self.losses.append(loss.detach().clone())
        validated = self._take_validated()
        if self._is_first and not (self._was_first or self.counts_borders):
            self.timer.synchronize()
            self.end_border(time.perf_counter() - self._ended - validated)
        else:
            self.step()  # also if something stops the epoch after its first batch
        self._was_first, self._is_first = self._is_first, False
        if self.timer.border:
            self._go_to_border(trainer)
        self._ended = time.perf_counter()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Time the batch."""
        assert self.validation is not None
        self.validation.end_batch(dataloader_idx)

    def load(self, loader: Any) -> None:
        """Count batches, epoch after epoch."""
        while True:
            for _ in loader:
                self.step()
                if self.timer.border and not self.timer.end_border():
                    end_program()

    def step(self) -> None:
        """Count a step, and end the script after the last one."""
        if not self.timer.step():
            end_program()  # no further code of the script runs

    def end_border(self, seconds: float) -> None:
        """Store the time of a border, and exclude it from the steps."""
        self.borders.append(seconds)
        self.timer.leave_out(seconds)

    def _take_validated(self) -> float:
        """Return the seconds of validations since the previous batch."""
        assert self.validation is not None
        seconds, self.validation.since_step = self.validation.since_step, 0.0
        return seconds

    def _go_to_border(self, trainer: Any) -> None:
        """Make the next batch the last one of its epoch, unless a border was already timed.

        If the number of batches is unknown, the epoch continues instead, for a limited time.
        """
        batches = trainer.num_training_batches
        now = time.perf_counter()
        if batches == math.inf:
            self._gives_up = min(self._gives_up, now + BORDER_SECONDS)
        has_none = batches < 2 or self.counts_borders or self.mode != "step"
        if self.borders or has_none or now > self._gives_up:
            if not self.timer.end_border():
                end_program()
            return
        if not self._goes_to_border:
            self._goes_to_border = True
            gc.collect()
        if batches == math.inf:
            return
        # The script sees the index of that batch, as if the batches in between were over.
        loop = trainer.fit_loop.epoch_loop
        fetcher = trainer.fit_loop._data_fetcher
        progress = loop.batch_progress.current
        left_out = int(batches) - 1 - progress.ready
        if left_out > 0:
            for count in ("ready", "started", "processed", "completed"):
                setattr(progress, count, getattr(progress, count) + left_out)
            fetcher.fetched += left_out


class PhaseProbe(Probe):
    """Also times the phases of a step, on a CPU, where each phase is complete before the next one begins."""

    def __init__(self, timer: RoundTimer, mode: str, folder: str = "") -> None:
        super().__init__(timer, mode, folder)
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._steps = 0
        self._last = 0.0

    def found(self) -> dict[str, Any]:
        """Return the results, including the mean seconds of each phase."""
        return {
            **super().found(),
            "phases": {name: total / max(1, self._steps) for name, total in self.seconds.items()},
        }

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the forward pass."""
        self._last = time.perf_counter()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """End the forward pass."""
        self._end("forward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """End the backward pass."""
        self._end("backward")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the optimizer's step, and count the batch."""
        self._end("optimizer")
        self._steps += 1
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


class WholeEpoch(Probe):
    """Times one epoch as the script trains and validates it, from one first batch to the next.

    After some batches it waits while another process trains; the epoch excludes that time.
    """

    def __init__(self, timer: RoundTimer, mode: str, folder: str = "") -> None:
        super().__init__(timer, mode, folder)
        self.numbers["steps_seconds"] = 0.0
        self._begun = 0.0
        self._waits = 0.0  # seconds

    def wait(self, trainer: Any) -> None:
        """Do not wait yet: the first wait follows the first batch."""
        self.timer.device = trainer.strategy.root_device

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add the time since the previous batch; end the script after the first batch of the second epoch."""
        if not self._ended:
            gc.collect()  # as at a border of a ``Probe``
        now = self._now()
        if self._is_first or (self._ended and trainer.num_training_batches == 1):
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1}
            self.numbers |= {"seconds": now - self._begun, "metrics": metrics}
            self.timer.over = True
            end_program()
        seconds = now - self._ended - self._take_validated()
        self.numbers["steps_seconds"] += seconds if self._ended else 0.0
        self._begun = self._begun or now
        self._ended = now
        self._let_others_train()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Time the batch."""
        super().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)
        assert self.validation is not None
        if self._ended:  # not in the sanity check
            # The duration of the validation, including the wait, is added when it ends.
            self.validation.since_step -= self._let_others_train()

    def _now(self) -> float:
        """Return the time, excluding waits."""
        self.timer.synchronize()
        return time.perf_counter() - self._waits

    def _let_others_train(self) -> float:
        """Count a batch, wait if it was the last one of the turn, and return the seconds of the wait."""
        before = self._now()
        self.step()
        waited = self._now() - before
        self._waits += waited
        return waited


def trainer_in_construction() -> Any:
    """Return the Trainer whose constructor is running; Lightning calls entry points without passing it."""
    frame = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer):
            return frame.f_locals["self"]
        frame = frame.f_back
    raise RuntimeError("No Trainer is under construction: this version of Lightning calls its entry points elsewhere.")


def replace_in_construction(trainer: Any, options: Mapping[str, Any], ranks: int, probe: Probe) -> None:
    """Give a Trainer under construction a turbo strategy if there are options, and DDP on several ranks."""
    old = trainer.strategy
    name = type(old).__name__
    devices = len(getattr(old, "parallel_devices", None) or [old.root_device])
    # Checked before it starts processes for further ranks.
    if name not in (STRATEGIES if ranks == 1 else STRATEGIES_OF_RANKS) or devices not in (1, ranks):
        expected = "one device with the default strategy, 'turbo' or 'ddp'; or 'ddp' with its devices as --ranks"
        probe.refuse(f"its Trainer has strategy {name} and {devices} devices; expected {expected}.")
    if ranks > 1 and (options or name != "DDPStrategy"):
        kind = lightning_turbo.TurboDDPStrategy if options else DDPStrategy
        placed = old.root_device
        where = [placed if placed.type == "cpu" else torch.device(placed.type, rank) for rank in range(ranks)]
        place = {"parallel_devices": where, "cluster_environment": TorchElasticEnvironment()}
    elif options:
        kind = lightning_turbo.TurboStrategy
        place = {"device": old.root_device}
    else:
        return
    new: Any = kind(accelerator=old.accelerator, **place, **options)
    new.precision_plugin = old.precision_plugin
    replace_strategy(trainer, new)


def change_loader(loader: Any, settings: Mapping[str, Any], batch_size: int, probe: Probe) -> Any:
    """Apply settings and a batch size to a loader."""
    for name, value in settings.items():
        if getattr(loader, "num_workers", 0) or name != "persistent_workers":
            vars(loader)[name] = value  # like torch's constructor; some cannot be set later
    if batch_size:
        sampler: Any = getattr(loader, "batch_sampler", None)
        if type(sampler) is not BatchSampler:
            probe.refuse("its training loader has no BatchSampler of torch; expected a DataLoader with a batch_size.")
        sampler.batch_size = batch_size
    return loader


def prepare_trainer(trainer: Any, task: Mapping[str, Any], probe: Probe) -> list[Callback]:
    """Apply the settings of a task to a Trainer under construction, and let the probe begin when it runs.

    Loaders pass through these functions in reverse order: the one that repeats a batch is outermost, and works on the
    loader with all other settings.
    """
    settings = task["settings"]
    replace_in_construction(trainer, settings["strategy"], task["ranks"], probe)
    strategy = trainer.strategy
    if settings["precision"]:
        strategy.precision_plugin = MixedPrecision(settings["precision"], strategy.root_device.type)
    if settings["opt_level"]:
        strategy.precision_plugin = lightning_turbo.ApexAMP(settings["opt_level"])

    def begin(set_up: Callable[[], None]) -> None:
        # A learning rate search runs without the script's callbacks, and without the probe.
        if probe in trainer.callbacks and probe.validation is None:
            probe.begin(trainer)
        set_up()

    ReplacedMethod(strategy, "setup_environment", begin)  # a run calls this first
    if settings["augment_batches"]:
        MovedAugmentation(trainer, strategy)
    if settings["loader"] or task["batch_size"]:

        def change(process: Callable[[Any], Any], loader: Any) -> Any:
            validates = trainer.sanity_checking or trainer.validating
            size = 0 if validates else task["batch_size"]
            return process(change_loader(loader, settings["loader"], size, probe))

        ReplacedMethod(strategy, "process_dataloader", change)
    if probe.mode == "one batch":
        ReplacedMethod(strategy, "process_dataloader", lambda process, loader: Repeat(process(loader)))
    return [getattr(lightning_turbo, name)(**arguments) for name, arguments in settings["callbacks"].items()]
