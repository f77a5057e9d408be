"""Results as JSON, Markdown and pictures in one folder, and as tables in the terminal."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quantities import figure, ratio, throughput
from benchmarks.suite import BenchError
from lightning_turbo._files import whole_file
from lightning_turbo.measure import (
    Bar,
    Summary,
    draw_bars,
    interval,
    markdown_table,
    step_seconds,
    three_digits,
    write_json,
)

__all__ = ["aim_verdicts", "load_results", "markdown", "suite_tables", "write_report", "write_results"]

QUANTITIES = {"seconds": "time", "peak_bytes": "peak memory"}
SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
HOW = (
    "Times are medians with quartiles, in brackets, over rounds that the cases took in turns, each in a process of its "
    "own. Ratios are taken pair by pair, round by round; below 1 is faster or smaller."
)
Table = tuple[list[str], list[list[str]]]


def _scale(seconds: float) -> tuple[float, str]:
    """The unit in which a time reads best."""
    return next((scale for scale in SCALES if seconds >= scale[0]), SCALES[-1])


def _spread(value: Summary | None, unit: float = 1.0) -> str:
    if value is None:
        return ""
    middle, low, high = (three_digits(number / unit) for number in (value.median, value.low, value.high))
    return middle if value.count == 1 else f"{middle} ({low}-{high})"


def _ratio(value: Summary | None) -> str:
    if value is None:
        return ""
    middle = f"{value.median:.2f}"
    return middle if value.count == 1 else f"{middle} ({value.low:.2f}-{value.high:.2f})"


def _number(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 2**20:.1f}" if name.endswith("_bytes") else f"{value:.4g}"


def _heading(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ") + (", MiB" if name.endswith("_bytes") else "")


def _note(row: Mapping[str, Any]) -> str:
    return "" if row["status"] == "ok" else f"{row['status']}: {row['reason']}".rstrip(": ")


def _main_table(suite: Mapping[str, Any]) -> Table:
    rows = suite["rows"]
    known = {row["case"]: row for row in rows}
    times = [value.median for row in rows if row["status"] != "failed" and (value := step_seconds(row))]
    scale, unit = _scale(min(times)) if times else SCALES[0]
    names = list(dict.fromkeys(name for row in rows for name in row["numbers"]))
    quantity = suite["quantity"]
    columns = [
        "case",
        f"{unit} a {suite['unit']}",
        f"{QUANTITIES.get(quantity, _heading(quantity))} / baseline",
    ]
    with_samples = any(throughput(row) for row in rows)
    columns += ["samples/s"] * with_samples + ["peak memory, MiB"] + [_heading(name) for name in names] + ["note"]
    lines = []
    for row in rows:
        rate = throughput(row)
        lines.append(
            [
                row["case"],
                _spread(step_seconds(row), scale),
                _ratio(ratio(row, known[row["base"]], quantity)) if row["base"] in known else "",
                *([f"{rate:.0f}" if rate else ""] * with_samples),
                _number("_bytes", row["peak_bytes"]),
                *(_number(name, row["numbers"].get(name)) for name in names),
                _note(row),
            ]
        )
    return columns, lines


def _pair_table(suite: Mapping[str, Any]) -> Table:
    known = {row["case"]: row for row in suite["rows"]}
    quantity = suite["quantity"]
    columns = ["case", "divided by", QUANTITIES.get(quantity, _heading(quantity))]
    lines = [
        [row["case"], other, _ratio(value)]
        for row in suite["rows"]
        for other in row["against"]
        if other in known and (value := ratio(row, known[other], quantity))
    ]
    return columns, lines


def aim_verdicts(
    suite: Mapping[str, Any], machine: Mapping[str, Any]
) -> list[tuple[Mapping[str, Any], Summary | None, tuple[float, float] | None, str]]:
    """Return each aim of a suite with what came out.

    Args:
        suite: One of the ``suites`` of the results.
        machine: The ``machine`` of the results.

    Returns:
        Aim, ratio, its 95 % interval where there were processes enough, and ``"met"``, ``"missed"``, ``"undecided"``
        (that interval, or without it the quartiles, lie on both sides of the limit), ``"not measured"``, or ``"does
        not count here"`` where the machine lacks what the aim asks for.
    """
    known = {row["case"]: row for row in suite["rows"]}
    verdicts = []
    for aim in suite["aims"]:
        row, quantity = known[aim["case"]], aim["quantity"]
        value = ratio(row, known[aim["against"]], quantity) if aim["against"] else figure(row, quantity)
        ends = interval(row, known[aim["against"]]) if aim["against"] and quantity == "seconds" else None
        low, high = ends or (value.low, value.high) if value else (0.0, 0.0)
        if value is None:
            verdict = "not measured"
        elif aim["fact"] and not machine.get(aim["fact"]):
            verdict = "does not count here"
        elif high <= aim["at_most"]:
            verdict = "met"
        elif low > aim["at_most"]:
            verdict = "missed"
        else:
            verdict = "undecided"
        verdicts.append((aim, value, ends, verdict))
    return verdicts


def _aim_table(suite: Mapping[str, Any], machine: Mapping[str, Any]) -> Table:
    columns = ["aim", "divided by", "quantity", "at most", "measured", "95 % interval", "verdict", "counts where"]
    lines = [
        [
            aim["case"],
            aim["against"],
            QUANTITIES.get(aim["quantity"], _heading(aim["quantity"])),
            f"{aim['at_most']:.2f}",
            _ratio(value),
            f"{ends[0]:.3f}-{ends[1]:.3f}" if ends else "",
            verdict,
            aim["condition"] or aim["fact"].replace("_", " "),
        ]
        for aim, value, ends, verdict in aim_verdicts(suite, machine)
    ]
    return columns, lines


def suite_tables(suite: Mapping[str, Any], machine: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a suite: the cases, the further pairs, the aims; empty ones are left out.

    Args:
        suite: One of the ``suites`` of the results.
        machine: The ``machine`` of the results.

    Returns:
        Pairs of column names and lines of cells.
    """
    return [table for table in (_main_table(suite), _pair_table(suite), _aim_table(suite, machine)) if table[1]]


