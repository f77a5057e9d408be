"""``Timeline``: one list of (time, hook) of a fit, from the actions that Lightning reports to its profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.doctor.guard import Guard

__all__ = [
    "PARTS", "PHASES", "EpochCount", "Listener", "Mark", "Plan", "Timeline", "hooks_of", "parts_of", "phase_of",
    "phases_of", "seconds_of", "steps_of",
]  # fmt: skip

PARTS = {
    "set-up": "set-up, with the sanity check",
    "first batch": "first batch, with the start of workers",
    "steps": "steps",
    "validation start": "start of validation, with its processes",
    "validation": "validation",
    "metrics": "metrics and loggers",
    "checkpoints": "checkpoints",
    "hooks": "hooks at the borders of an epoch",
}
"""The parts of a fit in order, with their names in a report."""
PHASES = {
    "data": "waiting for data",
    "copy": "copy to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "hooks": "hooks and callbacks",
    "logging": "logging",
}
"""The phases of a step in order, with their names in a report."""
MOST = 1000
"""Steps after which the hooks of further steps are not kept."""

NEXT = "train_dataloader_next"
EPOCH = "run_training_epoch"
BACKWARD = "backward"
SAVE = "save_checkpoint"
_HOOKS = {
    "data": (NEXT,),
    "copy": ("batch_to_device", "transfer_batch_to_device"),
    "forward": ("training_step",),
    "backward": ("backward",),
    "optimizer": ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
}
_PHASE_OF_HOOK = {hook: phase for phase, hooks in _HOOKS.items() for hook in hooks}
_PART_OF_GAP = {
    "on_train_start": "first batch",
    NEXT: "first batch",
    "on_validation_model_eval": "validation start",
    "on_validation_epoch_end": "metrics",
}
"""A hook outside a step -> what Lightning did since the hook before it."""
_BORDER_HOOKS = {
    *("on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"),
}


class Mark(NamedTuple):
    """A moment of the fit: what begins then, and the step and epoch it belongs to.

    Attributes:
        time: Seconds, as in ``time.perf_counter``.
        part: A key of ``PARTS``.
        phase: A key of ``PHASES``.
        hook: The innermost of Lightning's actions, empty between two actions.
        step: The step, counted from 0 over the whole fit; -1 outside of steps.
        epoch: The epoch, from 1; 0 before the first one.
        event: A CUDA event recorded at this moment, or ``None``.
    """

    time: float
    part: str
    phase: str
    hook: str
    step: int
    epoch: int
    event: Any = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How many steps pass, are timed and are watched; steps are counted from 0 over the whole fit."""

    warmup: int
    timed: int
    watched: int

    @property
    def needed(self) -> int:
        """Number of steps until all are done."""
        return self.warmup + self.timed + self.watched

    def times(self, step: int) -> bool:
        """Return whether a step is to be timed."""
        return self.warmup <= step < self.warmup + self.timed

    def watches(self, step: int) -> bool:
        """Return whether a step is to be watched."""
        return self.warmup + self.timed <= step < self.needed

    def samples(self, step: int) -> bool:
        """Return whether the lines of a step count: it is past the warm-up, not watched, and its hooks are kept."""
        return self.warmup <= step < MOST and not self.watches(step)


@dataclass(slots=True)
class EpochCount:
    """Counts for one epoch, until the next one begins."""

    steps: int = 0
    validations: int = 0
    validated: int = 0  # batches
    ended: bool = False  # whether its end was seen
    saves: int = 0


class Listener:
    """What a ``Timeline`` tells; by default nothing is done."""

    def begin_hook(self, hook: str) -> None:
        """One of Lightning's actions begins, after what it means for a step was told."""

    def end_hook(self, hook: str) -> None:
        """One of Lightning's actions has ended."""

    def begin_step(self, step: int) -> None:
        """A step begins; its batch is fetched next."""

    def fetched(self, step: int) -> None:
        """The batch of a step has arrived. Not called if ``training_step`` fetches batches itself."""

    def end_step(self, step: int) -> None:
        """A step is over; the next one, a validation or the end of the epoch follows."""

    def drop_step(self, step: int) -> None:
        """What had begun was no step: its batch was only prefetched, or an error occurred."""

    def end_training(self) -> None:
        """Training is over; the hooks at its end come next."""


