"""Where the time of a whole fit goes: what was measured, projected to the epochs that it will run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lightning_turbo.doctor.clock import PARTS, EpochCount, Listener, Moment
from lightning_turbo.doctor.facts import FitFacts, HookTime, PartTime, Site

__all__ = ["FitTiming", "Length", "Projection", "fit_length"]

ONCE = ("set-up", "sanity check")
OF_VALIDATION = ("validation start", "metrics")
"""Parts that occur once per validation."""
SHORTEST = 1e-3
"""Hooks that take fewer seconds per epoch are not named."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long the script lets a fit be; ``math.inf`` if unknown.

    Attributes:
        epochs: Number of epochs.
        batches: Batches per epoch.
        validations: Validations per epoch; below 1 if not every epoch has one.
        validated: Batches per validation.
    """

    epochs: float = math.inf
    batches: float = math.inf
    validations: float = 0.0
    validated: float = 0.0


def fit_length(trainer: Any, epochs: float) -> Length:
    """Return how long a Trainer that is about to train will fit; ``epochs`` is counted from its settings."""
    batches = trainer.num_training_batches
    every = trainer.check_val_every_n_epoch
    limits = trainer.num_val_batches if trainer.enable_validation else []
    between = trainer.val_check_batch
    # None means validation by wall-clock time, infinity one at the end of an epoch of unknown length.
    validations = batches / between if between and batches < math.inf and between < math.inf else 1.0
    if every is not None:
        validations = max(1.0, math.floor(validations)) / every
    validated = sum(limits)
    return Length(epochs, batches, validations if validated else 0.0, validated)


class FitTiming(Listener):
    """Sums up the seconds of a fit by epoch, part and action.

    The clock notifies it from the beginning of fit until the clock stops. Every moment in between is counted once, for
    the part that is running.
    """

    def __init__(self) -> None:
        self.seconds: list[dict[tuple[str, str], float]] = [{}]  # one before the first epoch, then one per epoch
        self._last = 0.0
        self._moment = Moment("set-up", "hooks")

    def begin_fit(self) -> None:
        """Start counting."""
        self._last = time.perf_counter()

    def enter(self, moment: Moment, before: str | None) -> None:
        """Count the time since the last event."""
        now = time.perf_counter()
        key = (before, "") if before else (self._moment.part, self._moment.action)
        self.seconds[-1][key] = self.seconds[-1].get(key, 0.0) + now - self._last
        self._last = now
        self._moment = moment

    def begin_epoch(self) -> None:
        """Count the following time for the next epoch."""
        self.enter(self._moment, None)
        self.seconds.append({})

    def part(self, epoch: int, *parts: str) -> float:
        """Return the seconds of some parts in an epoch, from 1; 0 is the time before the first one."""
        return sum(seconds for (part, _), seconds in self.seconds[epoch].items() if part in parts)

    def watched(self, part: str) -> float:
        """Return the total seconds of a part."""
        return sum(self.part(epoch, part) for epoch in range(len(self.seconds)))

    def actions(self, *parts: str) -> dict[str, float]:
        """Return the total seconds of each action in some parts, over all epochs."""
        sums: dict[str, float] = {}
        for (part, action), seconds in chain.from_iterable(each.items() for each in self.seconds[1:]):
            if part in parts and action:
                sums[action] = sums.get(action, 0.0) + seconds
        return sums


@dataclass(frozen=True, slots=True)
class Projection:
    """Projects the parts of a fit from what was measured of it.

    Attributes:
        timing: The measured times.
        counts: The counts of each epoch that was seen, even partly; at least one.
        length: How long the fit will be.
        step: Seconds of the mean timed step; 0 if none was timed.
        starts_again: Whether each epoch restarts its worker processes.
        most: Number of batches after which the Doctor may have ended the first epoch.
    """

    timing: FitTiming
    counts: Sequence[EpochCount]
    length: Length
    step: float
    starts_again: bool
    most: float = math.inf

    @property
    def has_border(self) -> bool:
        """Whether the first batch of a second epoch was seen."""
        return len(self.counts) > 1 and self.timing.part(2, "first batch") > 0

    @property
    def batches(self) -> float:
        """Batches per epoch; those of the first one if the Trainer does not know their number."""
        return self.length.batches if self.length.batches < math.inf else self.counts[0].steps

    @property
    def knows_length(self) -> bool:
        """Whether the length of an epoch is known: the Trainer knows it, or the first epoch ended by itself."""
        first = self.counts[0]
        return self.length.batches < math.inf or (first.ended and first.steps < self.most)

    @property
    def ended(self) -> int:
        """Number of epochs whose end was seen; at least one."""
        return max(sum(count.ended for count in self.counts), 1)

    @property
    def saves(self) -> float:
        """Checkpoints per epoch: those inside steps scale with the steps, the others occur once per epoch."""
        steps, in_steps = self.count("steps"), self.count("saves_in_steps")
        return in_steps * self.batches / max(steps, 1) + (self.count("saves") - in_steps) / self.ended

    def count(self, name: str) -> int:
        """Return a count summed over all epochs."""
        return sum(getattr(each, name) for each in self.counts)

    def in_epochs(self, part: str) -> float:
        """Return the seconds of a part summed over all epochs."""
        return sum(self.timing.part(epoch, part) for epoch in range(1, len(self.counts) + 1))

    def start(self, part: str) -> float:
        """Return the cost of starting an epoch, from the second epoch if it was seen, otherwise from the first."""
        if self.has_border:
            return self.timing.part(2, part)
        if part == "start" and not self.starts_again:
            return 0.0
        return self.timing.part(0, part) + self.timing.part(1, part)

    def each(self, part: str) -> float:
        """Return the seconds of a part per epoch."""
        if part in ONCE:
            return 0.0
        if part in ("start", "first batch"):
            return self.start(part)
        if part == "steps":
            return self.batches * (self.step or self.in_epochs(part) / max(self.count("steps"), 1))
        if part == "validation":
            per_batch = self.in_epochs(part) / max(self.count("validated"), 1)
            whole = self.length.validated if self.length.validated < math.inf else self.count("validated")
            return per_batch * whole * self.length.validations
        if part == "checkpoints":
            return self.saves * self.in_epochs(part) / max(self.count("saves"), 1)
        if part in OF_VALIDATION and self.count("validations"):
            return self.in_epochs(part) * self.length.validations / self.count("validations")
        return self.in_epochs(part) / self.ended

    def once(self, part: str) -> float:
        """Return the seconds of a part that occur once per fit."""
        if part in ONCE:
            return self.timing.part(0, part)
        if part == "start":
            return max(self.timing.part(0, part) + self.timing.part(1, part) - self.start(part), 0.0)
        return 0.0

    def hooks(self, in_steps: dict[str, float], find_site: Callable[[str], Site | None]) -> tuple[HookTime, ...]:
        """Return the time of single hooks per epoch, slowest first.

        Args:
            in_steps: Seconds per mean step of each hook.
            find_site: Returns the line of a hook.
        """
        found = [(action, seconds * self.batches, True) for action, seconds in in_steps.items()]
        for action, seconds in self.timing.actions("hooks", "loggers").items():
            found.append((action, seconds / self.ended, False))
        slow = sorted((each for each in found if each[1] > SHORTEST), key=lambda each: -each[1])
        return tuple(
            HookTime(name=action, seconds=seconds, in_steps=inside, site=find_site(action))
            for action, seconds, inside in slow
            if not action.startswith("[Callback]Doctor.")
        )

    def facts(self, in_steps: dict[str, float], find_site: Callable[[str], Site | None]) -> FitFacts:
        """Return the whole projection."""
        parts = [
            PartTime(name=part, once=self.once(part), each=self.each(part), watched=self.timing.watched(part))
            for part in PARTS
        ]
        return FitFacts(
            parts=tuple(parts),
            epochs=self.length.epochs,
            batches=self.batches,
            knows_length=self.knows_length,
            validations=self.length.validations,
            validated=self.length.validated,
            watched_epochs=sum(count.ended for count in self.counts),
            watched_steps=self.count("steps"),
            watched_validated=self.count("validated"),
            has_border=self.has_border,
            saves=self.saves,
            hooks=self.hooks(in_steps, find_site),
        )
