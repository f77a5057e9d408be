"""The last word: a whole epoch without and one with the recommendation, each in a process of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from lightning_turbo.measure import Interrupt, InterruptedRunError, ProcessError, Progress, three_digits
from lightning_turbo.tune.evidence import Case, Comparison
from lightning_turbo.tune.runner import ScriptRunner

__all__ = ["compare_epochs", "describe_epochs", "train_epochs"]


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


def compare_epochs(found: Mapping[str, Any], steps: Comparison) -> dict[str, Any]:
    """Return what two epochs say, with the factor between them and what that of the steps lets expect.

    Only the training steps, a share of the epoch, are expected to be faster.

    Args:
        found: What ``train_epochs`` returned.
        steps: The recommendation against the script as it is.

    Returns:
        ``found``, and unless an epoch is missing ``"share"`` of the training steps without the recommendation,
        ``"factor"`` (how many times as fast the whole was), and ``"expected"``, a pair of such factors.
    """
    if "error" in found:
        return dict(found)
    before = found["default"]
    share = before["steps_seconds"] / before["seconds"]
    low, high = (1 / (1 - share + share * ratio) for ratio in reversed(steps.interval or (steps.ratio, steps.ratio)))
    return {
        **found,
        "share": share,
        "factor": before["seconds"] / found["chosen"]["seconds"],
        "expected": [low, high],
    }


def describe_epochs(epochs: Mapping[str, Any]) -> str:
    """Return what ``compare_epochs`` returned in words: times, factors, and the metrics."""
    if "error" in epochs:
        return f"Whole epochs were not measured: {epochs['error']}."
    before, after = epochs["default"], epochs["chosen"]
    metrics = [
        f"{name} {value:.4g} and {other:.4g}"
        for name, value in before["metrics"].items()
        if (other := after["metrics"].get(name)) is not None and value is not None
    ]
    low, high = epochs["expected"]
    return (
        f"A whole fit of one epoch took {three_digits(before['seconds'])} s without and "
        f"{three_digits(after['seconds'])} s with it: {epochs['factor']:.2f} times as fast. "
        f"Training steps were {100 * epochs['share']:.0f} % of it: {low:.2f} to {high:.2f} times were to be expected. "
        f"Logged, without and with: {', '.join(metrics) or 'nothing'}."
    )
