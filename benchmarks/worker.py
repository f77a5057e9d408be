"""The process of one case: it runs what its first order names."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.meter import Meter
from benchmarks.suite import load_suite
from lightning_turbo.measure import open_channel, serve

__all__ = ["main"]


def main() -> None:
    """Take over standard input and output, and run the case."""
    channel = open_channel()
    task = channel.receive()
    random.seed(task["seed"])
    np.random.seed(task["seed"])
    torch.manual_seed(task["seed"])
    if task["threads"]:
        torch.set_num_threads(task["threads"])
    known = ("device", "seed", "quick", "warmup", "prepared")
    suite = load_suite(task["suite"], task["suites"])
    meter = Meter(channel.ask, **{name: task[name] for name in known})

    def run() -> Mapping[str, Any]:
        if task["case"] is None:
            return suite.prepare(meter) if suite.prepare is not None else {}
        case = suite.cases[task["case"]]
        numbers = case.run(meter, **case.config)
        if not meter.over:
            raise RuntimeError(f"{case.name!r} returned before meter.step() said False; let it loop until then.")
        return numbers

    serve(channel, meter, run)


if __name__ == "__main__":
    main()
