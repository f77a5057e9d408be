"""The final check: whole epochs without and with the recommendation, in two processes that alternate."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_turbo.measure import (
    Interrupt,
    InterruptedRunError,
    Process,
    ProcessError,
    Progress,
    interval_of,
    three_digits,
)
from lightning_turbo.tune.evidence import Comparison, Configuration
from lightning_turbo.tune.runner import ScriptRunner

__all__ = ["compare_epochs", "describe_epochs", "train_epochs"]


PAIRS = 12  # largest number of pairs of processes
ENOUGH = 200.0  # no pair starts after this many seconds; the first runs however long it takes
ROUNDS = 5  # rounds of the search per turn of a process, about a second


def train_epochs(runner: ScriptRunner, chosen: Configuration, seconds: float, interrupt: Interrupt) -> dict[str, Any]:
    """Train epochs without and with some settings, in pairs of processes that alternate every second.

    Args:
        runner: Starts the processes.
        chosen: The settings.
        seconds: Expected duration of an epoch, for the progress.
        interrupt: Ends the training of epochs.

    Returns:
        The numbers of ``WholeEpoch`` under ``"default"`` and ``"chosen"``, with the medians of the times over all
        pairs; under ``"factors"`` the speedup of each pair, and under ``"error"`` why the first pair is incomplete.
    """
    pairs: list[dict[str, Any]] = []
    configurations = [("default", Configuration(mode="epoch")), ("chosen", Configuration(chosen.names, "epoch"))]
    expected = min(2 * seconds * PAIRS, ENOUGH + 2 * seconds)
    with interrupt.caught(), Progress(time.monotonic() + expected) as progress:

        def check() -> None:
            interrupt.check()
            progress.show("whole epochs without the recommendation and with it")

        begun = time.monotonic()
        while len(pairs) < PAIRS and (not pairs or time.monotonic() - begun < ENOUGH):
            # The order A B B A cancels a steady drift of the machine.
            pair = _train(runner, dict(configurations[:: (-1) ** len(pairs)]), check)
            if "error" in pair:
                return _together(pairs) if pairs else pair
            pairs.append(pair)
    return _together(pairs)


def _train(
    runner: ScriptRunner, configurations: Mapping[str, Configuration], check: Callable[[], None]
) -> dict[str, Any]:
    """Train an epoch of each configuration in alternating processes, and return their numbers."""
    found: dict[str, Any] = {}
    alive: dict[str, Process] = {}
    order = {"order": "round", "lead": 0, "steps": ROUNDS * runner.order["steps"]}
    try:
        for name, configuration in configurations.items():
            alive[name] = runner.spawn(configuration)
            found |= _listen(name, alive[name], check)
        while len(found) < len(configurations):
            for name in [each for each in configurations if each not in found]:
                found |= _listen(name, alive[name], check, order)
    except _EpochError as error:
        found["error"] = str(error)
    finally:
        for process in alive.values():
            process.close(grace=0.0)
    return found


class _EpochError(Exception):
    """An epoch could not be completed; the message says why."""


def _listen(
    name: str, process: Process, check: Callable[[], None], order: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Let a process train until it waits, and hold it; return its numbers by name if its epoch is over."""
    try:
        if order is not None:
            process.tell(order)
        event = process.listen(math.inf, check)
    except (ProcessError, InterruptedRunError) as error:
        event = {"event": "failed", "reason": str(error) or "it was ended"}
    if event["event"] in ("failed", "skipped"):
        raise _EpochError(f"{name} {event['event']}: {event['reason']}")
    if event["event"] == "done":
        return {name: event["numbers"]}
    process.hold()
    return {}


def _together(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers of the first pair with the medians of all times, and the speedup of each pair."""
    found: dict[str, Any] = {name: dict(pairs[0][name]) for name in ("default", "chosen")}
    for name, time_of in ((name, time_of) for name in found for time_of in ("seconds", "steps_seconds")):
        found[name][time_of] = statistics.median(pair[name][time_of] for pair in pairs)
    return {**found, "factors": [pair["default"]["seconds"] / pair["chosen"]["seconds"] for pair in pairs]}


def compare_epochs(found: Mapping[str, Any], promise: Comparison) -> dict[str, Any]:
    """Return the result of the epochs, with the measured and the promised speedup.

    Args:
        found: A result of ``train_epochs``.
        promise: The comparison of the recommendation with the unchanged script.

    Returns:
        ``found`` and, unless an epoch is incomplete, ``"share"`` of training steps without the recommendation,
        ``"factor"`` (the mean speedup of an epoch over the pairs), ``"interval"`` (its 95 % interval, or ``None`` for
        one pair), ``"promised"`` and ``"expected"``: the promised factor and its interval, and
        ``"promised_epochs"``: whether it is a factor of epochs, or of steps alone.
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
        "promised_epochs": promise.of_epochs,
    }


def describe_epochs(epochs: Mapping[str, Any]) -> str:
    """Return the result of ``compare_epochs`` in words: times, factors and metrics."""
    if "error" in epochs:
        return f"Whole epochs were not measured: {epochs['error']}."
    before, after = epochs["default"], epochs["chosen"]
    metrics = [
        f"{name} {value:.4g} and {other:.4g}"
        for name, value in before["metrics"].items()
        if (other := after["metrics"].get(name)) is not None and value is not None
    ]
    promised, (low, high) = epochs["promised"], epochs["expected"]
    of = "" if epochs["promised_epochs"] else "of training steps alone "
    measured = epochs["interval"]
    between = f" ({measured[0]:.2f} to {measured[1]:.2f} in {len(epochs['factors'])} pairs)" if measured else ""
    return (
        f"A whole epoch, validated to its end, took {three_digits(before['seconds'])} s without and "
        f"{three_digits(after['seconds'])} s with it: {epochs['factor']:.2f} times as fast{between}; promised were "
        f"{of}{promised:.2f} ({low:.2f} to {high:.2f}). Training steps were {100 * epochs['share']:.0f} % of it. "
        f"Logged, without and with: {', '.join(metrics) or 'nothing'}."
    )
