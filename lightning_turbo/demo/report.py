"""Results of the demo: a table for readers, results.json for programs."""

from __future__ import annotations

import json
import math
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import lightning_turbo
from lightning_turbo import _optional
from lightning_turbo._files import whole_file
from lightning_turbo._lightning import bound_name
from lightning_turbo.demo.history import RunHistory

__all__ = ["FORMAT", "level_row", "machine", "readable_bytes", "results_table", "write_results"]

FORMAT = 1  # of results.json


def machine(device: torch.device) -> dict[str, Any]:
    """Return device, versions and date."""
    lightning = "lightning" if bound_name().startswith("lightning.") else "pytorch-lightning"
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        lightning: _optional.installed_version(lightning),
        "lightning-turbo": lightning_turbo.__version__,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def level_row(history: RunHistory, *, epochs: int, floor: float) -> dict[str, Any]:
    """Return the results of one level.

    Args:
        history: Record of the run.
        epochs: Epochs of a complete run.
        floor: Accuracy that the level has to reach in its last epoch.
    """
    accuracy = history.val_accuracies[-1] if history.val_accuracies else None
    complete = history.epochs >= epochs
    return {
        "epochs": history.epochs,
        "complete": complete,
        "half_dtype": history.half_dtype,
        "val_accuracy": accuracy,
        "passed": complete and accuracy is not None and accuracy >= floor,
        "seconds_per_epoch": history.seconds_per_epoch,
        "samples_per_second": history.samples_per_second,
        "bytes": {**history.bytes, "total": sum(history.bytes.values())},
        "peak_device_bytes": history.peak_device_bytes,
        "loss_scale": history.loss_scale,
        "skipped_steps": history.skipped_steps,
        "epoch_seconds": history.epoch_seconds,
        "val_losses": history.val_losses,
        "val_accuracies": history.val_accuracies,
        "step_losses": history.step_losses,
    }


def results_table(rows: dict[str, dict[str, Any]], floor: float) -> Table:
    """Return a table with one line per level, with a mark for an accuracy below ``floor``."""
    caption = f"Accuracy has to reach {floor}. Memory: weights, gradients, state."
    table = Table("level", caption=caption, caption_justify="left")
    table.columns[0].style = "bold"
    for head in ("accuracy", "s/epoch", "samples/s", "memory", "loss scale", "skipped"):
        table.add_column(head, justify="right")
    for level, row in rows.items():
        table.add_row(
            level,
            _accuracy(row),
            _number(row["seconds_per_epoch"], ".2f"),
            _number(row["samples_per_second"], ".0f"),
            readable_bytes(row["bytes"]["total"]),
            f"{row['loss_scale']:g}",
            str(row["skipped_steps"]),
        )
    return table


def _accuracy(row: dict[str, Any]) -> str:
    accuracy = _number(row["val_accuracy"], ".3f")
    if not row["complete"]:
        return f"[yellow]{accuracy} (stopped)[/]"
    return accuracy if row["passed"] else f"[bold red]{accuracy} (too low)[/]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def readable_bytes(count: int) -> str:
    """Format a number of bytes with a binary unit, for example ``"290 KiB"``."""
    power = 0 if count < 1024 else min(int(math.log2(count) // 10), 3)
    return f"{count / 1024**power:.{0 if power < 2 else 1}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def write_results(results: dict[str, Any], path: Path) -> None:
    """Write ``results`` as JSON in one atomic step; numbers that are not finite become ``null``."""
    text = json.dumps(_finite(results), indent=1, allow_nan=False)
    with whole_file(path) as part:
        part.write_text(text + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
