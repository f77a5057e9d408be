"""The promise: how much of a script is trained to show what some settings bring, and what that has shown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_turbo.measure import interval_of, three_digits
from lightning_turbo.tune.candidates import Look

__all__ = [
    "ACCEPTED",
    "FEWEST",
    "MOST",
    "Promise",
    "Stretch",
    "describe_epoch",
    "minutes_for",
    "plan",
    "ratio_of",
    "screening",
]

FEWEST, MOST = 4, 10  # pairs of processes; the number is fixed before the first one
ACCEPTED = 3  # pairs that count if the time was over before the last one
LEAST = 100  # steps, where no whole epoch fits
ENOUGH = 3.0  # seconds; shorter epochs are repeated up to this in each process
TURN = 1.0  # seconds after which two processes take turns
SCREENED = 1.2  # seconds of a screening, which takes a whole epoch up to twice as long


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps that each process trains, one after another, with everything that lies between them."""

    steps: int
    pairs: int = 1  # of processes
    is_whole: bool = False  # whether these are whole epochs with their validation
    turns: int = 1  # into which the steps are divided, while another process is held

    @property
    def rounds(self) -> list[int]:
        """Steps of each turn."""
        each, more = divmod(self.steps, self.turns)
        return [each + (turn < more) for turn in range(self.turns)]

    @property
    def what(self) -> str:
        """What is trained, in words."""
        return "whole epochs with their validation" if self.is_whole else f"stretches of {self.steps} equal steps"

    def __str__(self) -> str:
        return f"{self.pairs} pairs of {self.what}"


def screening(look: Look) -> Stretch:
    """Return what each process of the screening trains: whole epochs if they are short, otherwise a second or so."""
    steps = _windows(SCREENED / look.pace, look)
    if look.period and look.period <= 2 * steps:
        steps = look.period * max(1, round(steps / look.period))
    return Stretch(steps=steps, turns=min(steps, 4))


def plan(look: Look, seconds: float, start: float) -> Stretch:
    """Return the longest stretch for which there is time.

    Args:
        look: The script as it is.
        seconds: Time for all pairs.
        start: Seconds until a process trains.
    """
    fits = int((seconds / (2 * FEWEST) - start) / look.pace)
    steps, is_whole = max(LEAST, fits), False
    if look.period and look.period <= steps:
        several = min(fits // look.period, round(ENOUGH / look.pace / look.period))
        steps, is_whole = look.period * max(1, several), True
    steps = steps if is_whole else _windows(steps, look)
    pairs = int(seconds / (2 * (start + steps * look.pace)))
    turns = max(1, min(steps, round(steps * look.pace / TURN)))
    return Stretch(steps=steps, pairs=max(FEWEST, min(pairs, MOST)), is_whole=is_whole, turns=turns)


def _windows(steps: float, look: Look) -> int:
    """Return about as many steps, in whole windows of accumulated batches."""
    return look.accumulate * max(1, round(steps / look.accumulate))


def describe_epoch(look: Look, stretch: Stretch, minutes: float, start: float) -> str:
    """Return in words what a whole epoch takes, and whether there is time to promise anything of it."""
    if look.period is None:
        return (
            "Lightning does not know how many batches an epoch has, and none ended so far: the promise will be of "
            f"stretches of {stretch.steps} steps."
        )
    what = "with its validation" if look.is_seen else "without its validation, which was not seen,"
    text = f"A whole epoch {what} takes about {three_digits(look.seconds)} s ({look.period} batches)"
    needed, epochs = minutes_for(look, stretch, start), minutes_for(look, Stretch(steps=look.period), start)
    whole = f"whole epochs need --minutes {math.ceil(epochs)}"
    # A stretch is as long as there is time for, to the last step.
    if needed > minutes + 0.1:
        least = "" if stretch.is_whole else f"{stretch.what} need --minutes {math.ceil(needed)}, "
        return f"{text}: {minutes:.3g} minutes may not be enough to promise anything; {least}{whole}."
    if stretch.is_whole:
        return f"{text}: the promise will be of whole epochs."
    return (
        f"{text}: the promise will be of stretches of {stretch.steps} steps, as {minutes:.3g} minutes are not enough "
        f"for more; {whole}."
    )


def minutes_for(look: Look, stretch: Stretch, start: float) -> float:
    """Return the ``--minutes`` in which there is time for the pairs of a promise, and as much for the screening."""
    return 2 * 2 * FEWEST * (start + stretch.steps * look.pace) / 60


def ratio_of(row: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """Return the logarithm of the ratio of two processes' times over the rounds that both measured."""
    theirs = {part["sweep"]: part["seconds"] for part in other["rounds"]}
    both = [(part["seconds"], theirs[part["sweep"]]) for part in row["rounds"] if part["sweep"] in theirs]
    if not both:
        return None
    mine, others = (sum(seconds) for seconds in zip(*both, strict=True))
    return math.log(mine / others)


@dataclass
class Promise:
    """What pairs of processes showed: one with some settings and one with the script as it is, taking turns."""

    names: Sequence[str] = ()
    stretch: Stretch | None = None
    logs: list[float] = field(default_factory=list)  # log ratio of the times in each pair
    seconds: list[tuple[float, float]] = field(default_factory=list)  # of each pair, without and with the settings
    error: str = ""

    @property
    def factor(self) -> float:
        """How many times as fast, in the middle."""
        return math.exp(-statistics.fmean(self.logs)) if self.logs else math.nan

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the factor, over the pairs; its lower end is what is promised."""
        ratios = interval_of(self.logs)
        return None if ratios is None else (1 / ratios[1], 1 / ratios[0])

    @property
    def is_kept(self) -> bool:
        """Whether there is a gain beyond noise."""
        return not self.error and len(self.logs) >= ACCEPTED and self.interval is not None and self.interval[0] > 1.0

    def __str__(self) -> str:
        """Return the promise in words; undecided if the interval reaches 1."""
        if self.interval is None:
            return "not measured"
        low, high = self.interval
        measured = f"{self.factor:.2f} times as fast (95 % interval {low:.2f} to {high:.2f}, {len(self.logs)} "
        measured += f"{str(self.stretch).partition(' ')[2]})"
        if self.is_kept:
            return f"at least {low:.2f} and about {measured}"
        return f"no gain: {measured}" if high < 1.0 else f"undecided: {measured}"
