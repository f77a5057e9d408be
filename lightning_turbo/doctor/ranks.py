"""What each rank of a run spends its time on, and which rank the others wait for."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lightning_turbo.doctor.clock import Listener, Moment, Plan
from lightning_turbo.doctor.facts import NOTICEABLE, WAITING, Rank, Site
from lightning_turbo.doctor.source import Sources
from lightning_turbo.doctor.timing import StepTiming
from lightning_turbo.measure import interval_of

__all__ = ["RankTiming", "Slow", "find_slow", "rank_facts", "start_of_process"]

CAUSES = ("data", "copy", "hooks", "logging", "optimizer", "forward")
"""Phases in which a rank may be slow; those in which it hardly ever waits for others come first. Backward is not among
them, because gradients are reduced in it, nor is time in Lightning's loop without a hook, where ranks exchange signals.
"""
_ENDED_BY = {
    "setup": "setting up the data",
    "on_fit_start": "setting up the model",
    "on_validation_start": "",
    "on_train_start": "",
    "on_validation_batch_end": "validation",
}
"""A hook -> the part of the time that ends where the hook begins; empty if it belongs to nobody."""
LATE = 1.0
"""Seconds before or between the steps that are worth reporting; a choice, above the variation of imports."""


class RankTiming(Listener):
    """Measures the time before and between the steps by cause; the ranks' clocks are never compared.

    It starts when fit begins, before this rank meets the others, because afterwards nobody can tell who was late. It
    ends with the last timed step, after which the ranks leave one by one. The seconds add up to the time since
    ``begin``.

    Args:
        begin: When the time before fit started, as in ``time.time``.
        plan: The planned steps.
    """

    def __init__(self, begin: float, plan: Plan) -> None:
        self.seconds: dict[str, float] = {}
        self._plan = plan
        self._last = begin
        self._is_over = False

    def begin_fit(self) -> None:
        """End the time before fit."""
        self._end("before fit")

    def enter(self, moment: Moment, before: str | None) -> None:
        """End a part of the time when the next one begins."""
        part = _ENDED_BY.get(moment.action.rpartition(".")[2])
        if part is not None:
            self._end(part)

    def fetched(self, step: int) -> None:
        """End the time of a batch: the first one counts separately, others are part of their step."""
        self._end("" if step else "the first batch")

    def end_step(self, step: int) -> None:
        """End a step."""
        self._end("")
        self._is_over = step + 1 >= self._plan.warmup + self._plan.timed

    def _end(self, part: str) -> None:
        if not self._is_over:
            now = time.time()
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
            self._last = now


def start_of_process() -> float:
    """Return when this process started, as in ``time.time``; the current time if the system is not Linux."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return time.time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def rank_facts(
    timeline: StepTiming, outside: dict[str, float], owners: Sequence[object], sources: Sources, loader: Site | None
) -> Rank:
    """Return what this rank spent its time on.

    Args:
        timeline: The timed steps.
        outside: The seconds before and between the steps.
        owners: The LightningModule, the DataModule (or ``None``) and the callbacks.
        sources: Finds their lines.
        loader: The line that creates the training loader.
    """
    steps: list[dict[str, float]] = []
    hooks: dict[str, float] = {}
    for step in timeline.each_step():
        steps.append({})
        for (action, phase), seconds in step.items():
            mine = action.startswith("[") and not action.startswith("[Callback]Doctor.")
            part = phase if mine or phase not in ("hooks", "logging") else "loop"
            steps[-1][part] = steps[-1].get(part, 0.0) + seconds
            if mine and phase == "hooks":
                hooks[action] = hooks.get(action, 0.0) + seconds
    owner, _, hook = max(hooks, key=lambda each: hooks[each], default="").partition("]")[2].rpartition(".")
    called = (sources.method(each, hook) for each in owners if type(each).__name__ == owner.partition("{")[0])
    sites = {"hooks": next(called, None), "forward": sources.method(owners[0], "training_step")}
    sites |= {"data": loader, "the first batch": loader, "validation": sources.method(owners[0], "validation_step")}
    sites |= {"setting up the data": sources.method(owners[1], "setup")}
    sites |= {"setting up the model": sources.method(owners[0], "setup")}
    return Rank(steps=tuple(steps), outside=outside, hook=f"{owner}.{hook}", sites=sites)


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank for which others wait."""

    rank: int
    place: str  # what takes longer: a phase or a part of ``Rank.outside``
    factor: float  # relative to the others, infinite if they take no time
    seconds: float  # longer than the others
    interval: tuple[float, float]  # 95 % interval of ``seconds``; for a single event both ends are equal
    at: str  # where the others wait
    waited: float  # seconds by which they take longer there
    once: bool  # before or between the steps, not in each step


def find_slow(ranks: Sequence[Rank]) -> list[Slow]:
    """Return the ranks that others wait for: in each step, and before or between the steps.

    A longer time is the cause if it comes first and a longer time of the others follows, in which they wait. Inside a
    step, the difference to the other ranks is taken step by step; the lower end of its 95 % interval must exceed
    ``WAITING`` of the step and ``NOTICEABLE``, which a few slow steps on a busy machine do not reach.
    """
    count = min((len(each.steps) for each in ranks), default=0)
    steps = [each.steps[:count] for each in ranks] if count > 1 else []
    outside = [name for name in (ranks[0].outside if ranks else ()) if name]
    return _first(steps, CAUSES) + _first([(each.outside,) for each in ranks], outside)


def _first(times: Sequence[Sequence[dict[str, float]]], places: Sequence[str]) -> list[Slow]:
    """Return the slow ranks at the first place that has any."""
    # One entry per rank for the time outside the steps, or one per timed step.
    found = ([_slow(times, rank, place) for rank in range(len(times))] for place in places)
    return next(filter(None, ([each for each in slow if each is not None] for slow in found)), [])


def _slow(times: Sequence[Sequence[dict[str, float]]], rank: int, place: str) -> Slow | None:
    # Step by step, because a busy machine slows the same steps of all its ranks, which cancels out.
    others = [_column(each, place) for other, each in enumerate(times) if other != rank]
    own, usual = _column(times[rank], place), [median(row) for row in zip(*others, strict=True)]
    more = [mine - theirs for mine, theirs in zip(own, usual, strict=True)]
    low, high = (more[0], more[0]) if len(more) == 1 else map(math.log, interval_of(more) or (1.0, 1.0))
    at, waited = _waiting(times, rank, _after(times, rank, place))
    # A longer time alone makes nobody wait: the others must lose at least half of it somewhere else.
    if low <= _limit(usual, times[rank]) or 2 * waited <= fmean(more):
        return None
    factor = fmean(own) / fmean(usual) if any(usual) else math.inf
    return Slow(rank, place, factor, fmean(more), (low, high), at, waited, len(more) == 1)


def _limit(usual: list[float], own: Sequence[dict[str, float]]) -> float:
    """Return the seconds above which a difference counts."""
    if len(own) == 1:
        return max(LATE, usual[0] / 2)
    return max(NOTICEABLE, WAITING * fmean(sum(step.values()) for step in own))


def _after(times: Sequence[Sequence[dict[str, float]]], rank: int, place: str) -> set[str]:
    """Return where others may wait for what a rank does at ``place``: before the steps only at later places."""
    names = list(times[rank][0])
    if len(times[rank]) == 1:
        # A rank that never reached a place, for example without batches to validate, keeps nobody waiting.
        return {*names[names.index(place) + 1 :], ""} if place in names else set()
    return {name for each in times for step in each for name in step} - {place}


def _waiting(times: Sequence[Sequence[dict[str, float]]], rank: int, places: set[str]) -> tuple[str, float]:
    """Return the place at which the others take longest beyond a rank, and the mean seconds."""
    means = {}
    for at in places:
        seconds = [fmean(_column(each, at)) for each in times]
        means[at] = median(seconds[:rank] + seconds[rank + 1 :]) - seconds[rank]
    return max(means.items(), key=lambda item: item[1], default=("", 0.0))


def _column(times: Sequence[dict[str, float]], place: str) -> list[float]:
    return [each.get(place, 0.0) for each in times]
