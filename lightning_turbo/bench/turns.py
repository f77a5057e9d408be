"""Two cases in one process, a block of steps of each in turn: for differences of a few per cent.

Two processes with the same work differ by several per cent for their whole life. Here both cases share one process, so
that nothing but the cases is different, and there are enough pairs of blocks for an interval of the median.
"""

from __future__ import annotations

import queue
import random
import statistics
import threading
from typing import Any

import numpy as np
import torch

from lightning_turbo.bench.case import Aim, Case, Suite
from lightning_turbo.bench.meter import Meter
from lightning_turbo.bench.stats import median_interval

__all__ = ["add_turns", "take_turns"]

FEWEST = 6  # pairs, for an interval of 95 %


class _Seat:
    """A case in a thread of its own, which runs only while it is asked for a block."""

    def __init__(self, case: Case, meter: Meter, lead: int) -> None:
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()
        own = Meter(
            self._ask,
            device=meter.device.type,
            seed=meter.seed,
            quick=meter.quick,
            warmup=lead,
            prepared=meter.prepared,
        )
        self.thread = threading.Thread(target=self._run, args=(case, own), name=f"case {case.name}", daemon=True)
        random.seed(meter.seed)
        np.random.seed(meter.seed)
        torch.manual_seed(meter.seed)
        self.thread.start()
        self.listen()

    def _ask(self, event: dict[str, Any]) -> dict[str, Any]:
        self.events.put(event)
        return self.orders.get()

    def _run(self, case: Case, meter: Meter) -> None:
        try:
            case.run(meter, **case.config)
            self.events.put({"event": "done"})
        except BaseException as error:
            self.events.put(error)

    def listen(self) -> dict[str, Any]:
        """Wait for the next event; an error of the case is raised here."""
        event = self.events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def seconds(self, steps: int, lead: int) -> float:
        """Run a block and return how long it took, without its lead."""
        self.orders.put({"order": "round", "lead": lead, "steps": steps})
        event = self.listen()
        if event["event"] != "round":
            raise RuntimeError(f"{self.thread.name} ended by itself.")
        return event["seconds"]

    def end(self) -> None:
        """Let the case clean up, if it is not at its end."""
        self.orders.put({"order": "end"})
        self.thread.join()


def take_turns(meter: Meter, case: Case, against: Case, *, steps: int, lead: int) -> dict[str, float]:
    """Run two cases in turns, each in a thread, and compare them block by block.

    Args:
        meter: Of the case that this is; told of as many steps as a block has.
        case: Above the line.
        against: Below it.
        steps: Steps of a block.
        lead: Steps before them that do not count: what was prepared during the other's block.

    Returns:
        The median of the quotients, the ends of its interval of 95 %, and how many pairs of blocks there were.
    """
    seats: list[_Seat] = []
    ratios: list[float] = []
    going = True
    try:
        for which in (case, against):
            seats.append(_Seat(which, meter, lead + steps))
        upper, lower = seats
        while going or len(ratios) < FEWEST:
            order = (upper, lower) if len(ratios) % 2 else (lower, upper)
            times = {seat: seat.seconds(steps, lead) for seat in order}
            ratios.append(times[upper] / times[lower])
            for _ in range(steps):
                going = going and meter.step()
    finally:
        for seat in seats:
            seat.end()
    for seat in seats:
        seat.listen()  # "done", or what its end raised
    low, high = median_interval(ratios)
    return {"ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high, "pairs": len(ratios)}


def add_turns(suite: Suite, case: str, against: str, at_most: float, *, steps: int, lead: int = 1, **aim: Any) -> None:
    """Add two cases of a suite once more as one that has both in turns, with a limit on their ratio.

    Args:
        suite: That has both.
        case: Above the line.
        against: Below it.
        at_most: What the upper end of the ratio's interval must keep to.
        steps: Steps of a block.
        lead: Steps before them that do not count.
        aim: Further arguments of the ``Aim``.
    """
    name = f"{case} in turns with {against}"

    def run(meter: Meter, *, case: str, against: str, steps: int, lead: int) -> dict[str, float]:
        return take_turns(meter, suite.cases[case], suite.cases[against], steps=steps, lead=lead)

    config = {"case": case, "against": against, "steps": steps, "lead": lead}
    suite.add(name, run, config=config, base=name, ours=True, quick=False, devices=suite.cases[case].devices)
    suite.aims.append(Aim(name, "", at_most, "ratio_high", **aim))
