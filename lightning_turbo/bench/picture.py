"""The picture of a suite: one bar a case, with its spread and its ratio to the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_turbo._files import whole_file
from lightning_turbo.bench.stats import figure, ratio, three_digits

__all__ = ["draw_suite"]

OURS, STOCK, PEER, BASE = "#0f766e", "#94a3b8", "#d97706", "#334155"


def draw_suite(suite: Mapping[str, Any], path: Path, *, where: str) -> bool:
    """Draw the cases of a suite as bars and write the picture.

    Args:
        suite: One of the ``suites`` of the results.
        path: A PNG file to write.
        where: The hardware, for the title.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    quantity = suite["quantity"]
    whole = [row for row in suite["rows"] if row["status"] != "failed"]
    rows = [(row, value) for row in whole if (value := figure(row, quantity)) is not None]
    if not rows:
        return False
    known = {row["case"]: row for row, _ in rows}
    unit, label = _unit(quantity, min(value.median for _, value in rows))
    picture = Figure(figsize=(9.0, 1.6 + 0.34 * len(rows)), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    places = range(len(rows))
    middles = [value.median / unit for _, value in rows]
    spread = [
        [(value.median - value.low) / unit for _, value in rows],
        [(value.high - value.median) / unit for _, value in rows],
    ]
    colours = [_colour(row) for row, _ in rows]
    axes.barh(places, middles, xerr=spread, color=colours, error_kw={"elinewidth": 1, "capsize": 2, "alpha": 0.7})
    axes.set_yticks(places, [row["case"] for row, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * max(middle + high for middle, high in zip(middles, spread[1], strict=True)))
    for place, (row, value) in zip(places, rows, strict=True):
        quotient = ratio(row, known[row["base"]], quantity) if row["base"] in known else None
        text = f" {three_digits(value.median / unit)}" + (f"  ({quotient.median:.2f}x)" if quotient else "")
        axes.annotate(text, (value.high / unit, place), va="center", fontsize=8)
    axes.set_xlabel(f"{label} a {suite['unit']}" if quantity == "seconds" else label)
    axes.set_title(f"{suite['suite']}: {suite['about']}\n{where}", fontsize=9, loc="left", wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    kinds = {BASE: "baseline", STOCK: "PyTorch, Lightning", OURS: "lightning_turbo", PEER: "other libraries"}
    shown = [Patch(color=colour, label=kinds[colour]) for colour in kinds if colour in colours]
    picture.legend(handles=shown, fontsize=8, frameon=False, loc="outside lower right", ncols=len(shown))
    with whole_file(path) as part:
        picture.savefig(part, dpi=140)
    return True


def _unit(quantity: str, smallest: float) -> tuple[float, str]:
    """Divisor and name of the unit that suits the smallest value."""
    if quantity == "seconds":
        return next(((s, n) for s, n in ((1.0, "s"), (1e-3, "ms")) if smallest >= s), (1e-6, "µs"))
    if quantity.endswith("_bytes"):
        return 2.0**20, f"{quantity.removesuffix('_bytes').replace('_', ' ')}, MiB"
    return 1.0, quantity.replace("_", " ")


def _colour(row: Mapping[str, Any]) -> str:
    if row["case"] == row["base"]:
        return BASE
    if row["peer"]:
        return PEER
    return OURS if row["ours"] else STOCK
