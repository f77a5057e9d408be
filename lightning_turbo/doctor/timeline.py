"""The time line of the step, from the actions that Lightning reports to its profiler."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch

from lightning_turbo._lightning import Profiler

__all__ = [
    "PHASES",
    "PHASE_NAMES",
    "Recorder",
    "Segment",
    "Timeline",
    "longest_action",
    "phase_of",
    "sum_phases",
]

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
NEXT = "train_dataloader_next"
EPOCH = "run_training_epoch"
"""Encloses all steps, so that it tells nothing."""
BACKWARD = ("backward", "backward")
"""What runs between the hooks before and after it, which in manual optimization is no action of Lightning's."""

_HOOKS = {
    "data": (NEXT,),
    "copy": ("batch_to_device", "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"),
    "forward": ("training_step",),
    "backward": ("backward",),
    "optimizer": ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
}
_PHASE_OF_HOOK = {hook: phase for phase, hooks in _HOOKS.items() for hook in hooks}


def phase_of(action: str) -> str | None:
    """Return the phase of one of Lightning's profiler actions, ``None`` if it only encloses others."""
    phase = _PHASE_OF_HOOK.get(action.rpartition(".")[2])
    if phase is None and action.startswith("["):
        return "logging" if action.startswith("[Callback]") and "Progress" in action else "hooks"
    return phase


@dataclass(frozen=True, slots=True)
class Segment:
    """What one action takes of the mean step, in seconds; ``start`` is where the picture draws it."""

    action: str
    phase: str
    start: float
    seconds: float


@dataclass(slots=True)
class _Mark:
    """The moment at which the innermost action became ``action``."""

    action: str
    phase: str
    host: float
    device: Any  # a CUDA event, None on the CPU

    def seconds_to(self, after: _Mark) -> float:
        return self.device.elapsed_time(after.device) / 1e3 if self.device else after.host - self.host


class Timeline:
    """Marks of the timed steps, and what they sum up to.

    On CUDA the marks are events on the current stream, which cost no wait: a phase then lasts as long as the device
    took from one event to the next, idling included.

    Args:
        cuda: Whether the run is on a CUDA device.
    """

    def __init__(self, cuda: bool = False) -> None:
        self.cuda = cuda
        self.recording = False
        self.steps: list[list[_Mark]] = []
        self._open: list[_Mark] | None = None

    def begin(self) -> None:
        """Begin a step, if steps are to be recorded."""
        self._open = [] if self.recording else None

    def mark(self, action: str, phase: str) -> None:
        """Note that ``action`` begins, or continues after an inner one; nothing happens outside of a step."""
        if self._open is not None:
            event = torch.cuda.Event(enable_timing=True) if self.cuda else None
            if event is not None:
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

    def each_step(self) -> list[dict[tuple[str, str], float]]:
        """Return the seconds of each action and phase in each of the recorded steps.

        Note:
            On CUDA it waits once for the device.
        """
        if self.cuda:
            torch.cuda.synchronize()
        steps: list[dict[tuple[str, str], float]] = [{} for _ in self.steps]
        for sums, marks in zip(steps, self.steps, strict=True):
            for mark, after in pairwise(marks):
                key = mark.action, mark.phase
                sums[key] = sums.get(key, 0.0) + mark.seconds_to(after)
        return steps

    def mean_step(self) -> list[Segment]:
        """Return the mean of the recorded steps: a segment for each action, sorted by phase; none without a step."""
        sums: dict[tuple[str, str], float] = {}
        for key, seconds in chain.from_iterable(step.items() for step in self.each_step()):
            sums[key] = sums.get(key, 0.0) + seconds
        segments, start = [], 0.0
        for (action, phase), total in sorted(sums.items(), key=lambda item: PHASES.index(item[0][1])):
            segments.append(Segment(action, phase, start, total / len(self.steps)))
            start += segments[-1].seconds
        return segments


def sum_phases(segments: list[Segment]) -> dict[str, float]:
    """Return the seconds of each phase; empty without segments."""
    sums = dict.fromkeys(PHASES if segments else (), 0.0)
    for each in segments:
        sums[each.phase] += each.seconds
    return sums


