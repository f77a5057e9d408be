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


class StepTiming(Listener):
    """Times the steps that a plan has timed.

    Who starts it: the clock, with the first step that the plan times. What ends it: that the plan times no more. What
    always holds: ``steps`` has the marks of whole steps only.

    On CUDA the marks are events on the current stream, which cost no wait: a phase then lasts as long as the device
    took from one event to the next, idling included.

    Args:
        plan: The steps to time.
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
        """Mark what begins; nothing happens outside of a timed step."""
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
        """Forget the step that was begun."""
        self._open = None

    def each_step(self) -> list[dict[tuple[str, str], float]]:
        """Return the seconds of each action and phase in each of the timed steps.

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

    def mean(self) -> float:
        """Return the seconds of the mean step by the host's clock; 0 without a step."""
        return sum(marks[-1].host - marks[0].host for marks in self.steps) / max(len(self.steps), 1)

    def mean_step(self) -> list[Segment]:
        """Return the mean of the timed steps: a segment for each action, sorted by phase; none without a step."""
        sums: dict[tuple[str, str], float] = {}
        for key, seconds in chain.from_iterable(step.items() for step in self.each_step()):
            sums[key] = sums.get(key, 0.0) + seconds
        segments, start = [], 0.0
        order = list(PHASES)
        for (action, phase), total in sorted(sums.items(), key=lambda item: order.index(item[0][1])):
            segments.append(Segment(action, phase, start, total / len(self.steps)))
            start += segments[-1].seconds
        return segments


def typical_seconds(steps: Sequence[dict[tuple[str, str], float]], place: int) -> dict[str, float]:
    """Return the median seconds of a step by action or by phase: one step that was interrupted tells nothing.

    Args:
        steps: The seconds of each action and phase, of each step.
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
    """Return the hook that takes longest of those in some phases, and its time; empty below a tenth of the step.

    The hooks of the Doctor itself are left out.
    """
    named = [each for each in segments if each.phase in phases and re.match(r"\[(?!Callback\]Doctor\.)", each.action)]
    longest = max(named, key=lambda each: each.seconds, default=None)
    if longest is None or 10 * longest.seconds < sum(each.seconds for each in segments):
        return ""
    return f"{longest.action.partition(']')[2]} ({longest.seconds * 1e3:.2f} ms)"
