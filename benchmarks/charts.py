"""``python -m benchmarks charts``: draw the pictures of the stored pages again, from the tables in the pages.

A chart has one message: its title, which is also the alternative text of the picture in the page. The bars are labeled
with their values.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import COLORS, KINDS
from benchmarks.suite import BenchError
from lightning_turbo.measure import Bar, draw_bars, print_lines, three_digits

__all__ = ["CHARTS", "Chart", "main", "read_bars"]

PAGES = Path(__file__).parents[1] / "docs" / "benchmarks"
# Unit of a column -> the next larger unit, which is used if all values are 1000 or more.
LARGER = {"us": "ms", "ms": "s"}


@dataclass(frozen=True)
class Chart:
    """One picture of a stored page.

    Args:
        page: Name of the page without ``.md``.
        bars: First cell of each row to draw -> name of its bar, or "" for the text of the cell.
        ours: The rows of this package.
        peers: The rows of libraries other than PyTorch and Lightning.
        column: Column of the tables with the values to draw.
        label: Label of the axis; by default, the name of the column.
        inverted: For a column of ratios: whether to draw the inverse ("times as fast"), with the fastest row first.
    """

    page: str
    bars: dict[str, str]
    ours: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    column: str = "ms a step"
    label: str = ""
    inverted: bool = False

    @property
    def picture(self) -> str:
        """File name of the picture."""
        return f"{self.page}.png"


def _same(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "")


def _prefetch(page: str) -> Chart:
    load = "free step, even compute load x1, 0 workers: "
    names = "bound", "DataLoader", "BackgroundGenerator", "PrefetchLoader"
    labels = "the longer of step and load alone", "DataLoader", "prefetch_generator's thread", "PrefetchLoader"
    bars = {load + name: label for name, label in zip(names, labels, strict=True)}
    return Chart(page, bars, (f"{load}PrefetchLoader",), (f"{load}BackgroundGenerator",))


def _activations(page: str) -> Chart:
    levels = {f"activations: {name}": name for name in ("Lightning 32-true", "Lightning bf16-mixed", "O1", "O2", "O3")}
    return Chart(page, levels, tuple(levels)[2:], column="step peak, MiB")


def _photographs(page: str, column: str, *names: str) -> Chart:
    ours = tuple(name for name in names if name.startswith(("DALILoader", "PrefetchLoader")))
    peers = tuple(name for name in names if not name.startswith(("DALILoader", "PrefetchLoader", "DataLoader")))
    return Chart(page, {name: name.replace(" with Pillow", "") for name in names}, ours, peers, column)


ZERO, TWO = "DataLoader with Pillow, 0 workers", "DataLoader with Pillow, 2 workers"
THREADS = "PrefetchLoader with Pillow, 2 threads"
NODES = "torchdata's nodes with Pillow, 2 threads"
KINDS_OF_TRANSFORMS = (
    *(f"2D, {name}" for name in ("affine", "blur", "contrast", "gamma", "low resolution", "noise", "crop")),
    *(f"3D, {name}" for name in ("affine", "blur", "contrast", "gamma", "low resolution", "noise", "crop")),
)
TRANSFORMS = {f"{kind}: BatchAugmentation": kind for kind in KINDS_OF_TRANSFORMS}
COMPILED = {f"strategy turbo, {name}": name for name in ("toy", "digits", "volumes")}
ABLATION = _same("plain", "+ channels last", "+ prefetch", "+ O1", "+ O2", "all")
RATIO = "time / baseline"
CACHE = "MONAI's CacheDataset"
MONAI = {
    CACHE: "CacheDataset, defaults", f"{CACHE}, FgBgToIndicesd": "with FgBgToIndicesd",
    f"{CACHE}, ClassesToIndicesd": "with ClassesToIndicesd",
    f"{CACHE}, ClassesToIndicesd, dtypes of the files, no metadata": "and dtypes of the files, no metadata",
}  # fmt: skip
BATCHED = ("LengthBatchSampler(batch_size=)", "LengthBatchSampler(max_cost=)")
SAVES = ("AtomicCheckpointIO", "AtomicCheckpointIO(background=True)")
SMALL = {f"small tensors: {name}": name for name in ("DataLoader", "PrefetchLoader", "torchdata's StatefulDataLoader")}
STARTS = {
    "forkserver: DataLoader": "DataLoader", "forkserver: PrefetchLoader": "PrefetchLoader",
    "forkserver: torchdata's StatefulDataLoader": "torchdata's StatefulDataLoader",
    "forkserver: DataLoader, persistent_workers": "DataLoader, persistent workers",
}  # fmt: skip
GROUPS = {
    "SGD, fused, 465 groups": "SGD, 465 groups", "SGD, fused, merged": "SGD, 28 groups",
    "AdamW, fused, 465 groups": "AdamW, 465 groups", "AdamW, fused, merged": "AdamW, 28 groups",
}  # fmt: skip
LEVELS = ("O0", "O1, bf16", "O2, bf16", "O3, bf16")
TOY = {"plain loop": "", "Lightning": "", "strategy turbo, lean": ""}
CHARTS = (
    Chart("ablation_cpu-epyc-avx2_2026-11", ABLATION, tuple(ABLATION)[1:], column="s an epoch"),
    Chart("augment_cpu-xeon-avx512_2026-11", {"MONAI, sample by sample": "", "BatchAugmentation": "the batch at once"},
          ("BatchAugmentation",), ("MONAI, sample by sample",), "ms a batch"),
    Chart("compiled_cpu-epyc-avx2_2026-11", COMPILED, tuple(COMPILED), column=RATIO,
          label="time of a step / that of a plain loop"),
    _photographs("dali_cpu-epyc-avx512_2026-11", "ms a batch", ZERO, TWO, THREADS, NODES, "DALILoader",
                 "DALILoader, dynamic mode"),
    Chart("groups_cpu-epyc-avx512_2026-11", GROUPS, ("SGD, fused, merged", "AdamW, fused, merged")),
    Chart("lengths_cpu-epyc-avx512_2026-11", {"shuffled": "", "sorted within chunks": "", **_same(*BATCHED)}, BATCHED,
          column="s a epoch", label="s an epoch"),
    _photographs("loaders_cpu-epyc-avx512_2026-11", "ms a batch", ZERO, TWO, THREADS, NODES, "DALILoader"),
    Chart("loading_cpu-epyc-avx512_2026-11", SMALL, ("small tensors: PrefetchLoader",), tuple(SMALL)[2:], "us a batch"),
    _activations("memory_cpu-epyc-avx2_2026-11"),
    Chart("overhead_cpu-epyc-avx2_2026-11", TOY, ("strategy turbo, lean",), column=RATIO,
          label="time of a step / that of a plain loop"),
    Chart("patches_cpu-xeon-avx512_2026-11", {**MONAI, "PatchDataset, compressed": "", "PatchDataset": ""},
          ("PatchDataset", "PatchDataset, compressed"), tuple(MONAI), "us a batch"),
    Chart("precision_cpu-epyc-avx2_2026-11", _same("Lightning 32-true", "Lightning bf16-mixed", *LEVELS), LEVELS),
    _prefetch("prefetch_cpu-epyc-avx512_2026-11"),
    Chart("saves_cpu-epyc-avx2_2026-11",
          _same("no checkpoints", "Lightning's TorchCheckpointIO", "Lightning's AsyncCheckpointIO", *SAVES), SAVES,
          column="longest of ten ms", label="ms of the longest of ten steps"),
    Chart("starts_cpu-epyc-avx512_2026-11", STARTS, ("forkserver: PrefetchLoader",),
          ("forkserver: torchdata's StatefulDataLoader",), "ms a epoch", "ms to the first batch of a later epoch"),
    Chart("transforms_cpu-epyc-avx512_2026-11", TRANSFORMS, tuple(TRANSFORMS), column=RATIO,
          label="times as fast as MONAI's", inverted=True),
)  # fmt: skip


def title_of(chart: Chart) -> str:
    """Return the title of a chart: the alternative text of its picture in the page."""
    page = PAGES / f"{chart.page}.md"
    found = re.search(rf"!\[([^\]]+)\]\({re.escape(chart.picture)}\)", page.read_text(encoding="utf-8"))
    if not found:
        raise BenchError(f"expected ![title]({chart.picture}) in {str(page)!r}, got none. Add it.")
    return found[1]


def read_bars(chart: Chart, text: str) -> list[tuple[str, float, float, float]]:
    """Read the values of the bars from the tables of a page.

    Args:
        chart: The chart.
        text: Text of the page.

    Returns:
        Row, value, and lower and upper quartile for each bar. Without quartiles, they equal the value.

    Raises:
        BenchError: If a row of the chart is missing in the tables, or has no value in the column.
    """
    found: dict[str, tuple[float, float, float]] = {}
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        columns = columns if cells and columns else cells
        if chart.column not in columns or len(cells) <= columns.index(chart.column):
            continue
        numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cells[columns.index(chart.column)])]
        if cells[0] in chart.bars and numbers:
            middle, low, high = numbers if len(numbers) == 3 else numbers[:1] * 3
            found.setdefault(cells[0], (middle, low, high))
    if missing := [name for name in chart.bars if name not in found]:
        raise BenchError(
            f"{chart.picture}: expected rows with {chart.column!r}, got none for {missing}. Correct CHARTS or the page."
        )
    return [(name, *found[name]) for name in chart.bars]


def draw(chart: Chart, folder: Path) -> Path:
    """Draw a chart into a folder, and return the path of the file."""
    rows = read_bars(chart, (PAGES / f"{chart.page}.md").read_text(encoding="utf-8"))
    if chart.inverted:
        rows = [(name, 1 / value, 1 / high, 1 / low) for name, value, low, high in rows]
        rows.sort(key=lambda row: -row[1])
    label, unit, scale = chart.label or chart.column, (chart.label or chart.column).partition(" ")[0], 1.0
    if unit in LARGER and min(value for _, value, *_ in rows) >= 1000:
        label, scale = label.replace(unit, LARGER[unit], 1), 1000.0
    kinds = dict.fromkeys(chart.ours, "ours") | dict.fromkeys(chart.peers, "peer")
    bars = [
        Bar(
            name=chart.bars[name] or name, value=value / scale, low=low / scale, high=high / scale,
            text=f"{value:.2f}" if chart.column == RATIO else three_digits(value / scale),
            kind=KINDS[kinds.get(name, "torch")],
        )
        for name, value, low, high in rows
    ]  # fmt: skip
    colors = {KINDS[kind]: color for kind, color in COLORS.items()}
    path = folder / chart.picture
    draw_bars(bars, path, title=title_of(chart), label=label, colors=colors)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the pictures of the stored pages from the tables in the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks charts", description=main.__doc__)
    parser.add_argument("pages", nargs="*", help="prefixes of page names (default: all pages)")
    parser.add_argument("--out", type=Path, default=PAGES, help="folder for the pictures (default: docs/benchmarks)")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for chart in CHARTS:
        if not options.pages or chart.page.startswith(tuple(options.pages)):
            print_lines(str(draw(chart, options.out)))
    return 0
