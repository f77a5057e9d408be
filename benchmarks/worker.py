"""The process of one case. Its first order is the task: suite, case and settings."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.suite import SUITES, CaseTimer, SkippedError, load_suite
from lightning_turbo.measure import open_channel, serve


def main() -> None:
    """Use standard input and output for orders and events, and run the case of the first order."""
    channel = open_channel()
    task = channel.receive()
    random.seed(task["seed"])
    np.random.seed(task["seed"])
    torch.manual_seed(task["seed"])
    if task["threads"]:
        torch.set_num_threads(task["threads"])
    SUITES[task["suite"]] = task["place"]
    suite = load_suite(task["suite"])
    timer = CaseTimer(channel.ask, **{name: task[name] for name in ("device", "seed", "quick", "warmup")})

    def run() -> Mapping[str, Any]:
        case = suite.known[task["case"]]
        try:
            numbers = case.run(timer, **case.config)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("", "benchmarks", "examples", "lightning_turbo"):
                raise
            raise SkippedError(f"{error.name} not installed") from None
        if not timer.over:
            raise RuntimeError(f"{case.name!r} returned before timer.step() returned False. Let it run until then.")
        return numbers

    serve(channel, timer, run)


if __name__ == "__main__":
    main()
