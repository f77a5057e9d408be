"""``python -m benchmarks gain TUNE_JSON PNG``: the picture of the README, four bars from a ``tune.json``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_turbo.measure import Bar, draw_bars

COLOURS = {"to compare": "#94a3b8", "chosen by tune": "#0f9488"}


def choose_bars(results: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Return name, milliseconds a step, and kind of each bar of a ``tune.json`` in which something was chosen."""
    chosen, default = results["chosen"], results["default"]["step_ms"]
    if not chosen["settings"]:
        raise ValueError("expected a tune.json with chosen settings, got one that recommends nothing")
    single = min((row for row in results["candidates"] if row["ratio"]), key=lambda row: row["ratio"])
    return [
        ("stock Lightning", default, "to compare"),
        (f"best single setting\n({single['name']})", default * single["ratio"], "to compare"),
        (f"chosen by tune\n({', '.join(chosen['settings'])})", default * chosen["ratio"], "chosen by tune"),
        ("bound of loading alone:\nno waiting for data", results["headroom"]["one_batch_ms"], "to compare"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture of the README from a tune.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gain", description=main.__doc__)
    parser.add_argument("results", type=Path, metavar="TUNE_JSON")
    parser.add_argument("picture", type=Path, metavar="PNG")
    asked = parser.parse_args(arguments)
    results = json.loads(asked.results.read_text())
    bars = [
        Bar(name=name, value=value, low=value, high=value, text=f"{value:.1f} ms", kind=kind)
        for name, value, kind in choose_bars(results)
    ]
    title = f"A training step, {1 / results['chosen']['ratio']:.1f} times as fast"
    draw_bars(bars, asked.picture, title=title, label="ms a step", colours=COLOURS)
    return 0