class Timeline:
    """The moments of a fit in ``marks``, and where it is now.

    A ``Session`` calls ``begin`` when fit sets up. The Trainer keeps its profiler; the profiler's ``start`` and
    ``stop`` now also add a mark, until ``stop`` restores them. At most one step is open: it begins as its batch is
    fetched, and ends where the next one is, a validation or the epoch's end. What loggers write is not reported
    to the profiler: it counts for the part and phase that follow the action before it.

    Args:
        guard: Keeps errors of the listener away from the run.
        listener: Told of steps and hooks.
        plan: On CUDA, the steps whose marks have an event of the device.
        cuda: Whether the run is on a CUDA device.
    """

    def __init__(self, guard: Guard, listener: Listener, plan: Plan, cuda: bool = False) -> None:
        self.marks: list[Mark] = []
        self.epochs: list[EpochCount] = []
        self.step = 0  # number of complete steps
        self.has_border = False  # whether the first batch of a second epoch was fetched
        self.is_open = False  # whether a step is open
        self._guard = guard
        self._listener = listener
        self._plan = plan
        self._cuda = cuda
        self._replaced: list[ReplacedMethod] = []
        self._stack: list[tuple[str, str, str]] = []  # hook, part and phase of each open action
        self._gap = ("set-up", "hooks")  # part and phase while no action is open
        self._begun = 0  # the number of marks when the open step began
        self._trained = False  # whether the open step has reached on_train_batch_end
        self._validated: int | None = None  # batches of the current validation

    def begin(self, trainer: Any) -> None:
        """Start in a Trainer whose fit begins."""
        profiler: Any = trainer.profiler
        self._replaced = [
            ReplacedMethod(profiler, "start", self._on_start),
            ReplacedMethod(profiler, "stop", self._on_stop),
        ]
        self._mark()

    def stop(self) -> None:
        """Restore the methods."""
        for each in self._replaced:
            each.put_back()
        self._replaced = []
        self._mark()

    def _on_start(self, start: Any, action: str) -> Any:
        result = start(action)
        self._guard.run(self.start, action)
        return result

    def _on_stop(self, stop: Any, action: str) -> Any:
        result = stop(action)
        self._guard.run(self.end, action)
        return result

    def start(self, action: str) -> None:
        """An action begins."""
        hook = action.rpartition(".")[2]
        if not self._stack:
            self._name_gap(hook)
            self._follow(hook)
        elif hook == "on_after_backward" and self._stack[-1][0] == BACKWARD:
            self._stack.pop()
        if hook == SAVE and self.epochs:
            self.epochs[-1].saves += 1
        # The action that encloses all steps carries no information.
        if action != EPOCH:
            outer = self._stack[-1][1:] if self._stack else self._gap
            self._stack.append((action, self._part_of(hook, outer[0]), phase_of(action) or outer[1]))
            self._mark()
        self._listener.begin_hook(hook)

    def end(self, action: str) -> None:
        """An action ends."""
        names = [name for name, *_ in self._stack]
        hook = action.rpartition(".")[2]
        # Actions that an exception left open end with the enclosing one.
        if action in names:
            del self._stack[names.index(action) :]
        if hook == "on_before_backward" and action.startswith("[LightningModule]"):
            # Covers the time until the hook after it, which in manual optimization is no action of Lightning's.
            self._stack.append((BACKWARD, "steps", "backward"))
        elif not self._stack:
            self._follow_end(hook)
        self._mark()
        if hook == NEXT and self.is_open and not self._stack:
            self.has_border = len(self.epochs) > 1
            self._listener.fetched(self.step)
        self._listener.end_hook(hook)

    def _mark(self) -> None:
        """Add the moment that begins now."""
        if self.is_open and self.step >= MOST:
            return
        hook, part, phase = self._stack[-1] if self._stack else ("", *self._gap)
        event = None
        if self._cuda and self.is_open and self._plan.times(self.step):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        step = self.step if self.is_open else -1
        self.marks.append(Mark(time.perf_counter(), part, phase, hook, step, len(self.epochs), event))

    def _name_gap(self, hook: str) -> None:
        """Name the part to which the time before this hook belongs, where no action covered it."""
        # Later batches are also fetched right after a validation.
        is_later = hook == NEXT and self.epochs and self.epochs[-1].steps > 0
        is_check = not self.epochs and "validation" in hook
        if hook in _PART_OF_GAP and not (self.is_open or is_check or is_later) and self.marks:
            self.marks[-1] = self.marks[-1]._replace(part=_PART_OF_GAP[hook])

    def _follow(self, hook: str) -> None:
        """Update the state when an outermost action begins."""
        # Fetching the next batch is the one action that ends a step in both automatic and manual optimization. If
        # ``training_step`` fetches, the start of the next batch ends it.
        if hook == NEXT or (hook == "on_train_batch_start" and self._trained):
            self._open_step()
        elif "validation" in hook or hook.endswith(("_epoch_end", "_dataloader")):
            self._close_step()
        self._follow_epoch(hook)

    def _follow_epoch(self, hook: str) -> None:
        if hook in ("on_train_epoch_start", EPOCH):
            if not self.epochs or self.epochs[-1].ended:
                self.epochs.append(EpochCount())
        elif hook == "on_train_epoch_end":
            self.epochs[-1].ended = True
        elif hook == "on_train_end":
            self._listener.end_training()
        elif self.epochs:
            self._follow_validation(hook)

    def _follow_validation(self, hook: str) -> None:
        if hook == "on_validation_model_eval":
            self._validated = 0
            self._gap = ("validation", "hooks")
            self.epochs[-1].validations += 1
        elif hook == "validation_step":
            self._validated = (self._validated or 0) + 1
            self.epochs[-1].validated += 1

    def _follow_end(self, hook: str) -> None:
        """Update the state when an outermost action ends."""
        if not self.epochs:  # set-up and the sanity check
            return
        if hook == "on_train_batch_end":
            self._trained = True
            self._gap = ("steps", "logging")
        elif hook in ("on_validation_epoch_end", "on_train_epoch_end"):
            self._gap = ("metrics", "logging")
        elif hook == "on_validation_end":
            self._validated = None
            self._gap = ("hooks", "hooks")

    def _open_step(self) -> None:
        self._close_step()
        self.is_open = True
        self._trained = False
        self._begun = len(self.marks)
        self._gap = ("steps", "hooks")
        self._listener.begin_step(self.step)

    def _close_step(self) -> None:
        if not self.is_open:
            return
        if self._trained:
            self._mark()  # the end of the step, by the clock of the device too
            self.is_open = self._trained = False
            self.epochs[-1].steps += 1
            self._gap = ("hooks", "hooks")
            self._listener.end_step(self.step)
            self.step += 1
        else:
            # Without a known length, a batch is prefetched when an epoch begins; no training step follows that fetch.
            self.is_open = False
            self.marks[self._begun :] = [each._replace(step=-1) for each in self.marks[self._begun :]]
            self._listener.drop_step(self.step)

    def _part_of(self, hook: str, outer: str) -> str:
        """Return the part of the fit to which an action belongs, inside an action of the part ``outer``."""
        if hook == SAVE or (self._stack and outer == "checkpoints"):
            return "checkpoints"
        if self._stack:
            return outer
        if self.is_open:
            is_first = hook == NEXT and not self.epochs[-1].steps
            return "first batch" if is_first else "steps"
        if not self.epochs:
            return "set-up"
        return self._part_between_steps(hook)

    def _part_between_steps(self, hook: str) -> str:
        if self._validated is None or hook in _BORDER_HOOKS:
            return "hooks"
        is_first = hook == "val_next" and not self._validated
        return "validation start" if is_first else "validation"


