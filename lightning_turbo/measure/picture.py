"""A picture of horizontal bars, with their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_turbo._files import whole_file
from lightning_turbo._optional import how_to_install, installed

__all__ = ["Bar", "draw_bars", "why_no_picture"]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar."""

    name: str  # at its left
    value: float  # where it ends
    low: float  # the lower end of its spread
    high: float
    text: str  # behind it
    kind: str  # a key of the colours


def why_no_picture() -> str:
    """Return in one line why no picture can be drawn and how to change that; empty where matplotlib is installed."""
    if installed("matplotlib"):
        return ""
    return f"There is no picture, because matplotlib is not installed: {how_to_install('matplotlib')}"


def draw_bars(
    bars: Sequence[Bar],
    path: Path,
    *,
    title: str,
    label: str,
    colours: Mapping[str, str],
    curves: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Draw bars from top to bottom and write the picture.

    Args:
        bars: What to draw, one or more.
        path: A PNG file to write.
        title: Above the picture.
        label: Of the axis.
        colours: Kind of a bar, or name of a curve, as the legend names it, and its colour.
        curves: Losses of each step, drawn below the bars.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height = 1.6 + 0.34 * len(bars)
    picture = Figure(figsize=(9.0, height + (2.5 if curves else 0.0)), layout="constrained")
    # Without pyplot, which would look for a window system and keep the figure.
    FigureCanvasAgg(picture)
    axes = picture.add_subplot(2, 1, 1) if curves else picture.add_subplot()
    if curves:
        below = picture.add_subplot(2, 1, 2)
        for name, values in curves.items():
            below.plot(values, label=name, color=colours[name], linewidth=1)
        below.set(xlabel="step", ylabel="loss")
    for position, bar in enumerate(bars):
        axes.barh(position, bar.value, color=colours[bar.kind])
        axes.hlines(position, bar.low, bar.high, color="black", linewidth=1, alpha=0.7)
        axes.annotate(f" {bar.text}", (bar.high, position), va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    # The first bar is on top, as the first line of a table is; the room at the right is for the text behind the bars.
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * max(bar.high for bar in bars))
    axes.set_xlabel(label)
    # Between dollars, as of a command, matplotlib expects mathematics; parse_math=False does not hold where it wraps.
    # It begins at the picture's left edge, so that a long one has room.
    picture.suptitle(title.replace("$", r"\$"), fontsize=10, x=0.01, ha="left", wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    used = {bar.kind for bar in bars}
    handles = [Patch(color=colour, label=kind) for kind, colour in colours.items() if kind in used]
    picture.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower right", ncols=len(handles))
    with whole_file(path) as part:
        picture.savefig(part, dpi=140, format="png")
