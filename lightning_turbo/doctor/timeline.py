"""The time line of the step, from the actions that Lightning reports to its profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from lightning_turbo._lightning import Profiler

__all__ = ["PHASES", "PHASE_NAMES", "Recorder", "Segment", "Timeline", "middle_of", "phase_of", "phases_of"]

PHASE_NAMES = {
    "data": "waiting for data",
    "copy": "copy to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "hooks": "hooks and callbacks",
    "logging": "logging",
}
PHASES = tuple(PHASE_NAMES)

NEXT = ".train_dataloader_next"
EPOCH = "run_training_epoch"
"""Encloses all steps, so that it tells nothing."""


def phase_of(action: str) -> str | None:
    """Return the phase of one of Lightning's profiler actions, ``None`` if it only encloses others."""
    hook = action.rpartition(".")[2]
    if action.endswith(NEXT):
        return "data"
    if hook in ("batch_to_device", "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"):
        return "copy"
    if hook == "training_step":
        return "forward"
    if hook == "backward":
        return "backward"
    if hook in ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"):
        return "optimizer"
    if action.startswith("[Callback]") and "Progress" in action:
        return "logging"
    return "hooks" if action.startswith("[") else None


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of a step during which the same action ran."""

    action: str
    phase: str
    start: float
    """Seconds since the step began."""
    seconds: float


@dataclass(slots=True)
class _Mark:
    """The moment at which the innermost action became ``action``."""

    action: str
    phase: str
    host: float
    device: torch.cuda.Event | None


class Timeline:
    """Marks of the timed steps, and what they sum up to.

    On CUDA the marks are events on the current stream, which cost no wait: a phase then lasts as long as the device
    took from one event to the next, idling included.

    Args:
        cuda: Whether the run is on a CUDA device.
    """

    def __init__(self, cuda: bool = False) -> None:
        self.cuda = cuda
        self.steps: list[list[_Mark]] = []
        self._open: list[_Mark] | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._open = []

    def mark(self, action: str, phase: str) -> None:
        """Note that ``action`` begins, or goes on after an inner one; nothing happens outside of a step."""
        if self._open is not None:
            event = None
            if self.cuda:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
            self._open.append(_Mark(action, phase, time.perf_counter(), event))

    def end(self) -> None:
        """End the step and keep it."""
        self.mark("", "hooks")
        if self._open is not None:
            self.steps.append(self._open)
        self._open = None

    def drop(self) -> None:
        """Forget the step that is under way, because something else came between."""
        self._open = None

    def segments(self) -> list[list[Segment]]:
        """Return the steps as segments.

        Note:
            On CUDA it waits once for the device.
        """
        if self.cuda:
            torch.cuda.synchronize()
        result = []
        for marks in self.steps:
            step: list[Segment] = []
            start = 0.0
            for mark, after in pairwise(marks):
                if mark.device is not None and after.device is not None:
                    seconds = mark.device.elapsed_time(after.device) / 1e3
                else:
                    seconds = after.host - mark.host
                step.append(Segment(mark.action, mark.phase, start, seconds))
                start += seconds
            result.append(step)
        return result


def phases_of(steps: list[list[Segment]]) -> dict[str, float]:
    """Return the median seconds of each phase over the steps."""
    sums = [{phase: sum(s.seconds for s in step if s.phase == phase) for phase in PHASES} for step in steps]
    return {phase: median(each[phase] for each in sums) for phase in PHASES} if sums else {}


def middle_of(steps: list[list[Segment]]) -> list[Segment]:
    """Return the step of median length."""
    ordered = sorted(steps, key=lambda step: sum(segment.seconds for segment in step))
    return ordered[len(ordered) // 2] if ordered else []


class Recorder:
    """Stands in for the Trainer's profiler while the doctor is at work, and passes everything on to it.

    To others it is the profiler: it says to be of its class, and all but the actions is the profiler's own.

    Args:
        inner: The Trainer's own profiler.
        on_step: Called with the number of finished steps whenever a step is over, before the next batch is fetched.
        on_batch: Called when a batch has been fetched.
        on_pause: Called when something begins that is no part of a step: validation, the end of an epoch.
    """

    __slots__ = ("_rest", "_stack", "inner", "on_batch", "on_pause", "on_step", "timeline")

    def __init__(
        self,
        inner: Profiler,
        on_step: Callable[[], None],
        on_batch: Callable[[], None],
        on_pause: Callable[[], None],
    ) -> None:
        self.inner = inner
        self.on_step, self.on_batch, self.on_pause = on_step, on_batch, on_pause
        self.timeline: Timeline | None = None
        self._stack: list[tuple[str, str]] = []
        self._rest = "hooks"
        """The phase of what runs between the outermost actions."""

    def forget(self) -> None:
        """Let go of all but the inner profiler: Lightning holds this object to the end of the epoch under way."""
        self.timeline = None
        self.on_step = self.on_batch = self.on_pause = _nothing

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copies, before there is an inner profiler
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Recorder.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def start(self, action_name: str) -> None:
        """Begin an action."""
        self.inner.start(action_name)
        self._begin(action_name)

    def stop(self, action_name: str) -> None:
        """End an action."""
        self.inner.stop(action_name)
        self._end(action_name)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[Any]:
        """Begin an action, and end it with the block."""
        with self.inner.profile(action_name) as given:
            self._begin(action_name)
            try:
                yield given
            finally:
                self._end(action_name)

    def _begin(self, action_name: str) -> None:
        if action_name == EPOCH:
            return
        outermost = action_name.endswith(NEXT) and not self._stack
        if outermost:
            if self.timeline is not None:
                self.timeline.end()
            self.on_step()
            self._rest = "hooks"
            if self.timeline is not None:
                self.timeline.begin()
        elif "validation" in action_name or action_name.endswith("epoch_end"):
            self.on_pause()
            if self.timeline is not None and self._rest == "logging" and action_name.endswith("epoch_end"):
                self.timeline.end()  # the last step of an epoch is over
            elif self.timeline is not None:
                self.timeline.drop()
        phase = phase_of(action_name) or (self._stack[-1][1] if self._stack else self._rest)
        self._stack.append((action_name, phase))
        if self.timeline is not None:
            self.timeline.mark(action_name, phase)

    def _end(self, action_name: str) -> None:
        if any(action == action_name for action, _ in self._stack):
            while self._stack.pop()[0] != action_name:
                pass
        if action_name.endswith("on_train_batch_end"):
            self._rest = "logging"
        if self.timeline is not None:
            self.timeline.mark(*(self._stack[-1] if self._stack else ("", self._rest)))
        if action_name.endswith(NEXT):
            self.on_batch()


def _nothing() -> None:
    """What an action tells once nobody listens."""
