"""Times a validation: a few of its batches, projected to its length, or all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.measure import RoundTimer

__all__ = ["TimedValidation"]


class TimedValidation:
    """Times each validation of a fit, and excludes that time from the steps around it.

    A shortened validation takes one batch more than a loader has worker processes, at least two: the first batches of
    all workers arrive together, and the delay of the next one shows the rate. The omitted batches are projected from
    these. The probe of a Trainer creates it; it lasts as long as the process.

    Args:
        loop: Lightning's validation loop inside ``fit``.
        timer: Times the steps.
        whole: Whether to run all batches.
    """

    def __init__(self, loop: Any, timer: RoundTimer, *, whole: bool) -> None:
        self.loop = loop
        self.timer = timer
        self.sanity: list[float] = []  # seconds of sanity checks, projected to whole validations
        self.seconds: list[float] = []  # seconds of validations, projected to whole ones
        self.since_step = 0.0  # actual seconds in validations since the probe last asked
        self._lengths: list[float] = []  # batches of each validation loader in the script
        self._ends: dict[int, list[float]] = {}  # end times of batches, by loader
        if not whole:
            ReplacedMethod(loop, "setup_data", self._shorten)
        ReplacedMethod(loop, "run", self._time)

    def end_batch(self, loader: int) -> None:
        """Record the end of a batch."""
        self.timer.synchronize()
        self._ends.setdefault(loader, []).append(time.perf_counter())

    def _shorten(self, set_up: Callable[[], None]) -> None:
        before = self.loop._max_batches
        set_up()
        # Lightning creates a new list when it requests the loaders, and otherwise keeps the previous one.
        if self.loop._max_batches is not before:
            self._lengths = list(self.loop._max_batches)
            loaders = self.loop._combined_loader.flattened
            self.loop._max_batches = [
                min(length, 1 + max(1, getattr(loader, "num_workers", 0)))
                for length, loader in zip(self._lengths, loaders, strict=True)
            ]

    def _time(self, run: Callable[[], Any]) -> Any:
        self.timer.synchronize()
        begun = time.perf_counter()
        self._ends = {}
        result = run()
        self.timer.synchronize()
        took = time.perf_counter() - begun
        self.timer.leave_out(took)
        self.since_step += took
        if self._ends:
            found = self.sanity if self.loop.trainer.sanity_checking else self.seconds
            found.append(took + self._left_out(begun))
        return result

    def _left_out(self, begun: float) -> float:
        """Return how long the omitted batches would take."""
        total = 0.0
        for loader, ends in self._ends.items():
            each = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0] - begun
            length = self._lengths[loader] if loader < len(self._lengths) else 0.0
            if length != float("inf"):
                total += max(0.0, length - len(ends)) * each
        return total