def markdown(results: Mapping[str, Any], pictures: Sequence[str] = ()) -> str:
    """Return the report as Markdown.

    Args:
        results: What ``run_suites`` returned.
        pictures: Names of suites that have a picture beside the report.
    """
    machine = results["machine"]
    where = machine.get("gpu") or machine["processor"]
    lines = [f"# Benchmark on {where}"]
    if results["not_run"]:
        lines += ["", f"Not run, because no time was left: {', '.join(results['not_run'])}."]
    for suite in results["suites"]:
        lines += ["", f"## {suite['suite']}", ""]
        if suite["suite"] in pictures:
            lines += [f"![{suite['suite']}]({suite['suite']}.png)", ""]
        rounds = max((len(row["rounds"]) for row in suite["rows"]), default=0)
        steps = f"{rounds} rounds of {suite['steps']} x {suite['unit']}, after {suite['warmup']} to warm up."
        lines += [suite["about"], "", f"{steps} {_baselines(suite['rows'])}"]
        for table in suite_tables(suite, machine):
            lines += ["", *markdown_table(*table)]
        if suite["left_out"]:
            lines += ["", "Left out by the settings: " + ", ".join(suite["left_out"]) + "."]
    return "\n".join([*lines, "", *_settings(results)]) + "\n"


def _settings(results: Mapping[str, Any]) -> list[str]:
    """The folded end of a report: when, by which command and how it was measured, on which machine."""
    machine = results["machine"]
    ended = f"Begun {results['started']}, ended {results['finished'] or 'not'}"
    if results["interrupted"]:
        ended += ", **interrupted**: the numbers are of the rounds until then"
    environment = [f"{name}={value}" for name, value in machine.get("environment", {}).items()]
    facts = {
        **{key: value for key, value in machine.items() if key not in ("environment", "versions")},
        **({"environment": environment} if environment else {}),
        **machine["versions"],
        **{f"setting {key}": value for key, value in results["settings"].items()},
    }
    lines = ['<details markdown="1"><summary>Settings</summary>', "", f"{ended}.", ""]
    lines += [f"Command: `{shlex.join(results['command'])}`", "", HOW, "", "| | |", "| --- | --- |"]
    for key, value in facts.items():
        text = f"{value / 2**30:.1f} GiB" if key.endswith("_bytes") and value else str(value)
        text = f"`{text}`" if isinstance(value, list) else text  # patterns hold asterisks, names underscores
        lines.append(f"| {key.removesuffix('_bytes').replace('_', ' ')} | {text} |")
    return [*lines, "", "</details>"]


