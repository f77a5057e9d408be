"""The picture of the README: four bars from a ``tune.json``.

python -m benchmarks.gain runs/tune/tune.json docs/images/gain.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lightning_turbo._files import whole_file

INK, QUIET, STRONG = "#7c8796", "#94a3b8", "#0f9488"  # readable on light and on dark ground


def choose_bars(results: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Return name, milliseconds a step, and colour of each bar.

    Args:
        results: The content of a ``tune.json`` in which something was chosen.

    Raises:
        ValueError: If nothing was chosen.
    """
    chosen, default = results["chosen"], results["default"]["step_ms"]
    if not chosen["settings"]:
        raise ValueError("Expected a tune.json with chosen settings, got one that recommends nothing.")
    single = min((row for row in results["candidates"] if row["ratio"]), key=lambda row: row["ratio"])
    return [
        ("stock Lightning", default, QUIET),
        (f"best single setting\n({single['name']})", default * single["ratio"], QUIET),
        (f"chosen by tune\n({', '.join(chosen['settings'])})", default * chosen["ratio"], STRONG),
        ("bound of loading alone:\nno waiting for data", results["headroom"]["one_batch_ms"], QUIET),
    ]


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture, with a transparent ground."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = choose_bars(results)
    picture = Figure(figsize=(8.0, 2.6), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    for position, (_, milliseconds, colour) in enumerate(bars):
        axes.barh(position, milliseconds, color=colour, height=0.62)
        axes.annotate(f" {milliseconds:.1f} ms", (milliseconds, position), va="center", color=INK, fontsize=10)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], color=INK, fontsize=9)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * max(milliseconds for _, milliseconds, _ in bars))
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    factor = 1 / results["chosen"]["ratio"]
    axes.set_title(f"A training step, {factor:.1f} times as fast", loc="left", color=INK, fontsize=12)
    with whole_file(path) as part:
        picture.savefig(part, dpi=160, transparent=True)


def main() -> None:
    """Read the command line and draw."""
    text = "Draw the picture of the README from a tune.json."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gain", description=text)
    parser.add_argument("results", type=Path, metavar="TUNE_JSON")
    parser.add_argument("picture", type=Path, metavar="PNG")
    arguments = parser.parse_args()
    draw(json.loads(arguments.results.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
