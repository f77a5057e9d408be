"""The picture of a demo run: how the loss fell, how fast each level was, how much memory it kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_turbo import _optional
from lightning_turbo._files import whole_file

__all__ = ["draw_results"]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {"O0": "#5f6b7a", "O1": "#0072b2", "O2": "#009e73", "O3": "#d55e00"}
PARTS = {"weights": 1.0, "gradients": 0.72, "optimizer_state": 0.48}  # opacity of each part of a memory bar
WIDTHS = (4.4, 3.4, 1.5, 1.3)  # each level narrower than the one before, so that curves that coincide are all seen
INK, FAINT = "#22272e", "#d8dde3"


def draw_results(results: dict[str, Any], path: Path) -> None:
    """Draw the levels of ``results``, in the form of results.json, into an image file.

    Args:
        results: What the demo wrote to results.json.
        path: The image; its suffix chooses the format.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    _optional.require("matplotlib", "the demo's picture")
    from matplotlib.figure import Figure

    rows = {level: row for level, row in results["levels"].items() if row["step_losses"]}
    figure = Figure(figsize=(11, 5.6), dpi=140, layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.45, 1), wspace=0.06, hspace=0.08)
    curves, speed, memory = (figure.add_subplot(grid[key]) for key in ((slice(None), 0), (0, 1), (1, 1)))

    _curves(curves, rows)
    _bars(speed, rows)
    _stacks(memory, rows)
    made_on, asked = results["machine"], results["settings"]
    threads = "1 thread" if made_on["threads"] == 1 else f"{made_on['threads']} threads"
    figure.suptitle(
        f"lightning-turbo demo: {asked['data']}, one network at {', '.join(rows)}",
        x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.supxlabel(
        f"{made_on['date'].split()[0]}  ·  {made_on['device']}, {threads}  ·  "
        f"torch {made_on['torch']}  ·  seed {asked['seed']}",
        x=0.012, ha="left", fontsize=8.5, color=COLOURS["O0"],
    )  # fmt: skip
    with whole_file(path) as part:
        figure.savefig(part)


def _curves(axes: Any, rows: dict[str, dict[str, Any]]) -> None:
    for place, (level, row) in enumerate(rows.items()):
        losses = [math.nan if loss is None else loss for loss in row["step_losses"]]
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, color=COLOURS[level], alpha=0.13, linewidth=0.8)
        label = f"{level}   {row['val_accuracy']:.3f}" if row["val_accuracy"] is not None else level
        axes.plot(steps, _smooth(losses), color=COLOURS[level], linewidth=WIDTHS[place], label=label)
    axes.set_yscale("log")
    axes.margins(x=0.01)
    axes.set_xlabel("training step")
    if rows:
        axes.legend(title="validation accuracy", frameon=False, loc="lower left", alignment="left")
    _clean(axes, "Training loss", grid="y")


def _bars(axes: Any, rows: dict[str, dict[str, Any]]) -> None:
    speeds = [row["samples_per_second"] or 0 for row in rows.values()]
    bars = axes.barh(list(rows), speeds, color=[COLOURS[level] for level in rows], height=0.62)
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=4, color=INK)
    axes.set_xlim(0, max(speeds, default=1) * 1.16)
    axes.invert_yaxis()
    _clean(axes, "Training samples per second", grid=None)


def _stacks(axes: Any, rows: dict[str, dict[str, Any]]) -> None:
    left = [0.0] * len(rows)
    for part, opacity in PARTS.items():
        sizes = [row["bytes"].get(part, 0) / 1024 for row in rows.values()]
        bars = axes.barh(list(rows), sizes, left=left, height=0.62, color=[COLOURS[k] for k in rows], alpha=opacity)
        names = [part.replace("optimizer_", "") if place == 0 else "" for place in range(len(rows))]
        axes.bar_label(bars, names, label_type="center", fontsize=8, color="white")
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f"  {total:,.0f} KiB", va="center", color=INK)
    axes.set_xlim(0, max(left, default=1) * 1.22)
    axes.invert_yaxis()
    _clean(axes, "Weights, gradients, optimizer state", grid=None)


def _clean(axes: Any, title: str, grid: str | None) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=0, which="both")
    if grid is None:
        axes.spines[["bottom"]].set_visible(False)
        axes.set_xticks([])
    else:
        axes.grid(axis=grid, color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)


def _smooth(values: Sequence[float], keep: float = 0.9) -> list[float]:
    """Average exponentially, corrected for the start, as TensorBoard does; pass over what is not finite."""
    smoothed, mean, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(mean / weight if weight else math.nan)
    return smoothed
