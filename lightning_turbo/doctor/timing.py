"""How long the timed steps take, by phase and action."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median
from typing import Any

import torch

from lightning_turbo.doctor.clock import PHASES, Listener, Moment, Plan

__all__ = ["Segment", "StepTiming", "longest_action", "sum_phases", "typical_seconds"]


@dataclass(frozen=True, slots=True)
class Segment:
    """The time of one action in the mean step, in seconds; ``start`` is its position in the picture."""

    action: str
    phase: str
    start: float
    seconds: float


@dataclass(slots=True)
class _Mark:
    """The time at which the innermost action became ``action``."""

    action: str
    phase: str
    host: float
    device: Any  # a CUDA event, None on the CPU

    def seconds_to(self, after: _Mark) -> float:
        return self.device.elapsed_time(after.device) / 1e3 if self.device else after.host - self.host


class StepTiming(Listener):
    """Measures the timed steps of a plan.

    It measures from the first step that the plan times to the last. ``steps`` contains only complete steps.

    On CUDA the marks are events on the current stream, which do not synchronize: a phase lasts as long as the device
    took between two events, including idle time.

    Args:
        plan: The plan of steps.
        cuda: Whether the run is on a CUDA device.
    """

    def __init__(self, plan: Plan, cuda: bool = False) -> None:
        self.plan = plan
        self.cuda = cuda
        self.steps: list[list[_Mark]] = []
        self._open: list[_Mark] | None = None

    def begin_step(self, step: int) -> None:
        """Begin a step, if it is to be timed."""
        self._open = [] if self.plan.times(step) else None

    def enter(self, moment: Moment, before: str | None) -> None:
        """Mark what begins, inside a timed step."""
        if self._open is not None:
            event = torch.cuda.Event(enable_timing=True) if self.cuda else None
            if event is not None:
                event.record()
            self._open.append(_Mark(moment.action, moment.phase, time.perf_counter(), event))

    def end_step(self, step: int) -> None:
        """End the step and keep it."""
        if self._open is not None:
            self.enter(Moment("steps", "hooks"), None)
            self.steps.append(self._open)
        self._open = None

    def drop_step(self, step: int) -> None:
        """Discard the step."""
        self._open = None

    def each_step(self) -> list[dict[tuple[str, str], float]]:
        """Return the seconds of each action and phase in each timed step.

        Note:
            On CUDA this synchronizes once.
        """
        if self.cuda:
            torch.cuda.synchronize()
        steps: list[dict[tuple[str, str], float]] = [{} for _ in self.steps]
        for sums, marks in zip(steps, self.steps, strict=True):
            for mark, after in pairwise(marks):
                key = mark.action, mark.phase
                sums[key] = sums.get(key, 0.0) + mark.seconds_to(after)
        return steps

    def mean(self) -> float:
        """Return the seconds of the mean step by the host's clock; 0 without a step."""
        return sum(marks[-1].host - marks[0].host for marks in self.steps) / max(len(self.steps), 1)

    def mean_step(self) -> list[Segment]:
        """Return the mean of the timed steps: a segment for each action, sorted by phase; none without a step."""
        sums: dict[tuple[str, str], float] = {}
        for key, seconds in chain.from_iterable(step.items() for step in self.each_step()):
            sums[key] = sums.get(key, 0.0) + seconds
        segments = []
        start = 0.0
        order = list(PHASES)
        for (action, phase), total in sorted(sums.items(), key=lambda item: order.index(item[0][1])):
            segments.append(Segment(action, phase, start, total / len(self.steps)))
            start += segments[-1].seconds
        return segments


def typical_seconds(steps: Sequence[dict[tuple[str, str], float]], place: int) -> dict[str, float]:
    """Return the median seconds per step of each action or phase, which ignores single interrupted steps.

    Args:
        steps: The seconds of each action and phase, for each step.
        place: 0 for actions, 1 for phases.
    """
    sums: list[dict[str, float]] = [{} for _ in steps]
    for each, step in zip(sums, steps, strict=True):
        for key, seconds in step.items():
            each[key[place]] = each.get(key[place], 0.0) + seconds
    names = dict.fromkeys(name for each in sums for name in each)
    return {name: median(each.get(name, 0.0) for each in sums) for name in names}


def sum_phases(segments: list[Segment]) -> dict[str, float]:
    """Return the seconds of each phase; empty without segments."""
    sums = dict.fromkeys(PHASES if segments else (), 0.0)
    for each in segments:
        sums[each.phase] += each.seconds
    return sums


def longest_action(segments: list[Segment], phases: Collection[str]) -> str:
    """Return the slowest hook of some phases and its time; empty if below a tenth of the step.

    The Doctor's own hooks are excluded.
    """
    named = [each for each in segments if each.phase in phases and re.match(r"\[(?!Callback\]Doctor\.)", each.action)]
    longest = max(named, key=lambda each: each.seconds, default=None)
    if longest is None or 10 * longest.seconds < sum(each.seconds for each in segments):
        return ""
    return f"{longest.action.partition(']')[2]} ({longest.seconds * 1e3:.2f} ms)"
