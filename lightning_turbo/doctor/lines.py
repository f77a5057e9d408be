"""From samples to the time of the user's lines: pure functions."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_turbo.doctor.facts import BOUNDS, LineTime, Site
from lightning_turbo.doctor.samples import Line
from lightning_turbo.doctor.timeline import Mark

__all__ = ["lines_of", "logging_of", "worker_lines"]

SHOWN = 3
"""Lines of one function that are named."""
OWN_SHARE = 0.1
"""Share of a function's time from which one of its lines is named."""
WAITS = 0.2
"""A line waits if the thread that runs it computes for a smaller share of its time. What the samples themselves compute
is a part of that: 0.04 of a line that sleeps on a quick machine, and more than 0.1 on a slow one."""
ENOUGH = 0.02
"""Seconds of samples in ``self.log`` from which its share of a phase is known."""
MOSTLY = 0.7
"""From this share on, a function's own time is torch's: other steps are watched than those that are sampled."""
OF_STEPS = ("steps", "first batch")


@dataclass(slots=True)
class _Sums:
    """The seconds of one function in one part and phase."""

    kinds: dict[str, float] = field(default_factory=dict)
    lines: dict[int, float] = field(default_factory=dict)
    calls: dict[int, dict[str, float]] = field(default_factory=dict)
    computing: float = 0.0

    def add(self, line: Line, seconds: float, computing: float) -> None:
        inner = line.kind in ("torch", "direct") and line.in_network
        _add(self.kinds, f"{line.kind} in network" if inner else line.kind, seconds)
        self.computing += computing
        if line.kind != "network":
            _add(self.lines, line.line, seconds)
            _add(self.calls.setdefault(line.line, {}), line.call, seconds)

    def time(self, key: _Key, divisor: float, torch: float) -> LineTime | None:
        """Return the times; ``torch`` are the seconds of torch's functions that the lines call by themselves."""
        if not self.lines:
            return None
        whole = sum(self.lines.values())
        own, outside = whole / divisor, 0.0
        if key.part == "validation" or key.phase in BOUNDS["compute"]:
            own, outside = self._split(divisor, torch)
        ranked = sorted(self.lines, key=lambda line: -self.lines[line])
        first, calls = ranked[0], self.calls[ranked[0]]
        named = [first, *(line for line in ranked[1:SHOWN] if self.lines[line] >= OWN_SHARE * whole)]
        return LineTime(
            sites=tuple(Site(file=key.file, line=line, function=key.function) for line in named),
            part=key.part,
            phase=key.phase,
            hook=key.hook,
            call=max(calls, key=lambda call: calls[call]),
            seconds=whole / divisor,
            own=own,
            torch=outside,
            waits=self.computing < WAITS * sum(self.kinds.values()),
            text=linecache.getline(key.file, first).strip(),
        )

    def _split(self, divisor: float, torch: float) -> tuple[float, float]:
        """Return the seconds that are not torch's work, and those of torch outside of the network."""
        kinds = {kind: seconds / divisor for kind, seconds in self.kinds.items()}
        direct, inside = kinds.get("direct", 0.0), kinds.get("direct in network", 0.0)
        of_torch = direct + inside if torch >= MOSTLY * (direct + inside) else torch
        outside = of_torch * direct / ((direct + inside) or 1.0)
        return direct + inside - of_torch + kinds.get("library", 0.0), outside + kinds.get("torch", 0.0)


def _add(sums: dict[Any, float], key: Any, seconds: float) -> None:
    sums[key] = sums.get(key, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class _Key:
    part: str
    phase: str
    hook: str
    file: str
    function: str


def lines_of(
    seconds: Mapping[tuple[int, Line], float],
    computing: Mapping[tuple[int, Line], float],
    marks: Sequence[Mark],
    counts: Callable[[int], bool],
    steps: int,
    torch: Mapping[str, Mapping[tuple[str, str], float]],
) -> tuple[LineTime, ...]:
    """Return the time of the lines of each function, part and phase, the most expensive first.

    Args:
        seconds: Of each mark and line.
        computing: The CPU time in these seconds.
        marks: The marks.
        counts: Returns whether the samples of a step count.
        steps: The number of steps that count and are complete.
        torch: Of "steps" and "validation", the seconds of torch's functions that each function calls by itself: in a
            step, and in all batches of validation.
    """
    sums: dict[_Key, _Sums] = {}
    for (index, line), spent in seconds.items():
        mark = marks[index]
        if not line.file or not _is_counted(mark, counts):
            continue
        key = _key_of(mark, line)
        sums.setdefault(key, _Sums()).add(line, spent, computing[index, line])
    found = []
    for key, each in sums.items():
        of_torch = torch.get(key.part, {}).get((key.file, key.function), 0.0)
        # A function's calls of torch are known for all of its phases together.
        found.append(each.time(key, max(steps, 1) if key.part == "steps" else 1, of_torch))
    return tuple(sorted(filter(None, found), key=lambda each: -each.seconds))


def _is_counted(mark: Mark, counts: Callable[[int], bool]) -> bool:
    return counts(mark.step) if mark.step >= 0 else mark.epoch > 0


def _key_of(mark: Mark, line: Line) -> _Key:
    part = "steps" if mark.step >= 0 and mark.part in OF_STEPS else mark.part
    phase = "logging" if line.logs else mark.phase
    hook = mark.hook if mark.phase == "hooks" and part in ("steps", "hooks") else ""
    return _Key(part, phase, hook, line.file, line.function)


def logging_of(
    seconds: Mapping[tuple[int, Line], float], marks: Sequence[Mark], counts: Callable[[int], bool]
) -> dict[str, float]:
    """Return the share of ``self.log`` in each phase of a step, where enough samples tell."""
    whole: dict[str, float] = {}
    logs: dict[str, float] = {}
    for (index, line), spent in seconds.items():
        mark = marks[index]
        if mark.step >= 0 and counts(mark.step):
            _add(whole, mark.phase, spent)
            if line.logs:
                _add(logs, mark.phase, spent)
    return {phase: spent / whole[phase] for phase, spent in logs.items() if spent >= ENOUGH}


def worker_lines(seconds: Mapping[Line, float], part: str, waiting: float) -> Iterable[LineTime]:
    """Return the lines of worker processes, for which the training process waits.

    Args:
        seconds: Of each line, in all worker processes.
        part: "steps" or "validation".
        waiting: The seconds that the training process waits for data, which the lines share.
    """
    total = sum(seconds.values())
    sums: dict[_Key, _Sums] = {}
    for line, spent in seconds.items():
        key = _Key(part, "data", "", line.file, line.function)
        kind = "network" if line.kind == "network" else "library"  # a worker process has no network to compute
        sums.setdefault(key, _Sums()).add(line._replace(kind=kind), spent, spent)
    for key, each in sums.items():
        found = each.time(key, total / waiting if waiting else float("inf"), 0.0)
        if found is not None:
            yield replace(found, where="in worker processes")
