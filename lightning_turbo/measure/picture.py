"""Draws horizontal bars with their spread."""

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

    name: str  # label on the left
    value: float  # length of the bar
    low: float  # lower end of the spread
    high: float
    text: str  # text after the bar
    kind: str  # a key of ``colors``


def why_no_picture() -> str:
    """Return in one line why no picture can be drawn and what to do; empty if matplotlib is installed."""
    if installed("matplotlib"):
        return ""
    return f"There is no picture, because matplotlib is not installed: {how_to_install('matplotlib')}"


def draw_bars(
    bars: Sequence[Bar],
    path: Path,
    *,
    title: str,
    label: str,
    colors: Mapping[str, str],
    curves: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Draw bars from top to bottom and write the picture.

    Args:
        bars: The bars, at least one.
        path: A PNG file to write.
        title: Title above the picture.
        label: Label of the axis.
        colors: Color of each kind of bar and of each curve, by its name in the legend.
        curves: Losses per step, drawn below the bars.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height = 1.6 + 0.34 * len(bars)
    picture = Figure(figsize=(9.0, height + (2.5 if curves else 0.0)), layout="constrained")
    # Without pyplot, which would look for a window system and keep the figure alive.
    FigureCanvasAgg(picture)
    axes = picture.add_subplot(2, 1, 1) if curves else picture.add_subplot()
    if curves:
        below = picture.add_subplot(2, 1, 2)
        for name, values in curves.items():
            below.plot(values, label=name, color=colors[name], linewidth=1)
        below.set(xlabel="step", ylabel="loss")
    for position, bar in enumerate(bars):
        axes.barh(position, bar.value, color=colors[bar.kind])
        axes.hlines(position, bar.low, bar.high, color="black", linewidth=1, alpha=0.7)
        axes.annotate(f" {bar.text}", (bar.high, position), va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    # The first bar is at the top, like the first row of a table; the space on the right is for the text.
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * max(bar.high for bar in bars))
    axes.set_xlabel(label)
    # Matplotlib parses text between dollar signs as mathematics, and parse_math=False has no effect on wrapped text.
    # The title starts at the left edge, which leaves space for a long one.
    picture.suptitle(title.replace("$", r"\$"), fontsize=10, x=0.01, ha="left", wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    used = {bar.kind for bar in bars}
    handles = [Patch(color=color, label=kind) for kind, color in colors.items() if kind in used]
    picture.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower right", ncols=len(handles))
    with whole_file(path) as part:
        picture.savefig(part, dpi=140, format="png")
