"""The report: results as JSON, Markdown, pictures and tables in the terminal."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.figures import Summary, interval, step_seconds, summarize
from benchmarks.runner import FORMAT
from benchmarks.suite import BenchError
from lightning_turbo._files import whole_file
from lightning_turbo.measure import Bar, draw_bars, markdown_table, three_digits, write_json

__all__ = ["aim_verdicts", "figure", "load_results", "markdown", "ratio", "suite_tables", "write_report"]

QUANTITIES = {"seconds": "time", "peak_bytes": "peak memory"}
SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
HOW = (
    "Times are medians with quartiles, in brackets, over interleaved rounds of the cases, each in a process of its "
    "own. Ratios are taken pair by pair, round by round; below 1 is faster or smaller."
)
COLORS = {"baseline": "#334155", "torch": "#94a3b8", "ours": "#0f766e", "peer": "#d97706"}
KINDS = {"torch": "PyTorch, Lightning", "ours": "lightning_turbo", "peer": "other libraries", "baseline": "baseline"}
Row = Mapping[str, Any]
Table = tuple[list[str], list[list[str]]]


def figure(row: Row, quantity: str) -> Summary | None:
    """Return one quantity of a case: ``"seconds"`` per step, ``"peak_bytes"``, or a number that the case returned."""
    if quantity == "seconds":
        return step_seconds(row)
    value = row["peak_bytes"] if quantity == "peak_bytes" else row["numbers"].get(quantity)
    return None if value is None else summarize([value])


def ratio(row: Row, other: Row, quantity: str = "seconds") -> Summary | None:
    """Return the ratio of two cases, below 1 if ``row`` is faster or smaller. Times are divided round by round.

    Returns:
        The ratio, or ``None`` if one of the values is missing or the denominator is zero.
    """
    if quantity == "seconds":
        return figures.ratio(row, other)
    above, below = figure(row, quantity), figure(other, quantity)
    return None if above is None or below is None or not below.median else summarize([above.median / below.median])


def _spread(value: Summary | None, unit: float = 1.0, decimals: int | None = None) -> str:
    if value is None:
        return ""
    numbers = [number / unit for number in (value.median, value.low, value.high)]
    middle, low, high = (three_digits(n) if decimals is None else f"{n:.{decimals}f}" for n in numbers)
    return middle if value.count == 1 else f"{middle} ({low}-{high})"


def _number(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value / 2**20:.1f}" if name.endswith("_bytes") else f"{value:.4g}"


def _heading(name: str) -> str:
    bare = name.removesuffix("_bytes").replace("_", " ") + (", MiB" if name.endswith("_bytes") else "")
    return QUANTITIES.get(name, bare)


def _throughput(row: Row) -> str:
    rates = summarize([part["samples"] / part["seconds"] for part in row["rounds"] if part["samples"]])
    return f"{rates.median:.0f}" if rates else ""


def _scale(suite: Row) -> tuple[float, str]:
    """Return the unit that suits the times of a suite best, as seconds and symbol."""
    times = [value.median for row in suite["rows"] if row["status"] != "failed" and (value := step_seconds(row))]
    return next((scale for scale in SCALES if times and min(times) >= scale[0]), SCALES[-1] if times else SCALES[0])


def _main_table(suite: Row) -> Table:
    known = {row["case"]: row for row in suite["rows"]}
    scale, unit = _scale(suite)
    numbers = list(dict.fromkeys(name for row in known.values() for name in row["numbers"]))

    def cells(row: Row) -> dict[str, str]:
        quotient = ratio(row, known[row["base"]], suite["quantity"]) if row["base"] in known else None
        return {
            "case": row["case"],
            f"{unit} a {suite['unit']}": _spread(step_seconds(row), scale),
            f"{_heading(suite['quantity'])} / baseline": _spread(quotient, decimals=2),
            "samples/s": _throughput(row),
            "peak memory, MiB": _number("_bytes", row["peak_bytes"]),
            **{_heading(name): _number(name, row["numbers"].get(name)) for name in numbers},
            "note": "" if row["status"] == "ok" else f"{row['status']}: {row['reason']}".rstrip(": "),
        }

    lines = [cells(row) for row in known.values()]
    columns = [name for name in (lines[0] if lines else ()) if name != "samples/s" or any(line[name] for line in lines)]
    return columns, [[line[name] for name in columns] for line in lines]


def _pair_table(suite: Row) -> Table:
    known = {row["case"]: row for row in suite["rows"]}
    lines = [
        [row["case"], other, _spread(value, decimals=2)]
        for row in suite["rows"]
        for other in row["against"]
        if other in known and (value := ratio(row, known[other], suite["quantity"]))
    ]
    return ["case", "divided by", _heading(suite["quantity"])], lines


def aim_verdicts(suite: Row, machine: Row) -> list[tuple[Row, Summary | None, tuple[float, float] | None, str]]:
    """Return each aim of a suite with its verdict.

    Args:
        suite: One of the ``suites`` of the results.
        machine: The ``machine`` of the results.

    Returns:
        Tuples of the aim, the ratio, the 95 % interval of the ratio if there were enough processes, and the verdict:
        ``"met"``, ``"missed"``, ``"undecided"`` if the limit lies within the interval (or, without an interval, within
        the quartiles), ``"not measured"``, or ``"does not count here"`` if the machine lacks the aim's ``fact``.
    """
    known = {row["case"]: row for row in suite["rows"]}
    verdicts = []
    for aim in suite["aims"]:
        row, quantity = known[aim["case"]], aim["quantity"]
        other = known[aim["against"]] if aim["against"] else None
        value = figure(row, quantity) if other is None else ratio(row, other, quantity)
        ends = None if other is None or quantity != "seconds" else interval(row, other)
        verdicts.append((aim, value, ends, _verdict(aim, value, ends, machine)))
    return verdicts


def _verdict(aim: Row, value: Summary | None, ends: tuple[float, float] | None, machine: Row) -> str:
    if value is None:
        return "not measured"
    if aim["fact"] and not machine.get(aim["fact"]):
        return "does not count here"
    low, high = ends or (value.low, value.high)
    if high <= aim["at_most"]:
        return "met"
    return "missed" if low > aim["at_most"] else "undecided"


def suite_tables(suite: Row, machine: Row) -> list[Table]:
    """Return the tables of a suite, without empty ones: the cases, the further pairs, and the aims.

    Args:
        suite: One of the ``suites`` of the results.
        machine: The ``machine`` of the results.

    Returns:
        Pairs of column names and rows of cells.
    """
    aims = [
        [
            aim["case"], aim["against"], _heading(aim["quantity"]), f"{aim['at_most']:.2f}", _spread(value, decimals=2),
            f"{ends[0]:.3f}-{ends[1]:.3f}" if ends else "", verdict, aim["fact"].replace("_", " "),
        ]
        for aim, value, ends, verdict in aim_verdicts(suite, machine)
    ]  # fmt: skip
    columns = ["aim", "divided by", "quantity", "at most", "measured", "95 % interval", "verdict", "counts where"]
    return [table for table in (_main_table(suite), _pair_table(suite), (columns, aims)) if table[1]]


def markdown(results: Row, pictures: Sequence[str] = ()) -> str:
    """Return the report as Markdown.

    Args:
        results: The results of ``measure``.
        pictures: Names of the suites that have a picture in the folder of the report.
    """
    machine = results["machine"]
    lines = [f"# Benchmark on {machine.get('gpu') or machine['processor']}"]
    if results["not_run"]:
        lines += ["", f"Not run, because no time was left: {', '.join(results['not_run'])}."]
    for suite in results["suites"]:
        lines += ["", f"## {suite['suite']}", ""]
        if suite["suite"] in pictures:
            lines += [f"![{suite['suite']}]({suite['suite']}.png)", ""]
        rounds = max((len(row["rounds"]) for row in suite["rows"]), default=0)
        size = f"{suite['round_seconds']} s" if suite["round_seconds"] else f"{suite['steps']} x {suite['unit']}"
        steps = f"{rounds} rounds of {size}, after {suite['warmup']} x {suite['unit']} to warm up."
        lines += [suite["about"], "", f"{steps} {_baselines(suite['rows'])}"]
        for table in suite_tables(suite, machine):
            lines += ["", *markdown_table(*table)]
        if suite["prepared"]:
            lines += ["", *markdown_table(["prepared", ""], [[k, _number(k, v)] for k, v in suite["prepared"].items()])]
        if suite["left_out"]:
            lines += ["", "Left out by the settings: " + ", ".join(suite["left_out"]) + "."]
    return "\n".join([*lines, "", *_settings(results)]) + "\n"


def _baselines(rows: Sequence[Row]) -> str:
    """Return a sentence that names the baselines: the cases that are their own ``base``."""
    names = [row["case"] for row in rows if row["case"] == row["base"]]
    named = "; ".join(names[:4]) + (f"; and {len(names) - 4} more" if len(names) > 4 else "")
    return f"Baseline: {named}." if len(names) == 1 else f"Baselines, each for the cases of its kind: {named}."


def _settings(results: Row) -> list[str]:
    """Return the collapsed end of a report: when, with which command, how and on which machine it was measured."""
    machine = dict(results["machine"])
    ended = f"Begun {results['started']}, ended {results['finished'] or 'not'}"
    if results["interrupted"]:
        ended += ", **interrupted**: the numbers are of the rounds until then"
    versions, environment = machine.pop("versions"), machine.pop("environment", {})
    facts = {**machine, "environment": environment or None, **versions}
    facts |= {f"setting {key}": value for key, value in results["settings"].items()}
    lines = ['<details markdown="1"><summary>Settings</summary>', "", f"{ended}.", ""]
    lines += [f"Command: `{shlex.join(results['command'])}`", "", HOW, "", "| | |", "| --- | --- |"]
    for key, value in facts.items():
        text = f"{value / 2**30:.1f} GiB" if key.endswith("_bytes") and value else str(value)
        text = f"`{text}`" if isinstance(value, list | dict) else text  # asterisks and underscores are Markdown
        lines.append(f"| {key.removesuffix('_bytes').replace('_', ' ')} | {text} |")
    return [*lines, "", "</details>"]


def _factor(quotient: float, quantity: str) -> str:
    """Return a ratio in words, such as "2.6 times as fast" or "1.2 times smaller"."""
    better, worse = ("as fast", "as long") if quantity == "seconds" else ("smaller", "larger")
    factor, words = (quotient, worse) if quotient >= 1 else (1 / quotient if quotient else math.inf, better)
    return "" if f"{factor:.2f}" == "1.00" else f"{factor:.2g} times {words}"


def draw_suite(suite: Row, path: Path, where: str) -> bool:
    """Draw a bar chart of the first group of cases of a suite that share a baseline.

    Args:
        suite: One of the ``suites`` of the results.
        path: The PNG file to write.
        where: The hardware, for the title.

    Returns:
        Whether there was a case to draw.
    """
    quantity, known = suite["quantity"], {row["case"]: row for row in suite["rows"]}
    scale, label = 2.0**20 if quantity.endswith("_bytes") else 1.0, _heading(quantity)
    if quantity == "seconds":
        scale, unit = _scale(suite)
        label = f"{unit} a {suite['unit']}"

    def bar(row: Row, value: Summary) -> Bar:
        quotient = ratio(row, known[row["base"]], quantity) if row["base"] in known else None
        middle, low, high = (number / scale for number in (value.median, value.low, value.high))
        factor = _factor(quotient.median, quantity) if quotient else ""
        text = ", ".join(filter(None, (three_digits(middle), factor)))
        kind = "baseline" if row["case"] == row["base"] else row["kind"]
        return Bar(name=row["case"], value=middle, low=low, high=high, text=text, kind=KINDS[kind])

    measured = [(row, figure(row, quantity)) for row in known.values() if row["status"] != "failed"]
    groups: dict[str, list[Bar]] = {}
    for row, value in measured:
        if value is not None:
            groups.setdefault(row["base"], []).append(bar(row, value))
    # A chart has one message: the first cases that share a baseline. Others may have another unit. The tables show all.
    bars = next((group for group in groups.values() if len(group) > 1), next(iter(groups.values()), []))
    if bars:
        colors = {KINDS[kind]: color for kind, color in COLORS.items()}
        draw_bars(bars, path, title=f"{suite['suite']}: {suite['about']}\n{where}", label=label, colors=colors)
    return bool(bars)


def write_report(results: Row, folder: Path) -> list[Path]:
    """Write ``results.json``, ``results.md`` and a picture for each suite, and return their paths.

    Args:
        results: The results of ``measure``.
        folder: Folder for the files; created if missing.
    """
    where = results["machine"].get("gpu") or results["machine"]["processor"]
    paths = [write_json(results, folder / "results.json"), folder / "results.md"]
    pictures = {suite["suite"]: folder / f"{suite['suite']}.png" for suite in results["suites"]}
    drawn = [suite["suite"] for suite in results["suites"] if draw_suite(suite, pictures[suite["suite"]], where)]
    with whole_file(paths[1]) as part:
        part.write_text(markdown(results, drawn), encoding="utf-8")
    return paths + [pictures[name] for name in drawn]


def load_results(path: Path) -> dict[str, Any]:
    """Read ``results.json``.

    Args:
        path: The file, or the folder that contains it.

    Raises:
        BenchError: If the file cannot be read, is not the result of ``python -m benchmarks``, or has another format.
    """
    file = path / "results.json" if path.is_dir() else path
    try:
        results = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"expected a results.json or its folder, got {str(path)!r} ({error})") from None
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise BenchError(f"expected results that `python -m benchmarks` wrote, of format {FORMAT}, got {str(path)!r}")
    return results
