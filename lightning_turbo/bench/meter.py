"""The meter: what a case calls after every step, inside the process of that case."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["Meter"]


class Meter:
    """Counts the steps of a case, times rounds of them, and waits while other cases are measured.

    Args:
        ask: Sends an event to the runner and returns its next order.
        device: Kind of device: ``"cpu"`` or ``"cuda"``.
        seed: Seed for data and weights, the same for all cases; already set in torch, numpy and random.
        quick: Whether a small model or little data should do.
        warmup: Steps before the first round.
        prepared: What the suite's ``prepare`` returned.
    """

    def __init__(
        self,
        ask: Callable[[dict[str, Any]], dict[str, Any]],
        *,
        device: str = "cpu",
        seed: int = 0,
        quick: bool = False,
        warmup: int = 0,
        prepared: Mapping[str, float] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.seed = seed
        self.quick = quick
        self.prepared = dict(prepared or {})
        self.over = False
        self._ask = ask
        self._left = max(1, warmup)
        self._phase = "warmup"
        self._steps = 0
        self._samples = 0
        self._start = 0.0

    def step(self, samples: int = 0) -> bool:
        """Tell that one step is done, and learn whether to do another.

        Between rounds this call blocks until the case's turn has come.

        Args:
            samples: Samples that the step consumed, for the throughput; 0 where it means nothing.

        Returns:
            Whether the case goes on; after the first ``False`` it must clean up and return.

        Note:
            Synchronises the device at the two ends of a round, and not in between. While a case waits for its turn it
            keeps no memory of the GPU that it does not use; the steps of the lead take it again.
        """
        self._samples += samples
        self._left -= 1
        if self._left > 0:
            return True
        return self._turn()

    def _turn(self) -> bool:
        """Close the phase that has run out of steps and open the next one."""
        if self.over:
            return False
        if self._phase == "lead":
            self._open("round", self._steps)
            return True
        if self._phase == "round":
            self.synchronise()
            seconds = time.perf_counter() - self._start
            event = {"event": "round", "seconds": seconds, "steps": self._steps, "samples": self._samples}
        else:
            self.synchronise()
            event = {"event": "ready"}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # all cases of a group are alive at the same time
        order = self._ask(event)
        if order["order"] == "end":
            self.over = True
            return False
        self._steps = order["steps"]
        if order["lead"]:
            self._open("lead", order["lead"])
        else:
            self._open("round", self._steps)
        return True

    def _open(self, phase: str, steps: int) -> None:
        self._phase = phase
        self._left = steps
        self._samples = 0
        self.synchronise()
        self._start = time.perf_counter()

    def synchronise(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