def longest_action(segments: list[Segment], phases: Collection[str]) -> str:
    """Return the hook that takes longest of those in some phases, and its time; empty below a tenth of the step.

    The hooks of the Doctor itself are left out.
    """
    named = [each for each in segments if each.phase in phases and re.match(r"\[(?!Callback\]Doctor\.)", each.action)]
    longest = max(named, key=lambda each: each.seconds, default=None)
    if longest is None or 10 * longest.seconds < sum(each.seconds for each in segments):
        return ""
    return f"{longest.action.partition(']')[2]} ({longest.seconds * 1e3:.2f} ms)"


class Recorder:
    """Takes the place of the Trainer's profiler while the doctor is at work, and passes everything on to it.

    To others it is the profiler: it says to be of its class, and all but the actions is the profiler's own.

    Args:
        inner: The Trainer's own profiler.
        timeline: Gets the marks.
        on_step: Called whenever a step is over, before the next batch is fetched.
        on_batch: Called when a batch has been fetched, unless ``training_step`` does it.
        on_pause: Called when something begins that is no part of a step: validation, the end of an epoch.
    """

    def __init__(
        self,
        inner: Profiler,
        timeline: Timeline,
        on_step: Callable[[], None],
        on_batch: Callable[[], None],
        on_pause: Callable[[], None],
    ) -> None:
        self.inner, self.timeline = inner, timeline
        self.on_step, self.on_batch, self.on_pause = on_step, on_batch, on_pause
        self._stack: list[tuple[str, str]] = []
        # The phase of what runs between the outermost actions: "hooks" until on_train_batch_end, then "logging" until
        # the next batch.
        self._rest = "hooks"

    def forget(self) -> None:
        """Let go of all but the inner profiler: Lightning holds this object to the end of the epoch under way."""
        self.timeline = Timeline()
        self.on_step = self.on_batch = self.on_pause = _nothing

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copies, before there is an inner profiler
            raise AttributeError(name)
        return getattr(self.inner, name)

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

    def _begin(self, action: str) -> None:
        hook = action.rpartition(".")[2]
        # The fetch of the next batch is the one action that ends a step in automatic and in manual optimization alike;
        # where ``training_step`` fetches, it is the start of the next batch.
        if not self._stack and (hook == NEXT or (hook == "on_train_batch_start" and self._rest == "logging")):
            self._close_step()
            self.on_step()
            self._rest = "hooks"
            self.timeline.begin()
        elif "validation" in hook or hook.endswith("epoch_end"):
            self._leave_step(hook)
        elif hook == "on_after_backward" and self._stack[-1:] == [BACKWARD]:
            self._stack.pop()
        if action != EPOCH:
            self._stack.append((action, phase_of(action) or self._current()[1]))
            self.timeline.mark(*self._current())

    @property
    def phase(self) -> str:
        """The phase of the innermost action."""
        return self._current()[1]

    def _current(self) -> tuple[str, str]:
        return self._stack[-1] if self._stack else ("", self._rest)

    def _leave_step(self, hook: str) -> None:
        self.on_pause()
        if hook.endswith("epoch_end"):
            self._close_step()  # the last step of an epoch is over
        else:
            self.timeline.drop()

    def _close_step(self) -> None:
        # Of data without a length a batch is fetched ahead when an epoch begins: no training ends with that fetch.
        if self._rest == "logging":
            self.timeline.end()
        else:
            self.timeline.drop()

    def _end(self, action: str) -> None:
        names, hook = [name for name, _ in self._stack], action.rpartition(".")[2]
        # Actions that an exception left open end with the one around them.
        if action in names:
            del self._stack[names.index(action) :]
        if hook == "on_train_batch_end":
            self._rest = "logging"
        elif hook == "on_before_backward" and action.startswith("[LightningModule]"):
            self._stack.append(BACKWARD)
        self.timeline.mark(*self._current())
        # A watch that began within ``training_step`` would end in another order than what the user began there.
        if hook == NEXT and not self._stack:
            self.on_batch()


def _nothing() -> None:
    """Do nothing: what is called once nobody listens."""
