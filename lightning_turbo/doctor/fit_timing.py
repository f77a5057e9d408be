"""Where the time of a whole fit goes: what was seen of it, and what it comes to for the epochs that it will run."""

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
"""Parts of which each validation has one."""
SHORTEST = 1e-3
"""Seconds of an epoch below which a hook is not worth its name."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long the script lets a fit be; ``math.inf`` where nothing tells.

    Attributes:
        epochs: Epochs of the fit.
        batches: Batches of an epoch.
        validations: Validations an epoch; below 1 where not every epoch has one.
        validated: Batches of a validation.
    """

    epochs: float = math.inf
    batches: float = math.inf
    validations: float = 0.0
    validated: float = 0.0


def fit_length(trainer: Any, epochs: float) -> Length:
    """Return how long a Trainer, which is about to train, will fit; ``epochs`` are as counted from its settings."""
    batches, every = trainer.num_training_batches, trainer.check_val_every_n_epoch
    limits = trainer.num_val_batches if trainer.enable_validation else []
    between = trainer.val_check_batch
    # None is a validation by the time on the clock; infinity one at the end of an epoch of unknown length.
    validations = batches / between if between and batches < math.inf and between < math.inf else 1.0
    if every is not None:
        validations = max(1.0, math.floor(validations)) / every
    validated = sum(limits)
    return Length(epochs, batches, validations if validated else 0.0, validated)


class FitTiming(Listener):
    """Sums up the seconds of a fit by epoch, part and action.

    Who starts it: the clock, when fit begins. What ends it: the clock, which stops telling. What always holds: each
    moment since the begin is counted once, to the part that was under way.
    """

    def __init__(self) -> None:
        self.seconds: list[dict[tuple[str, str], float]] = [{}]  # before the first epoch, and of each
        self._last = 0.0
        self._moment = Moment("set-up", "hooks")

    def begin_fit(self) -> None:
        """Begin to count."""
        self._last = time.perf_counter()

    def enter(self, moment: Moment, before: str | None) -> None:
        """Count what ran until now."""
        now = time.perf_counter()
        key = (before, "") if before else (self._moment.part, self._moment.action)
        self.seconds[-1][key] = self.seconds[-1].get(key, 0.0) + now - self._last
        self._last, self._moment = now, moment

    def begin_epoch(self) -> None:
        """Count what follows to the next epoch."""
        self.enter(self._moment, None)
        self.seconds.append({})

    def part(self, epoch: int, *parts: str) -> float:
        """Return the seconds of some parts in an epoch, from 1; 0 is what came before the first one."""
        if epoch >= len(self.seconds):
            return 0.0
        return sum(seconds for (part, _), seconds in self.seconds[epoch].items() if part in parts)

    def watched(self, part: str) -> float:
        """Return all seconds of a part."""
        return sum(self.part(epoch, part) for epoch in range(len(self.seconds)))

    def actions(self, *parts: str) -> dict[str, float]:
        """Return the seconds of each action of some parts in all epochs together."""
        sums: dict[str, float] = {}
        for (part, action), seconds in chain.from_iterable(each.items() for each in self.seconds[1:]):
            if part in parts and action:
                sums[action] = sums.get(action, 0.0) + seconds
        return sums


@dataclass(frozen=True, slots=True)
class Projection:
    """What the parts of a fit come to, from what was watched of it.

    Attributes:
        timing: What was heard.
        counts: Of each epoch that was watched, as far as it was; at least one.
        length: How long the fit will be.
        step: Seconds of the mean timed step; 0 if none was timed.
        starts_again: Whether each epoch starts its worker processes again.
    """

    timing: FitTiming
    counts: Sequence[EpochCount]
    length: Length
    step: float
    starts_again: bool

    @property
    def has_border(self) -> bool:
        """Whether the first batch of a second epoch was seen."""
        return len(self.counts) > 1 and self.timing.part(2, "first batch") > 0

    @property
    def batches(self) -> float:
        """Batches of an epoch, as far as they are known."""
        return self.length.batches if self.length.batches < math.inf else self.counts[0].steps

    @property
    def ended(self) -> int:
        """Epochs that were watched to their end; one, where the look has ended within its first."""
        return max(sum(count.ended for count in self.counts), 1)

    @property
    def saves(self) -> float:
        """Checkpoints of an epoch: those in steps come again with more steps, the others once an epoch."""
        steps, in_steps = self.count("steps"), self.count("saves_in_steps")
        return in_steps * self.batches / max(steps, 1) + (self.count("saves") - in_steps) / self.ended

    def count(self, name: str) -> int:
        """Return a count of all epochs together."""
        return sum(getattr(each, name) for each in self.counts)

    def in_epochs(self, part: str) -> float:
        """Return the seconds of a part in all epochs together."""
        return sum(self.timing.part(epoch, part) for epoch in range(1, len(self.counts) + 1))

    def start(self, part: str) -> float:
        """Return what each epoch's begin costs: the second one tells; the first one, what the first does."""
        if self.has_border:
            return self.timing.part(2, part)
        if part == "start" and not self.starts_again:
            return 0.0
        return self.timing.part(0, part) + self.timing.part(1, part)

    def each(self, part: str) -> float:
        """Return the seconds of a part in each epoch."""
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
        """Return the seconds of a part that the whole fit has once."""
        if part in ONCE:
            return self.timing.part(0, part)
        if part == "start":
            return max(self.timing.part(0, part) + self.timing.part(1, part) - self.start(part), 0.0)
        return 0.0

    def hooks(self, in_steps: dict[str, float], find_site: Callable[[str], Site | None]) -> tuple[HookTime, ...]:
        """Return what single hooks take in each epoch, the slowest first.

        Args:
            in_steps: Seconds of the mean step in each hook.
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
        """Return all of it."""
        parts = [
            PartTime(name=part, once=self.once(part), each=self.each(part), watched=self.timing.watched(part))
            for part in PARTS
        ]
        return FitFacts(
            parts=tuple(parts),
            epochs=self.length.epochs,
            batches=self.batches,
            validations=self.length.validations,
            validated=self.length.validated,
            watched_epochs=sum(count.ended for count in self.counts),
            watched_steps=self.count("steps"),
            watched_validated=self.count("validated"),
            has_border=self.has_border,
            saves=self.saves,
            hooks=self.hooks(in_steps, find_site),
        )