def phase_of(action: str) -> str | None:
    """Return the phase of one of Lightning's profiler actions, ``None`` if it only encloses others."""
    phase = _PHASE_OF_HOOK.get(action.rpartition(".")[2])
    if phase is None and action.startswith("["):
        return "logging" if action.startswith("[Callback]") and "Progress" in action else "hooks"
    return phase


def seconds_of(mark: Mark, after: Mark) -> float:
    """Return the seconds between two marks: on CUDA, those that the device took between two events."""
    if mark.event is not None and after.event is not None:
        return mark.event.elapsed_time(after.event) / 1e3
    return after.time - mark.time


def steps_of(marks: Sequence[Mark], counts: Callable[[int], bool]) -> list[dict[tuple[str, str], float]]:
    """Return the seconds of each hook and phase in each step that counts, in order."""
    steps: dict[int, dict[tuple[str, str], float]] = {}
    for mark, after in pairwise(marks):
        if mark.step >= 0 and mark.step == after.step and counts(mark.step):
            sums = steps.setdefault(mark.step, {})
            key = mark.hook, mark.phase
            sums[key] = sums.get(key, 0.0) + seconds_of(mark, after)
    return list(steps.values())


def phases_of(steps: Sequence[dict[tuple[str, str], float]], typical: bool = False) -> dict[str, float]:
    """Return the mean or the median seconds of each phase per step; empty without steps."""
    sums = [dict.fromkeys(PHASES, 0.0) for _ in steps]
    for each, step in zip(sums, steps, strict=True):
        for (_, phase), seconds in step.items():
            each[phase] += seconds
    mean = median if typical else (lambda values: sum(values) / len(values))
    return {phase: mean([each[phase] for each in sums]) for phase in PHASES if sums}


def parts_of(marks: Sequence[Mark]) -> dict[tuple[int, str], float]:
    """Return the seconds of each epoch and part, by the host's clock."""
    sums: dict[tuple[int, str], float] = {}
    for mark, after in pairwise(marks):
        key = mark.epoch, mark.part
        sums[key] = sums.get(key, 0.0) + after.time - mark.time
    return sums


def hooks_of(marks: Sequence[Mark], *parts: str) -> dict[tuple[int, str], float]:
    """Return the seconds of each epoch and hook in some parts."""
    sums: dict[tuple[int, str], float] = {}
    for mark, after in pairwise(marks):
        if mark.part in parts and mark.hook:
            key = mark.epoch, mark.hook
            sums[key] = sums.get(key, 0.0) + after.time - mark.time
    return sums
