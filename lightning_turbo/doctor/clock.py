"""``FitClock``: tracks fits, epochs, steps and phases through the actions that Lightning reports to its profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.doctor.guard import Guard

__all__ = ["PARTS", "PHASES", "EpochCount", "FitClock", "Listener", "Moment", "Plan", "phase_of"]

PARTS = {
    "set-up": "set-up",
    "sanity check": "sanity check",
    "start": "start of loading, with its processes",
    "first batch": "first batch of an epoch",
    "steps": "steps",
    "validation start": "start of validation, with its processes",
    "validation": "validation",
    "metrics": "metrics (compute, synchronization)",
    "checkpoints": "checkpoints",
    "hooks": "hooks at the borders of an epoch",
    "loggers": "loggers",
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

NEXT = "train_dataloader_next"
EPOCH = "run_training_epoch"
BACKWARD = "backward"
SAVE = "save_checkpoint"
LOGGING = ("log_metrics", "log_hyperparams", "save", "after_save_checkpoint")
"""Methods of loggers, whose calls Lightning does not report to its profiler."""
_HOOKS = {
    "data": (NEXT,),
    "copy": ("batch_to_device", "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"),
    "forward": ("training_step",),
    "backward": ("backward",),
    "optimizer": ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
}
_PHASE_OF_HOOK = {hook: phase for phase, hooks in _HOOKS.items() for hook in hooks}
_PART_OF_GAP = {
    "on_train_start": "start",
    NEXT: "start",
    "on_validation_model_eval": "validation start",
    "on_validation_epoch_end": "metrics",
}
"""A hook outside a step -> what Lightning did since the previous action, if no action covers it."""
_BORDER_HOOKS = {
    *("on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"),
}


def phase_of(action: str) -> str | None:
    """Return the phase of one of Lightning's profiler actions, ``None`` if it only encloses others."""
    phase = _PHASE_OF_HOOK.get(action.rpartition(".")[2])
    if phase is None and action.startswith("["):
        is_logging = action.startswith("[Logger]") or (action.startswith("[Callback]") and "Progress" in action)
        return "logging" if is_logging else "hooks"
    return phase


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


@dataclass(frozen=True, slots=True)
class Moment:
    """What begins: the part of the fit, the phase of the step, and the innermost action."""

    part: str
    phase: str
    action: str = ""


@dataclass(slots=True)
class EpochCount:
    """Counts for one epoch, until the next one begins."""

    steps: int = 0
    validations: int = 0
    validated: int = 0  # batches
    ended: bool = False  # whether its end was seen
    saves: int = 0
    saves_in_steps: int = 0  # the number of these inside a step


class Listener:
    """Receives the events of a ``FitClock``; by default each does nothing.

    Listeners nest like contexts: the first to receive the beginning of a step is the last to receive its end.
    """

    def begin_fit(self) -> None:
        """Fit begins; nothing of it has run yet."""

    def enter(self, moment: Moment, before: str | None) -> None:
        """A new moment begins. ``before`` is the part of the time since the last call, if it differs."""

    def begin_epoch(self) -> None:
        """An epoch begins."""

    def end_training(self) -> None:
        """Training is over; the hooks at its end come next."""

    def begin_step(self, step: int) -> None:
        """A step begins; its batch is fetched next."""

    def fetched(self, step: int) -> None:
        """The batch of a step has arrived. Not called if ``training_step`` fetches batches itself."""

    def end_step(self, step: int) -> None:
        """A step is over; the next one, a validation or the end of the epoch follows."""

    def drop_step(self, step: int) -> None:
        """What had begun was no step: its batch was only prefetched, or an error occurred."""


EVENTS = [name for name in vars(Listener) if not name.startswith("_")]


