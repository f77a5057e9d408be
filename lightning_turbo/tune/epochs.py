"""The last word: whole epochs without and with the recommendation, each in a process of its own."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_turbo.measure import Interrupt, InterruptedRunError, ProcessError, Progress, interval_of, three_digits
from lightning_turbo.tune.evidence import Comparison, Configuration
from lightning_turbo.tune.runner import ScriptRunner

__all__ = ["compare_epochs", "describe_epochs", "train_epochs"]


PAIRS = 10  # of epochs, at most
ENOUGH = 100.0  # seconds of pairs after which none is begun; one is trained however long it takes


def train_epochs(runner: ScriptRunner, chosen: Configuration, seconds: float, interrupt: Interrupt) -> dict[str, Any]:
    """Train epochs without and with some settings alternately: a pair of them, and further pairs where they are short.

    Args:
        runner: Starts the processes.
        chosen: The settings.
        seconds: What the progress expects an epoch to take.
        interrupt: Ends the epoch that is trained.

    Returns:
        The numbers of ``WholeEpoch`` under ``"default"`` and ``"chosen"``, of several pairs with medians of the times;
        under ``"factors"`` how many times as fast the whole was in each pair, and under ``"error"`` why the first pair
        is not whole.
    """
    pairs: list[dict[str, Any]] = []
    configurations = [("default", Configuration(mode="epoch")), ("chosen", Configuration(chosen.names, "epoch"))]
    with interrupt.caught(), Progress(time.monotonic() + 2 * seconds) as progress:
        begun = time.monotonic()
        while len(pairs) < PAIRS and (not pairs or time.monotonic() - begun < ENOUGH):
            pair: dict[str, Any] = {}
            # A B B A cancels a steady drift of the machine.
            for name, configuration in configurations[:: (-1) ** len(pairs)]:
                event = _train(runner, configuration, interrupt, progress)
                if event["event"] != "done":
                    why = f"{name} {event['event']}: {event['reason']}"
                    return _together(pairs) if pairs else pair | {"error": why}
                pair[name] = event["numbers"]
            pairs.append(pair)
    return _together(pairs)


def _train(
    runner: ScriptRunner, configuration: Configuration, interrupt: Interrupt, progress: Progress
) -> dict[str, Any]:
    """Train an epoch in a process of its own, and return its last event."""

    def check() -> None:
        interrupt.check()
        progress.show("whole epochs without the recommendation and with it")

    process = runner.spawn(configuration)
    try:
        return process.listen(math.inf, check)
    except (ProcessError, InterruptedRunError) as error:
        return {"event": "failed", "reason": str(error) or "it was ended"}
    finally:
        process.close(grace=0.0)


def _together(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers of the first pair with the medians of all times, and the factor of each pair."""
    found: dict[str, Any] = {name: dict(pairs[0][name]) for name in ("default", "chosen")}
    for name, time_of in ((name, time_of) for name in found for time_of in ("seconds", "steps_seconds")):
        found[name][time_of] = statistics.median(pair[name][time_of] for pair in pairs)
    return {**found, "factors": [pair["default"]["seconds"] / pair["chosen"]["seconds"] for pair in pairs]}


def compare_epochs(found: Mapping[str, Any], promise: Comparison) -> dict[str, Any]:
    """Return what epochs say, with the factor between them and the one that was promised.

    Args:
        found: What ``train_epochs`` returned.
        promise: The recommendation against the script as it is.

    Returns:
        ``found``, and unless an epoch is missing ``"share"`` of the training steps without the recommendation,
        ``"factor"`` (how many times as fast the epoch was, the mean of the pairs), ``"interval"`` (its 95 % interval,
        or ``None`` of one pair), ``"promised"`` and ``"expected"``: the factor of the promise, and its interval.
    """
    if "error" in found:
        return dict(found)
    before = found["default"]
    low, high = (1 / ratio for ratio in reversed(promise.interval or (promise.ratio, promise.ratio)))
    logs = [math.log(factor) for factor in found["factors"]]
    return {
        **found,
        "share": before["steps_seconds"] / before["seconds"],
        "factor": math.exp(statistics.fmean(logs)),
        "interval": interval_of(logs),
        "promised": 1 / promise.ratio,
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
    promised, (low, high) = epochs["promised"], epochs["expected"]
    measured = epochs["interval"]
    between = f" ({measured[0]:.2f} to {measured[1]:.2f} in {len(epochs['factors'])} pairs)" if measured else ""
    return (
        f"A whole epoch, validated to its end, took {three_digits(before['seconds'])} s without and "
        f"{three_digits(after['seconds'])} s with it: {epochs['factor']:.2f} times as fast{between}; promised were "
        f"{promised:.2f} ({low:.2f} to {high:.2f}). Training steps were {100 * epochs['share']:.0f} % of it. "
        f"Logged, without and with: {', '.join(metrics) or 'nothing'}."
    )