def _baselines(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the cases are divided by: for each its ``base``, which is divided by itself."""
    names = [row["case"] for row in rows if row["case"] == row["base"]]
    named = "; ".join(names[:4]) + (f"; and {len(names) - 4} more" if len(names) > 4 else "")
    return f"Baseline: {named}." if len(names) == 1 else f"Baselines, each for the cases of its kind: {named}."


def write_results(results: Mapping[str, Any], folder: Path) -> Path:
    """Write ``results.json``, whole or not at all.

    Args:
        results: What ``run_suites`` returned.
        folder: Where; made if missing.

    Returns:
        The path of the file.
    """
    return write_json(results, folder / "results.json")


# Kinds of bars, in the order of the legend.
COLOURS = {
    "baseline": "#334155",
    "PyTorch, Lightning": "#94a3b8",
    "lightning_turbo": "#0f766e",
    "other libraries": "#d97706",
}


def _kind(row: Mapping[str, Any]) -> str:
    if row["case"] == row["base"]:
        return "baseline"
    if row["peer"]:
        return "other libraries"
    return "lightning_turbo" if row["ours"] else "PyTorch, Lightning"


def _unit(quantity: str, smallest: float) -> tuple[float, str]:
    """Divisor and name of the unit that suits the smallest value."""
    if quantity == "seconds":
        return _scale(smallest)
    if quantity.endswith("_bytes"):
        return 2.0**20, _heading(quantity)
    return 1.0, _heading(quantity)


def draw_suite(suite: Mapping[str, Any], path: Path, where: str) -> bool:
    """Draw the cases of a suite as bars and write the picture.

    Args:
        suite: One of the ``suites`` of the results.
        path: A PNG file to write.
        where: The hardware, for the title.

    Returns:
        Whether there was anything to draw.
    """
    quantity = suite["quantity"]
    whole = [row for row in suite["rows"] if row["status"] != "failed"]
    rows = [(row, value) for row in whole if (value := figure(row, quantity)) is not None]
    if not rows:
        return False
    known = {row["case"]: row for row, _ in rows}
    scale, label = _unit(quantity, min(value.median for _, value in rows))
    bars = []
    for row, value in rows:
        quotient = ratio(row, known[row["base"]], quantity) if row["base"] in known else None
        middle, low, high = (number / scale for number in (value.median, value.low, value.high))
        text = three_digits(middle) + (f"  ({quotient.median:.2f}x)" if quotient else "")
        bars.append(Bar(name=row["case"], value=middle, low=low, high=high, text=text, kind=_kind(row)))
    title = f"{suite['suite']}: {suite['about']}\n{where}"
    draw_bars(
        bars, path, title=title, label=f"{label} a {suite['unit']}" if quantity == "seconds" else label, colours=COLOURS
    )
    return True


def write_report(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``results.json``, ``results.md`` and a picture for each suite.

    Args:
        results: What ``run_suites`` returned.
        folder: Where; made if missing.

    Returns:
        The paths of the files.
    """
    paths = [write_results(results, folder)]
    where = results["machine"].get("gpu") or results["machine"]["processor"]
    drawn = []
    for suite in results["suites"]:
        picture = folder / f"{suite['suite']}.png"
        if draw_suite(suite, picture, where):
            drawn.append(suite["suite"])
            paths.append(picture)
    report = folder / "results.md"
    with whole_file(report) as part:
        part.write_text(markdown(results, drawn), encoding="utf-8")
    return [*paths, report]


def load_results(path: Path) -> dict[str, Any]:
    """Read a ``results.json``.

    Args:
        path: The file, or the folder that holds it.

    Raises:
        BenchError: If it is no such file, or of another format.
    """
    from benchmarks.runner import FORMAT

    file = path / "results.json" if path.is_dir() else path
    if not file.is_file():
        raise BenchError(
            f"{str(path)!r} is not a file: expected a results.json or its folder. Run the benchmark first."
        )
    try:
        results = json.loads(file.read_text())
    except ValueError as error:
        raise BenchError(f"{str(path)!r} is not JSON ({error}): expected a results.json. Name another file.") from None
    if not isinstance(results, dict) or results.get("format") != FORMAT or "suites" not in results:
        raise BenchError(
            f"{str(path)!r} is not a result of this version's benchmarks (format {FORMAT}). "
            "Name a results.json that `python -m benchmarks` wrote."
        )
    return results
