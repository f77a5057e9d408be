"""The process of one case, spoken to in lines of JSON.

Orders come on standard input: first the case to run, then ``{"order": "round", ...}`` and ``{"order": "end"}``. Events
go out on what was standard output; whatever the case prints goes to standard error, which the runner keeps as a log.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import traceback
from typing import Any, TextIO

import numpy as np
import torch

from lightning_turbo.bench.case import SkippedError, load_suite
from lightning_turbo.bench.footprint import current_bytes, peak_bytes
from lightning_turbo.bench.meter import Meter
from lightning_turbo.errors import MissingExtraError

__all__ = ["main", "serve"]


class _Line:
    """The two ends of the pipe to the runner."""

    def __init__(self, orders: TextIO, events: TextIO) -> None:
        self.orders = orders
        self.events = events

    def tell(self, event: dict[str, Any]) -> None:
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()

    def ask(self, event: dict[str, Any]) -> dict[str, Any]:
        self.tell(event)
        line = self.orders.readline()
        if not line:  # the runner is gone
            sys.exit(1)
        return json.loads(line)


def _plain(value: Any) -> float | None:
    """A number of a case as JSON knows it; NaN and infinity become ``None``."""
    number = float(value)
    return number if math.isfinite(number) else None


def serve(orders: TextIO, events: TextIO) -> None:
    """Run the case that the first order names, and report how it went.

    Args:
        orders: One JSON object a line.
        events: Where the events go, one JSON object a line.
    """
    line = _Line(orders, events)
    task = json.loads(orders.readline())
    suite = load_suite(task["suite"], task["suites"])
    case = None if task["case"] is None else suite.cases[task["case"]]
    device = torch.device(task["device"])
    random.seed(task["seed"])
    np.random.seed(task["seed"])
    torch.manual_seed(task["seed"])
    if task["threads"]:
        torch.set_num_threads(task["threads"])
    at_start = current_bytes(device)
    meter = Meter(
        line.ask,
        device=task["device"],
        seed=task["seed"],
        quick=task["quick"],
        warmup=task["warmup"],
        prepared=task["prepared"],
    )
    try:
        if case is None:
            numbers = suite.prepare(meter) if suite.prepare is not None else {}
        else:
            numbers = case.run(meter, **case.config)
            if not meter.over:
                raise RuntimeError(f"{case.name!r} returned before meter.step() said False; let it loop until then.")
        line.tell(
            {
                "event": "done",
                "numbers": {name: _plain(value) for name, value in numbers.items()},
                "start_bytes": at_start,
                "peak_bytes": peak_bytes(device),
                "threads": torch.get_num_threads(),
            }
        )
    except (SkippedError, MissingExtraError) as error:
        line.tell({"event": "skipped", "reason": str(error)})
    except Exception as error:
        traceback.print_exc()
        reason = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        line.tell({"event": "failed", "reason": reason})


def main() -> None:
    """Take over standard input and output, and serve."""
    orders = os.fdopen(os.dup(0), "r")
    events = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    serve(orders, events)
