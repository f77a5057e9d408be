"""Picture of a demo run: loss curves, speed and memory of each level, and the time of an epoch on volumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_turbo import _optional
from lightning_turbo._files import whole_file

__all__ = ["draw_results"]

# Okabe and Ito's palette for colour-blind readers, in shades for light and dark pages.
COLOURS = {"O0": "#8b949e", "O1": "#1f8fdb", "O2": "#00a37a", "O3": "#e0702a"}
PARTS = {"weights": 1.0, "gradients": 0.82, "optimizer_state": 0.64}  # opacity of each part of a memory bar
WIDTHS = (5.0, 3.6, 2.2, 1.2)  # narrower for each level, so that coinciding curves stay visible
INK = "#7d8590"  # of text and lines, legible on white and on black
SMOOTHING = 0.96  # weight of the previous mean in the exponential mean


def draw_results(results: dict[str, Any], path: Path) -> None:
    """Draw the levels of ``results`` into an image file with a transparent background.

    Args:
        results: Content of results.json.
        path: Image file; its suffix selects the format.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    _optional.require("matplotlib", "the demo's picture")
    from matplotlib.figure import Figure

    rows = {level: row for level, row in results["levels"].items() if row["step_losses"]}
    volumes = results["volumes"]
    figure = Figure(figsize=(11, 7.2 if volumes else 5.2), dpi=140, layout="constrained", facecolor="none")
    levels: Any = figure
    if volumes:
        parts: Any = figure.subfigures(2, 1, height_ratios=(1, 2.4), hspace=0.05)
        top, levels = parts
        top.suptitle(volumes["headline"], x=0.012, ha="left", fontsize=17, fontweight="bold", color=INK)
        _draw_volumes(top.add_subplot(), volumes)
    grid = levels.add_gridspec(2, 2, width_ratios=(1.3, 1), wspace=0.05, hspace=0.1)
    curves, speed, memory = (levels.add_subplot(grid[key]) for key in ((slice(None), 0), (0, 1), (1, 1)))
    _draw_curves(curves, rows)
    _draw_speed(speed, rows)
    _draw_memory(memory, rows)
    levels.supxlabel(_caption(results), x=0.012, ha="left", fontsize=8.5, color=INK)
    with whole_file(path) as part:
        figure.savefig(part)


def _caption(results: dict[str, Any]) -> str:
    machine = results["machine"]
    facts = ("lightning-turbo demo", machine.get("gpu", machine["processor"]), f"{machine['cores']} cores")
    versions = (f"torch {machine['versions']['torch']}", f"seed {results['settings']['seed']}")
    return "  ·  ".join((*facts, *versions, results["date"].split()[0]))


def _draw_volumes(axes: Any, volumes: dict[str, Any]) -> None:
    names = {
        "stock": "stock Lightning",
        "tuned": "found by tune:\n" + (", ".join(volumes["settings"]) or "nothing"),
    }
    rows = volumes["rows"].items()
    seconds = [row["seconds_per_epoch"] for _, row in rows]
    bars = axes.barh([names[name] for name, _ in rows], seconds, color=[COLOURS["O0"], COLOURS["O2"]], height=0.62)
    texts = [f"{row['seconds_per_epoch']:.2f} s, accuracy {row['val_accuracy']:.1%}" for _, row in rows]
    axes.bar_label(bars, texts, padding=4, color=INK)
    _style_bars(axes, "An epoch on volumes read from compressed files", 1.15 * max(seconds))


def _draw_curves(axes: Any, rows: dict[str, dict[str, Any]]) -> None:
    for width, (level, row) in zip(WIDTHS, rows.items(), strict=False):
        losses = _smooth([math.nan if loss is None else loss for loss in row["step_losses"]])
        label = level if row["val_accuracy"] is None else f"{level}  {row['val_accuracy']:.1%}"
        axes.plot(range(1, len(losses) + 1), losses, color=COLOURS[level], linewidth=width, label=label)
    axes.set_yscale("log")
    axes.margins(x=0.01)
    axes.set_xlabel("training step", color=INK)
    if rows:
        legend = axes.legend(title="validation accuracy", frameon=False, loc="lower left", labelcolor=INK, fontsize=11)
        legend.get_title().set_color(INK)
    accuracies = [row["val_accuracy"] for row in rows.values() if row["val_accuracy"] is not None]
    spread = f"; accuracies within {100 * (max(accuracies) - min(accuracies)):.1f} points" if accuracies else ""
    _style(axes, f"Training loss on digits, smoothed{spread}")
    axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)


def _draw_speed(axes: Any, rows: dict[str, dict[str, Any]]) -> None:
    speeds = {level: row["samples_per_second"] or 0.0 for level, row in rows.items()}
    bars = axes.barh(list(speeds), list(speeds.values()), color=[COLOURS[level] for level in speeds], height=0.62)
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds.values()], padding=4, color=INK)
    _style_bars(axes, f"Samples per second{_best(speeds, max, 'times')}", max(speeds.values(), default=1.0))


def _draw_memory(axes: Any, rows: dict[str, dict[str, Any]]) -> None:
    totals = dict.fromkeys(rows, 0.0)
    for part, opacity in PARTS.items():
        sizes = [row["bytes"].get(part, 0) / 1024 for row in rows.values()]
        colours = [COLOURS[level] for level in rows]
        bars = axes.barh(list(rows), sizes, left=list(totals.values()), height=0.62, color=colours, alpha=opacity)
        names = [part.replace("optimizer_", "")] + [""] * len(rows)
        axes.bar_label(bars, names[: len(rows)], label_type="center", fontsize=9, color="white")
        totals = {level: total + size for (level, total), size in zip(totals.items(), sizes, strict=True)}
    for position, total in enumerate(totals.values()):
        axes.text(total, position, f"  {total:,.0f} KiB", va="center", color=INK)
    _style_bars(axes, f"Memory of training{_best(totals, min, 'of')}", max(totals.values(), default=1.0))


def _best(values: dict[str, float], choose: Any, word: str) -> str:
    """Return the best level and its ratio to O0 for a title, or nothing if O0 is the best or absent."""
    best = choose(values, key=lambda level: values[level], default="O0")
    return "" if best == "O0" or not values.get("O0") else f": {best} {values[best] / values['O0']:.2f} {word} O0"


def _style_bars(axes: Any, title: str, longest: float) -> None:
    _style(axes, title)
    axes.set_xlim(0, longest * 1.22)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines[["bottom"]].set_visible(False)


def _style(axes: Any, title: str) -> None:
    axes.set_facecolor("none")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, length=0, which="both", labelsize=11)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the exponential mean with bias correction, as TensorBoard does. Ignore numbers that are not finite."""
    smoothed, mean, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean, weight = SMOOTHING * mean + (1 - SMOOTHING) * value, SMOOTHING * weight + (1 - SMOOTHING)
        smoothed.append(mean / weight if weight else math.nan)
    return smoothed