class FitClock:
    """Tracks where a fit, an epoch, a step and a phase begin and end, and notifies its listeners.

    The ``Doctor`` calls ``begin`` first thing in ``fit``. The Trainer keeps its profiler; the profiler's ``start`` and
    ``stop`` and the methods with which loggers write now also notify the clock, until ``stop`` restores them. In
    between, the innermost open action is the last one on the stack, at most one step is open, and ``guard`` calls the
    listeners, so that none of their errors reaches the run.

    Args:
        guard: Calls the listeners.
    """

    def __init__(self, guard: Guard) -> None:
        self.epochs: list[EpochCount] = []
        self.step = 0  # number of completed steps
        self.has_border = False  # whether the first batch of a second epoch was fetched
        self._guard = guard
        self._methods: dict[str, tuple[Callable[..., None], ...]] = {}  # event -> methods of listeners
        self._replaced: list[ReplacedMethod] = []
        self._stack: list[tuple[str, Moment]] = []  # open actions by Lightning's names
        self._gap = Moment("set-up", "hooks")  # the moment while no action is open
        self._is_open = False  # whether a step is open
        self._trained = False  # whether the open step has reached on_train_batch_end
        self._is_checking = False  # whether the sanity check is running
        self._validated: int | None = None  # batches of the current validation

    @property
    def moment(self) -> Moment:
        """The current moment."""
        return self._stack[-1][1] if self._stack else self._gap

    def begin(self, trainer: Any, listeners: Sequence[Listener]) -> None:
        """Start in a Trainer whose fit begins."""
        self.subscribe(listeners)
        profiler: Any = trainer.profiler
        self._replaced = [
            ReplacedMethod(profiler, "start", self._on_start),
            ReplacedMethod(profiler, "stop", self._on_stop),
        ]
        for logger in trainer.loggers:
            for name in LOGGING:
                if callable(getattr(logger, name, None)):
                    action = f"[Logger]{type(logger).__name__}.{name}"
                    self._replaced.append(ReplacedMethod(logger, name, _LoggerAction(self, action)))
        self._tell("begin_fit")
        self._tell("enter", self.moment, None)

    def subscribe(self, listeners: Sequence[Listener]) -> None:
        """Notify these listeners from now on, and no others."""
        self._methods = {event: _methods_of(event, listeners) for event in EVENTS}

    def stop(self) -> None:
        """Stop notifying, and restore the methods."""
        for each in self._replaced:
            each.put_back()
        self._replaced = []
        self._methods = {}

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
        before = None
        if not self._stack:
            before = self._part_before(hook)
            self._follow(hook)
        elif hook == "on_after_backward" and self._stack[-1][0] == BACKWARD:
            self._stack.pop()
        if hook == SAVE and self.epochs:
            self.epochs[-1].saves += 1
            self.epochs[-1].saves_in_steps += self._is_open
        # The action that encloses all steps carries no information.
        if action != EPOCH:
            self._stack.append((action, self._moment_of(action, hook)))
            self._tell("enter", self.moment, before)

    def end(self, action: str) -> None:
        """An action ends."""
        names = [name for name, _ in self._stack]
        hook = action.rpartition(".")[2]
        # Actions that an exception left open end with the enclosing one.
        if action in names:
            del self._stack[names.index(action) :]
        if hook == "on_before_backward" and action.startswith("[LightningModule]"):
            # Covers the time until the hook after it, which in manual optimization is no action of Lightning's.
            self._stack.append((BACKWARD, Moment("steps", "backward", BACKWARD)))
        elif not self._stack:
            self._follow_end(hook)
        self._tell("enter", self.moment, None)
        if hook == NEXT and self._is_open and not self._stack:
            self.has_border = len(self.epochs) > 1
            self._tell("fetched", self.step)

    def _part_before(self, hook: str) -> str | None:
        """Return the part to which the time before this hook belongs, if no action covered it."""
        if self._is_open or self._is_checking:
            return None
        # Later batches are also fetched right after a validation.
        is_later = hook == NEXT and self.epochs and self.epochs[-1].steps > 0
        return None if is_later else _PART_OF_GAP.get(hook)

    def _follow(self, hook: str) -> None:
        """Update the state when an outermost action begins."""
        # Fetching the next batch is the one action that ends a step in both automatic and manual optimization. If
        # ``training_step`` fetches, the start of the next batch ends it.
        if hook == NEXT or (hook == "on_train_batch_start" and self._trained):
            self._open_step()
        elif "validation" in hook or hook.endswith(("_epoch_end", "_dataloader")):
            self._close_step()
        if hook == "on_sanity_check_start":
            self._is_checking = True
            self._gap = Moment("sanity check", "hooks")
        elif self._is_checking:
            return
        elif hook in ("on_train_epoch_start", EPOCH):
            self._begin_epoch()
        elif hook == "on_train_epoch_end":
            self.epochs[-1].ended = True
        elif hook == "on_train_end":
            self._tell("end_training")
        elif self.epochs:
            self._follow_validation(hook)

    def _begin_epoch(self) -> None:
        if not self.epochs or self.epochs[-1].ended:
            self.epochs.append(EpochCount())
            self._tell("begin_epoch")

    def _follow_validation(self, hook: str) -> None:
        if hook == "on_validation_model_eval":
            self._validated = 0
            self._gap = Moment("validation", "hooks")
            self.epochs[-1].validations += 1
        elif hook == "validation_step":
            self._validated = (self._validated or 0) + 1
            self.epochs[-1].validated += 1

    def _follow_end(self, hook: str) -> None:
        """Update the state when an outermost action ends."""
        if hook == "on_sanity_check_end":
            self._is_checking = False
            self._gap = Moment("set-up", "hooks")
        elif self._is_checking:
            return
        elif hook == "on_train_batch_end":
            self._trained = True
            self._gap = Moment("steps", "logging")
        elif hook in ("on_validation_epoch_end", "on_train_epoch_end"):
            self._gap = Moment("metrics", "logging")
        elif hook == "on_validation_end":
            self._validated = None
            self._gap = Moment("hooks", "hooks")

    def _open_step(self) -> None:
        self._close_step()
        self._is_open = True
        self._trained = False
        self._gap = Moment("steps", "hooks")
        self._tell("begin_step", self.step)

    def _close_step(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._trained:
            self.epochs[-1].steps += 1
            self._gap = Moment("hooks", "hooks")
            self._tell("end_step", self.step)
            self.step += 1
        else:
            # Without a known length, a batch is prefetched when an epoch begins; no training step follows that fetch.
            self._tell("drop_step", self.step)
        self._trained = False

    def _moment_of(self, action: str, hook: str) -> Moment:
        outer = self.moment
        return Moment(self._part_of(action, hook, outer), phase_of(action) or outer.phase, action)

    def _part_of(self, action: str, hook: str, outer: Moment) -> str:
        """Return the part of the fit to which an action belongs."""
        is_logger = action.startswith("[Logger]")
        if self._is_checking:
            return "sanity check"
        if hook == SAVE or outer.part == "checkpoints":
            return "checkpoints"
        if self._stack and not is_logger:
            return outer.part
        if self._is_open:
            is_first = hook == NEXT and not self.epochs[-1].steps
            return "first batch" if is_first else "steps"
        if not self.epochs:
            return "set-up"
        return "loggers" if is_logger else self._part_between_steps(hook)

    def _part_between_steps(self, hook: str) -> str:
        if self._validated is None or hook in _BORDER_HOOKS:
            return "hooks"
        is_first = hook == "val_next" and not self._validated
        return "validation start" if is_first else "validation"

    def _tell(self, event: str, *given: Any) -> None:
        # Callers invoke the clock through its guard, which catches errors of listeners.
        for method in self._methods.get(event, ()):
            method(*given)


def _methods_of(event: str, listeners: Sequence[Listener]) -> tuple[Callable[..., None], ...]:
    """Return the methods to call at an event, in order: those of listeners that override it."""
    methods = [getattr(each, event) for each in listeners if getattr(type(each), event) is not getattr(Listener, event)]
    return tuple(reversed(methods) if event in ("end_step", "drop_step") else methods)


class _LoggerAction:
    """A logger's method whose calls become actions of a clock.

    The clock installs it in ``begin`` and removes it in ``stop``. The logger's own method gets the same arguments, and
    its errors pass through.
    """

    def __init__(self, clock: FitClock, action: str) -> None:
        self.clock = clock
        self.action = action

    def __call__(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.clock._guard.run(self.clock.start, self.action)
        try:
            return method(*args, **kwargs)
        finally:
            self.clock._guard.run(self.clock.end, self.action)
