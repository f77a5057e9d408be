"""``RoundTimer``: measured code calls it after every step, inside its own process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["RoundTimer"]


class RoundTimer:
    """Counts steps, times rounds of steps, and waits while other processes are measured.

    The measured process creates it before its work begins; it is over when the controlling program sends the order to
    end. ``step`` waits for orders between rounds and nowhere else: nothing is communicated while a round is timed.

    Args:
        ask: Sends an event to the controlling program and returns its next order.
        device: Device type: ``"cpu"`` or ``"cuda"``.
        warmup: Steps before the first round. All but one run in this process's own turn: next to other processes that
            start, each with threads for every core, they can take a hundred times as long.
    """

    def __init__(
        self, ask: Callable[[dict[str, Any]], dict[str, Any]], *, device: str = "cpu", warmup: int = 0
    ) -> None:
        self.device = torch.device(device)
        self.over = False
        self._ask = ask
        # Phases: "start" is one step; then, for each order, "lead", which is not measured, and "round". The first call
        # of ``step`` ends the start phase: one step shows that the code works, and first-time compilation and
        # allocation happen while other processes also start.
        self._left = 1
        self._warmup = warmup - 1
        self._phase = "start"
        self._lead = 0
        self._seconds = 0.0  # duration of a round, if its number of steps follows from the lead
        self._steps = 0
        self._samples = 0
        self._start = 0.0

    def step(self, samples: int = 0) -> bool:
        """Report that a step is done, and return whether to do another one.

        Between rounds this call blocks until it is this process's turn.

        Args:
            samples: Number of samples in the step, for the throughput; 0 if meaningless.

        Returns:
            Whether to do another step; after the first ``False``, clean up and return.

        Note:
            Synchronizes the device at both ends of a round, but not in between. A waiting process releases GPU memory
            that it does not use; the steps of the lead allocate it again.
        """
        self._samples += samples
        self._left -= 1
        return True if self._left > 0 else self._turn()

    def _turn(self) -> bool:
        """Close the finished phase and open the next one."""
        if self.over:
            return False
        if self._phase == "lead":
            # The unmeasured steps of the lead show how many steps fit into the duration of a round.
            if self._seconds:
                self.synchronize()
                took = (time.perf_counter() - self._start) / self._lead
                self._steps = max(1, round(self._seconds / took))
            self._open("round", self._steps)
            return True
        # Before reading the clock, because the device may still be busy with queued steps.
        self.synchronize()
        event: dict[str, Any] = {"event": "ready"}
        if self._phase == "round":
            seconds = time.perf_counter() - self._start
            event = {"event": "round", "seconds": seconds, "steps": self._steps, "samples": self._samples}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # all processes of a group are alive at once
        order = self._ask(event)
        if order["order"] == "end":
            self.over = True
            return False
        self._steps = order["steps"]
        self._seconds = order.get("seconds", 0.0)
        # The rest of the warm-up runs now, in this process's own turn.
        self._lead = lead = max(order["lead"], self._warmup)
        self._warmup = 0
        self._open(*(("lead", lead) if lead > 0 else ("round", self._steps)))
        return True

    def _open(self, phase: str, steps: int) -> None:
        self._phase = phase
        self._left = steps
        self._samples = 0
        self.synchronize()
        self._start = time.perf_counter()

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
