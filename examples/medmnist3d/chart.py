"""Figure and table of the ablation: time per epoch relative to the plain run, and AUC."""

from __future__ import annotations

import shlex
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

__all__ = ["draw", "page", "summary", "table"]

INK, GRAY, FAINT, BLUE, ORANGE = "#22272e", "#57606a", "#d8dde3", "#0072b2", "#d55e00"

ABOUT = (
    "Seconds of a training epoch: median over the runs of the median epoch, without the first epoch of each run. "
    "Relative to plain: ratio to the plain run with the same seed, median and range over the runs; below 1 is faster. "
    "AUC on the validation set after the last epoch: median and range over the runs."
)


def summary(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Summarize the runs of each variant.

    Returns:
        One row for each variant with runs: ``name``, ``seconds`` (median over the runs of the median epoch, without the
        first epoch if there are more), ``ratios`` (one for each run, to the plain run of the same seed), ``aucs``.
    """
    plain = {run["seed"]: _epoch(run) for run in results["variants"]["plain"]["runs"]}
    return [
        {
            "name": name,
            "seconds": statistics.median(map(_epoch, row["runs"])),
            "ratios": [_epoch(run) / plain[run["seed"]] for run in row["runs"] if run["seed"] in plain],
            "aucs": [run["auc"] for run in row["runs"]],
        }
        for name, row in results["variants"].items()
        if row["runs"]
    ]


def _epoch(run: dict[str, Any]) -> float:
    return statistics.median(run["epoch_seconds"][1:] or run["epoch_seconds"])


def table(results: dict[str, Any]) -> str:
    """Return the rows as text."""
    lines = [f"{'':22}{'s/epoch':>10}{'to plain':>10}{'AUC':>8}"]
    for row in summary(results):
        ratio = f"{statistics.median(row['ratios']):.2f}" if row["ratios"] else "-"
        lines.append(f"{row['name']:22}{row['seconds']:>10.3g}{ratio:>10}{statistics.median(row['aucs']):>8.3f}")
    return "\n".join(lines)


def page(results: dict[str, Any], picture: str) -> str:
    """Return the results, the machine and the settings as Markdown.

    Args:
        results: What the ablation wrote to results.json.
        picture: File name of the image in the folder of the page.
    """
    facts = {**results["facts"]["versions"], **results["machine"]}
    facts |= {name: results["facts"][name] for name in ("system", "cores", "cpu_capability", "bfloat16_instructions")}
    facts["commit"] = results["facts"]["commit"]
    facts |= {f"setting {name}": value for name, value in results["settings"].items() if name not in ("out", "quick")}
    words = results["arguments"]  # without the folder, which differs for each reader
    command = shlex.join(
        ["python", "-m", "examples.medmnist3d.ablation"]
        + [word for before, word in zip(["", *words], words, strict=False) if "--out" not in (before, word)]
    )
    lines = [
        f"# Ablation on {results['machine']['device']}", "",
        f"Made {results['machine']['date']} by `{command}`.", "",
        ABOUT, "",
        "| | runs | s an epoch | relative to plain | AUC |", "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for row in summary(results):
        cells = (_middle(row["ratios"], ".2f"), _middle(row["aucs"], ".3f"))
        lines.append(f"| {row['name']} | {len(row['aucs'])} | {row['seconds']:.3g} | {' | '.join(cells)} |")
    lines += ["", f"![ablation]({picture})", "", "| | |", "| --- | --- |"]
    lines += [f"| {name.replace('_', ' ')} | {value} |" for name, value in facts.items()]
    return "\n".join(lines) + "\n"


def _middle(values: list[float], form: str) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the medians as bars and the single runs as dots.

    Args:
        results: What the ablation wrote to results.json.
        path: File of the image. Its suffix selects the format.
    """
    rows = summary(results)
    figure = Figure(figsize=(11, 1.8 + 0.36 * len(rows)), dpi=140, layout="constrained", facecolor="white")
    times, scores = figure.subplots(1, 2, sharey=True)
    names = [row["name"] for row in rows]
    for axes, key, color, title, label in (
        (times, "ratios", BLUE, "Time per epoch, relative to plain", lambda row: f"{row['seconds']:.3g} s"),
        (scores, "aucs", ORANGE, "Validation AUC", lambda row: f"{statistics.median(row['aucs']):.3f}"),
    ):
        for place, row in enumerate(rows):
            if row[key]:
                axes.barh(place, statistics.median(row[key]), height=0.62, color=color, alpha=0.75)
                axes.plot(row[key], [place] * len(row[key]), "o", color=INK, markersize=3)
                axes.annotate(
                    label(row), (max(row[key]), place), (6, 0), textcoords="offset points", va="center", color=GRAY,
                    fontsize=8,
                )  # fmt: skip
        axes.set_title(title, loc="left", fontsize=10.5, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, length=0)
    times.axvline(1, color=INK, linewidth=0.8)
    times.margins(x=0.12)  # room for the label of the longest bar
    scores.axvline(0.5, color=INK, linewidth=0.8)
    scores.set_xlim(0, 1.12)
    scores.set_xticks([0, 0.25, 0.5, 0.75, 1])
    times.set_yticks(range(len(names)), names)
    times.invert_yaxis()
    settings, machine = results["settings"], results["machine"]
    figure.suptitle(
        f"Trick by trick: {Path(settings['data']).name}, 3D ResNet-{settings['depth']} x {settings['widen']:g}",
        x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.supxlabel(
        f"{machine['date'].split()[0]}  ·  {machine['device']}, {machine['threads']} threads  ·  torch "
        f"{machine['torch']}  ·  {settings['epochs']} epochs, {settings['repeats']} repetitions, dots are runs"
        + ("  ·  --quick: the numbers mean nothing" if settings["quick"] else ""),
        x=0.012, ha="left", fontsize=8.5, color=INK,
    )  # fmt: skip
    figure.savefig(path)
