"""What is measured and what is known of it: cases, comparisons of two cases, and what the losses say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_turbo.measure import interval_of, log_quotients
from lightning_turbo.tune.candidates import SMALL_SHARE

__all__ = ["DEFAULT", "Case", "Comparison", "compare_losses"]

MOST = 12  # pairs of processes, after which a comparison stays as it is


@dataclass(frozen=True)
class Case:
    """What a process measures.

    Args:
        names: Of candidates, in the order of the table; none is the script as it is.
        mode: ``"step"``, ``"one batch"`` or ``"loader"``, see ``probe.Probe``; ``"epoch"``, see ``probe.WholeEpoch``.
    """

    names: tuple[str, ...] = ()
    mode: str = "step"
    batch_size: int = 0  # of the training loaders; 0 leaves the script's

    def __str__(self) -> str:
        if self.batch_size:
            return f"batch size {self.batch_size}"
        names = " + ".join(self.names)
        return names or "default" if self.mode == "step" else f"{self.mode} with {names}" if names else self.mode

    def without(self, name: str) -> Case:
        """Return this case without one of its candidates."""
        return Case(tuple(each for each in self.names if each != name))


DEFAULT = Case()


@dataclass
class Comparison:
    """One case against another, process by process."""

    logs: list[float] = field(default_factory=list)  # logarithm of the ratio of their times in each pair of processes
    error: str = ""  # why there are no more: what a process said that failed
    refused: bool = False  # whether it cannot be measured at all, rather than that it broke
    losses: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # above and below the line

    @property
    def ratio(self) -> float:
        """The time of the one divided by that of the other; infinite before anything is measured."""
        return math.exp(statistics.fmean(self.logs)) if self.logs else math.inf

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio, from two pairs of processes on."""
        return interval_of(self.logs)

    @property
    def gains(self) -> bool:
        """Whether the upper end of the interval is below 1."""
        return self.interval is not None and self.interval[1] < 1.0

    @property
    def decided(self) -> bool:
        """Whether further processes are not worth their time: it gains, gains next to nothing, fails, or had enough."""
        if self.error or self.gains or len(self.logs) >= MOST:
            return True
        return self.interval is not None and self.interval[0] > 1.0 - SMALL_SHARE

    def __str__(self) -> str:
        """The factor, and its interval."""
        if not self.logs:
            return "not measured"
        spread = f"{1 / self.interval[1]:.2f} to {1 / self.interval[0]:.2f}" if self.interval else "in one process"
        return f"{1 / self.ratio:.2f} times as fast ({spread})"

    def add(self, above: Mapping[str, Any], below: Mapping[str, Any]) -> None:
        """Add a pair of processes."""
        if above["status"] != "ok":
            self.error = (above["reason"] or above["status"]).rstrip(".")
            self.refused = above["status"] == "skipped"
            return
        self.logs += log_quotients(above, below)
        self.losses = above["numbers"].get("losses", []), below["numbers"].get("losses", [])


def compare_losses(losses: Sequence[float | None], other: Sequence[float | None]) -> str:
    """Return what the losses of the first steps say of two runs with the same seed.

    It is ``"same bits"``, ``"rounding"`` (the first three agree to 1e-4), ``"other maths"``, or an empty text where
    there is nothing to compare.
    """
    pairs = list(zip(losses, other, strict=False))
    if all(one == two for one, two in pairs):
        return "same bits" if pairs else ""
    return "rounding" if all(_near(one, two) for one, two in pairs[:3]) else "other maths"


def _near(one: float | None, two: float | None) -> bool:
    return one is not None and two is not None and math.isclose(one, two, rel_tol=1e-4, abs_tol=1e-6)
