"""Configurations, comparisons of two configurations, and what their losses show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_turbo.measure import interval_of, log_quotients, seconds_by_sweep
from lightning_turbo.tune.candidates import SMALL_SHARE

__all__ = ["DEFAULT", "Comparison", "Configuration", "compare_losses", "epoch_by_sweep", "epoch_parts"]

MOST = 12  # largest number of pairs of processes in a comparison


@dataclass(frozen=True)
class Configuration:
    """What one process measures.

    Args:
        names: Names of candidates, in the order of the table; empty for the unchanged script.
        mode: ``"step"``, ``"one batch"`` or ``"loader"``, see ``probe.Probe``; ``"epoch"``, see ``probe.WholeEpoch``.
    """

    names: tuple[str, ...] = ()
    mode: str = "step"
    batch_size: int = 0  # of the training loaders; 0 keeps the script's

    def __str__(self) -> str:
        if self.batch_size:
            return f"batch size {self.batch_size}"
        names = " + ".join(self.names)
        return names or "default" if self.mode == "step" else f"{self.mode} with {names}" if names else self.mode

    def without(self, name: str) -> Configuration:
        """Return this configuration without one of its candidates."""
        return Configuration(tuple(each for each in self.names if each != name))


DEFAULT = Configuration()


def epoch_parts(row: Mapping[str, Any]) -> tuple[int, float, float] | None:
    """Return the parts of an epoch that a process measured: batches, seconds of its border and of its validations.

    ``None`` if the length of an epoch is unknown. If a process has seen no border, it is among the steps.
    """
    numbers = row["numbers"]
    facts = numbers.get("facts", {})
    if not facts.get("batches"):
        return None
    borders, validations = numbers.get("borders", []), numbers.get("validations", [])
    validation = facts.get("validations", 0.0) * statistics.median(validations) if validations else 0.0
    return facts["batches"], statistics.median(borders) if borders else 0.0, validation


def epoch_by_sweep(row: Mapping[str, Any], batches: int) -> dict[int, float]:
    """Return the seconds per epoch of this many batches, for each round of a row."""
    _, border, validation = epoch_parts(row) or (batches, 0.0, 0.0)
    steps = batches - bool(border)
    return {sweep: steps * seconds + border + validation for sweep, seconds in seconds_by_sweep(row).items()}


@dataclass
class Comparison:
    """One configuration compared with another, process by process, by epoch times.

    If the length of an epoch was unknown in any of the processes, all of them are compared by step times.
    """

    logs: list[float] = field(default_factory=list)  # log ratio of the times in each pair of processes
    of_steps: list[float] = field(default_factory=list)  # the same for step times
    of_epochs: bool = True  # whether ``logs`` are of epochs, and not of steps
    error: str = ""  # why there are no more pairs: the error of a process
    no_effect: str = ""  # this package's own warning that the first has no effect
    refused: bool = False  # whether it cannot be measured at all, as opposed to a failure
    losses: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # of numerator and denominator

    @property
    def ratio(self) -> float:
        """The time of the first divided by that of the second; infinite before anything is measured."""
        return math.exp(statistics.fmean(self.logs)) if self.logs else math.inf

    @property
    def step_ratio(self) -> float:
        """The ratio of the step times."""
        return math.exp(statistics.fmean(self.of_steps)) if self.of_steps else self.ratio

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio; requires two pairs of processes."""
        return interval_of(self.logs)

    @property
    def gains(self) -> bool:
        """Whether the upper end of the interval is below 1."""
        return not self.no_effect and self.interval is not None and self.interval[1] < 1.0

    @property
    def decided(self) -> bool:
        """Whether further processes are not worthwhile: it gains, gains almost nothing, fails, or has enough pairs."""
        if self.error or self.no_effect or self.gains or len(self.logs) >= MOST:
            return True
        return self.interval is not None and self.interval[0] > 1.0 - SMALL_SHARE

    def __str__(self) -> str:
        """Return the speedup with its interval."""
        if not self.logs:
            return "not measured"
        spread = f"{1 / self.interval[1]:.2f} to {1 / self.interval[0]:.2f}" if self.interval else "in one process"
        epoch = f"{1 / self.ratio:.2f}"
        step = f"{1 / self.step_ratio:.2f}"
        if not self.of_epochs:
            return f"a step {step} times as fast ({spread})"
        return f"{epoch} times as fast ({spread}{'' if step == epoch else f'; a step {step}'})"

    def add(self, above: Mapping[str, Any], below: Mapping[str, Any], *, steps_only: bool = False) -> None:
        """Add a pair of processes; ``steps_only`` compares step times alone."""
        if above["status"] != "ok":
            self.error = (above["reason"] or above["status"]).rstrip(".")
            self.refused = above["status"] == "skipped"
            return
        steps = log_quotients(above, below)  # none if the other process failed
        if steps_only:
            self.logs += steps
        elif steps:
            self._add_epoch(steps, above, below)
        self.losses = above["numbers"].get("losses", []), below["numbers"].get("losses", [])

    def _add_epoch(self, steps: list[float], above: Mapping[str, Any], below: Mapping[str, Any]) -> None:
        """Add a pair by epoch times. Both have the denominator's length, which may depend on what the model does."""
        self.of_steps += steps
        length = epoch_parts(below)
        self.of_epochs = self.of_epochs and None not in (epoch_parts(above), length)
        if self.of_epochs and length is not None:
            self.logs += log_quotients(above, below, lambda row: epoch_by_sweep(row, length[0]))
        else:
            self.logs = list(self.of_steps)


def compare_losses(losses: Sequence[float | None], other: Sequence[float | None]) -> str:
    """Return what the losses of the first steps show about two runs with the same seed.

    Either ``"same bits"``, ``"rounding"`` (the first three agree to 1e-4), ``"other maths"``, or an empty string if
    there is nothing to compare.
    """
    pairs = list(zip(losses, other, strict=False))
    if all(one == two for one, two in pairs):
        return "same bits" if pairs else ""
    return "rounding" if all(_near(one, two) for one, two in pairs[:3]) else "other maths"


def _near(one: float | None, two: float | None) -> bool:
    return one is not None and two is not None and math.isclose(one, two, rel_tol=1e-4, abs_tol=1e-6)
