"""Results of the demo: rows of results.json, and tables for readers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TextIO

from lightning_turbo.demo.history import RunHistory
from lightning_turbo.measure import print_table

__all__ = ["FLOOR", "compare_volumes", "make_row", "print_results", "readable_bytes"]

FLOOR = 0.95  # validation accuracy that every level has to reach on digits
HEADS = ["", "accuracy", "s/epoch", "samples/s", "memory", "loss scale", "skipped", "note"]


def make_row(history: RunHistory, epochs: int, floor: float = 0.0) -> dict[str, Any]:
    """Return the results of one training.

    Args:
        history: Its record.
        epochs: Epochs of a complete run.
        floor: Accuracy that it has to reach in its last epoch.
    """
    accuracy = history.val_accuracies[-1] if history.val_accuracies else None
    complete = history.epochs >= epochs
    return {
        "epochs": history.epochs,
        "complete": complete,
        "val_accuracy": accuracy,
        "passed": complete and accuracy is not None and accuracy >= floor,
        "seconds_per_epoch": history.seconds_per_epoch,
        "samples_per_second": history.samples_per_second,
        "bytes": {**history.bytes, "total": sum(history.bytes.values())},
        "loss_scale": history.loss_scale,
        "skipped_steps": history.skipped_steps,
        "epoch_seconds": history.epoch_seconds,
        "val_accuracies": history.val_accuracies,
        # JSON knows no numbers that are not finite.
        "step_losses": [loss if math.isfinite(loss) else None for loss in history.step_losses],
    }


def compare_volumes(rows: Mapping[str, dict[str, Any]], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return both trainings on the volumes with the sentence that the picture begins with."""
    stock, tuned = rows["stock"], rows["tuned"]
    factor = stock["seconds_per_epoch"] / tuned["seconds_per_epoch"]
    accuracies = f"accuracy {stock['val_accuracy']:.1%} and {tuned['val_accuracy']:.1%}"
    # Without settings both are the same, and the factor is noise.
    gain = f"{factor:.2f} times as fast" if chosen["settings"] else "Nothing was found that helps on the volumes"
    return {
        "headline": f"{gain}, {accuracies}",
        "factor": factor,
        "settings": chosen["settings"],
        "rows": dict(rows),
    }


def print_results(results: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print a table of the levels, and one of the volumes if there is one."""
    title = f"Digits. Accuracy has to reach {FLOOR}. Memory: weights, gradients, state."
    print_table(title, HEADS, [_cells(name, row) for name, row in results["levels"].items()], stream)
    if volumes := results["volumes"]:
        notes = {"stock": "Lightning as it is", "tuned": " + ".join(volumes["settings"]) or "nothing helps here"}
        lines = [[*_cells(name, row)[:5], notes[name]] for name, row in volumes["rows"].items()]
        print_table(f"Volumes from compressed files: {volumes['headline']}.", [*HEADS[:5], "note"], lines, stream)


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    note = "stopped" if not row["complete"] else "" if row["passed"] else "too low"
    return [
        name,
        _number(row["val_accuracy"], ".3f"),
        _number(row["seconds_per_epoch"], ".2f"),
        _number(row["samples_per_second"], ".0f"),
        readable_bytes(row["bytes"]["total"]),
        f"{row['loss_scale']:g}",
        str(row["skipped_steps"]),
        note,
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def readable_bytes(count: int) -> str:
    """Format a number of bytes with a binary unit, for example ``"290 KiB"``."""
    power = 0 if count < 1024 else min(int(math.log2(count) // 10), 3)
    return f"{count / 1024**power:.{0 if power < 2 else 1}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
