"""The last word: a whole epoch without and one with the recommendation, each in a process of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from lightning_turbo.measure import Interrupt, InterruptedRunError, ProcessError, Progress, three_digits
from lightning_turbo.tune.evidence import Case, Comparison
from lightning_turbo.tune.runner import ScriptRunner

__all__ = ["describe_epochs", "train_epochs"]


def train_epochs(runner: ScriptRunner, chosen: Case, seconds: float) -> dict[str, Any]:
    """Train an epoch without and one with some settings; the progress expects one to take so many seconds.

    Returns:
        The numbers of ``WholeEpoch`` under ``"default"`` and ``"chosen"``; under ``"error"`` why one is missing.
    """
    found: dict[str, Any] = {}

    def check() -> None:
        interrupt.check()
        progress.show("a whole epoch without the recommendation, then one with it")

    with Interrupt().caught() as interrupt, Progress(time.monotonic() + 2 * seconds) as progress:
        for name, case in (("default", Case(mode="epoch")), ("chosen", Case(chosen.names, "epoch"))):
            process = runner.spawn(case)
            try:
                event = process.listen(math.inf, check)
            except (ProcessError, InterruptedRunError) as error:
                event = {"event": "failed", "reason": str(error) or "it was ended"}
            finally:
                process.close(grace=0.0)
            if event["event"] != "done":
                return found | {"error": f"{name} {event['event']}: {event['reason']}"}
            found[name] = event["numbers"]
    return found


def describe_epochs(found: Mapping[str, Any], steps: Comparison) -> str:
    """Return what two epochs say in words: both times, what the factor of the steps lets expect, and the metrics."""
    if "error" in found:
        return f"Whole epochs were not measured: {found['error']}."
    before, after = found["default"], found["chosen"]
    share = before["steps_seconds"] / before["seconds"]
    low, high = (1 / (1 - share + share * ratio) for ratio in reversed(steps.interval or (steps.ratio, steps.ratio)))
    metrics = [
        f"{name} {value:.4g} and {other:.4g}"
        for name, value in before["metrics"].items()
        if (other := after["metrics"].get(name)) is not None and value is not None
    ]
    return (
        f"A whole fit of one epoch took {three_digits(before['seconds'])} s without and "
        f"{three_digits(after['seconds'])} s with it: {before['seconds'] / after['seconds']:.2f} times as fast. "
        f"Training steps were {100 * share:.0f} % of it: {low:.2f} to {high:.2f} times were to be expected. "
        f"Logged, without and with: {', '.join(metrics) or 'nothing'}."
    )
