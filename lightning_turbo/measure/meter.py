"""The meter: what the code that is measured calls after every step, in its own process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Meter"]


class Meter:
    """Counts steps, times rounds of them, and waits while other processes are measured.

    The measured process makes it before its work begins, and it is over when the program that measures says so. Between
    rounds, and nowhere else, ``step`` waits for an order: whatever is timed runs without a word to anybody.

    Args:
        ask: Sends an event to the program that measures and returns its next order.
        device: Kind of device: ``"cpu"`` or ``"cuda"``.
        warmup: Steps before the first round. All but one are done in this process's turn: beside other processes that
            start, each with threads for every core, they can take a hundred times as long.
    """

    def __init__(
        self, ask: Callable[[dict[str, Any]], dict[str, Any]], *, device: str = "cpu", warmup: int = 0
    ) -> None:
        self.device = torch.device(device)
        self.over = False
        self._ask = ask
        # Phases: "start" is one step; then, for each order, "lead", which is not measured, and "round"; or "border",
        # which lasts until the measured code says that it is over.
        # The first call of ``step`` ends a phase of its own: one step shows that the code runs, and what compiles or
        # allocates at first does so while others start as well.
        self._left = 1
        self._warmup = warmup - 1
        self._phase = "start"
        self._lead = 0
        self.border = False  # whether the order is to go to the end of an epoch
        self._seconds = 0.0  # of a round, where its steps are as many as fit, by the time of the lead
        self._steps = 0
        self._samples = 0
        self._start = 0.0

    def step(self, samples: int = 0) -> bool:
        """Say that one step is done, and learn whether to do another.

        Between rounds this call blocks until it is this process's turn.

        Args:
            samples: Samples that the step consumed, for the throughput; 0 where it means nothing.

        Returns:
            Whether to do another step; after the first ``False``, clean up and return.

        Note:
            Synchronises the device at the two ends of a round, and not in between. A process that waits keeps no
            memory of the GPU that it does not use; the steps of the lead allocate it again.
        """
        self._samples += samples
        self._left -= 1
        return True if self._left > 0 else self._turn()

    def leave_out(self, seconds: float) -> None:
        """Take a time that was part of no step, as that of a validation, out of the steps that are measured now."""
        self._start += seconds

    def end_border(self) -> bool:
        """Say that what the order ``"border"`` asks for is done: the end of an epoch and the begin of the next one.

        Returns:
            Whether to do another step, as ``step``.
        """
        return self._turn()

    def _turn(self) -> bool:
        """Close the phase that has run out of steps and open the next one."""
        if self.over:
            return False
        if self._phase == "lead":
            # The steps of the lead, which are not measured, tell how many fit into the seconds of a round.
            if self._seconds:
                self.synchronise()
                took = (time.perf_counter() - self._start) / self._lead
                self._steps = max(1, round(self._seconds / took))
            self._open("round", self._steps)
            return True
        # Before the clock is read: a device may still be at work on the steps that the host has queued.
        self.synchronise()
        event: dict[str, Any] = {"event": "border" if self.border else "ready"}
        self.border = False
        if self._phase == "round":
            seconds = time.perf_counter() - self._start
            event = {"event": "round", "seconds": seconds, "steps": self._steps, "samples": self._samples}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # all processes of a group are alive at the same time
        order = self._ask(event)
        if order["order"] == "end":
            self.over = True
            return False
        if order["order"] == "border":
            self.border = True
            self._open("border", sys.maxsize)
            return True
        self._steps = order["steps"]
        self._seconds = order.get("seconds", 0.0)
        # What is left of the warm-up is done here, in this process's own turn.
        self._lead = lead = max(order["lead"], self._warmup)
        self._warmup = 0
        self._open(*(("lead", lead) if lead > 0 else ("round", self._steps)))
        return True

    def _open(self, phase: str, steps: int) -> None:
        self._phase = phase
        self._left = steps
        self._samples = 0
        self.synchronise()
        self._start = time.perf_counter()

    def synchronise(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
