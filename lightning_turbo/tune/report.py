"""What comes out: ``tune.json``, ``turbo.yaml``, ``turbo.py``, a table, and with matplotlib ``tune.png``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from lightning_turbo._files import whole_file
from lightning_turbo.measure import (
    Bar,
    describe_machine,
    draw_bars,
    print_lines,
    print_table,
    three_digits,
    why_no_picture,
    write_json,
)
from lightning_turbo.tune.candidates import SMALL_SHARE, Facts, Settings, combine
from lightning_turbo.tune.evidence import Comparison
from lightning_turbo.tune.search import Search, Trial

__all__ = ["describe_headroom", "make_results", "print_results", "script_text", "write_results", "yaml_text"]

COLOURS = {"default": "#334155", "setting": "#94a3b8", "chosen": "#0f766e"}


def describe_headroom(facts: Facts) -> str:
    """Return in words what a step waits for."""
    waiting = facts.waiting * facts.step_ms
    text = f"Your step takes {three_digits(facts.step_ms)} ms, {three_digits(waiting)} of them waiting for data"
    if facts.waiting < SMALL_SHARE:
        return f"{text}: prefetching cannot help."
    times = 1 / (1 - facts.waiting)
    alone = f" The loader alone takes {three_digits(facts.loader_ms)} ms a batch." if facts.loader_ms else ""
    return f"{text}; without waiting it would be {times:.{1 if times >= 1.1 else 2}f} times as fast.{alone}"


def _numbers(comparison: Comparison) -> dict[str, Any]:
    ratio = comparison.ratio
    return {
        "ratio": ratio if math.isfinite(ratio) else None,
        "interval": list(comparison.interval) if comparison.interval else None,
    }


def make_results(search: Search, command: Sequence[str]) -> dict[str, Any]:
    """Return what was found as plain values."""
    chosen = search.chosen
    return {
        "format": 1,
        "command": list(command),
        "interrupted": search.interrupted,
        "verdict": search.verdict,
        **_headroom(search.facts),
        "candidates": [_row(search, trial) for trial in search.trials.values()],
        "chosen": {
            "settings": list(chosen.names),
            **_numbers(search.final if chosen.names else Comparison()),
            "result": search.result(chosen, search.final) or "same bits",
        },
    }


def _headroom(facts: Facts | None) -> dict[str, Any]:
    if facts is None:
        return {"machine": describe_machine("cpu"), "default": {"step_ms": None}, "headroom": None}
    headroom = {
        "one_batch_ms": facts.one_batch_ms,
        "loader_ms": facts.loader_ms,
        "waiting_ms": facts.waiting * facts.step_ms,
        "sentence": describe_headroom(facts),
    }
    return {"machine": describe_machine(facts.device), "default": {"step_ms": facts.step_ms}, "headroom": headroom}


def _row(search: Search, trial: Trial) -> dict[str, Any]:
    result = search.result(trial.case, trial.alone)
    return {
        "name": trial.candidate.name,
        **_numbers(trial.alone),
        "kept": trial.kept,
        "why": trial.why,
        "result": result,
        "beside": _numbers(trial.beside),
    }


def _headline(results: Mapping[str, Any]) -> str:
    chosen = results["chosen"]
    if not chosen["settings"]:
        return results["verdict"]
    low, high = chosen["interval"]
    spread = f"{1 / high:.2f} to {1 / low:.2f}"
    return f"{1 / chosen['ratio']:.2f} times as fast as the default ({spread}), result: {chosen['result']}"


def _settings(search: Search) -> Settings:
    return combine(search.trials[name].candidate for name in search.chosen.names)


def _start_line(settings: Settings, command: Sequence[str]) -> str:
    variables = " ".join(f"{name}={value}" for name, value in settings.environment.items())
    return f"# Start it with: {variables} {shlex.join(command)}\n" if variables else ""


def yaml_text(settings: Settings, headline: str, command: Sequence[str]) -> str:
    """Return ``turbo.yaml``: a further ``--config`` for LightningCLI."""
    import yaml  # Lightning brings it

    trainer: dict[str, Any] = {}
    if settings.strategy:
        trainer["strategy"] = {"class_path": "lightning_turbo.TurboStrategy", "init_args": dict(settings.strategy)}
    if settings.precision:
        trainer["precision"] = settings.precision
    if settings.opt_level:
        trainer["plugins"] = [{"class_path": "lightning_turbo.ApexAMP", "init_args": {"opt_level": settings.opt_level}}]
    if settings.callbacks:
        trainer["callbacks+"] = [
            {"class_path": f"lightning_turbo.{name}", "init_args": dict(arguments)}
            for name, arguments in settings.callbacks.items()
        ]
    head = f"# {headline}\n# Use it as a further config: --config turbo.yaml, after yours.\n"
    return f"{head}{_start_line(settings, command)}{yaml.safe_dump({'trainer': trainer}, sort_keys=False)}"


def script_text(settings: Settings, headline: str, command: Sequence[str]) -> str:
    """Return ``turbo.py``: the arguments of the Trainer in a script."""
    callbacks = ["*callbacks", *(_call(name, arguments) for name, arguments in settings.callbacks.items())]
    lines = {"callbacks": f"[{', '.join(callbacks)}]"}
    if settings.strategy:
        lines["strategy"] = _call("TurboStrategy", settings.strategy)
    if settings.precision:
        lines["precision"] = repr(settings.precision)
    if settings.opt_level:
        lines["plugins"] = f"[ApexAMP({settings.opt_level!r})]"
    body = "".join(f'        "{name}": {value},\n' for name, value in lines.items())
    head = f'"""{headline}.\n\nIn the script: ``Trainer(..., **turbo(callbacks=[...]))``.\n"""\n'
    function = f'def turbo(callbacks=()):\n    """Return arguments for a Trainer."""\n    return {{\n{body}    }}\n'
    return f"{head}{_start_line(settings, command)}\n{_import_line(settings)}\n\n{function}"


def _import_line(settings: Settings) -> str:
    names = [*settings.callbacks, *["TurboStrategy"] * bool(settings.strategy), *["ApexAMP"] * bool(settings.opt_level)]
    return f"from lightning_turbo import {', '.join(sorted(names))}\n" if names else ""


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _bars(search: Search, step_ms: float) -> list[Bar]:
    """From the default to the chosen settings, each with its share of the whole."""
    trials = [search.trials[name] for name in search.chosen.names]
    parts = [trial.beside if trial.beside.logs else search.final for trial in trials]
    # The settings help one another or stand in one another's way: the whole is divided in proportion.
    weights = [max(1e-6, -math.log(part.ratio)) for part in parts]
    bars = [_bar("default", "default", Comparison([0.0]), 0.0, step_ms)]
    at = step_ms
    for trial, part, weight in zip(trials, parts, weights, strict=True):
        after = at * search.final.ratio ** (weight / sum(weights))
        bars.append(_bar(trial.candidate.name, "setting", part, at, after))
        at = after
    return [*bars, _bar("chosen", "chosen", search.final, 0.0, at)] if trials else bars


def _bar(name: str, kind: str, part: Comparison, start: float, value: float) -> Bar:
    """A bar that ends at ``value``, with the interval of its ratio around that end."""
    low, high = part.interval or (part.ratio, part.ratio)
    factor = f"{1 / part.ratio:.2f} times ({1 / high:.2f}-{1 / low:.2f})"
    text = factor if kind == "setting" else three_digits(value)
    ends = {"low": value * low / part.ratio, "high": value * high / part.ratio}
    return Bar(name=name, kind=kind, start=start, value=value, text=text, **ends)


def write_results(search: Search, results: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the files; the picture only where matplotlib is installed."""
    settings, headline = _settings(search), _headline(results)
    paths = [write_json(results, out / "tune.json")]
    for name, text in (("turbo.yaml", yaml_text), ("turbo.py", script_text)):
        with whole_file(out / name) as part:
            part.write_text(text(settings, headline, results["command"]))
        paths.append(out / name)
    (out / "tune.png").unlink(missing_ok=True)  # of an earlier search
    if search.facts is not None and not why_no_picture():
        changed = results["chosen"]["result"] == "other maths"
        above, below = search.final.losses
        curves: dict[str, list[float]] = {"default": below, "chosen": above} if changed else {}
        draw_bars(
            _bars(search, search.facts.step_ms),
            out / "tune.png",
            title=f"{shlex.join(results['command'])}\n{headline}",
            label="ms a step",
            colours=COLOURS,
            curves=curves,
        )
        paths.append(out / "tune.png")
    return paths


def print_results(results: Mapping[str, Any], paths: Sequence[Path], stream: TextIO | None = None) -> None:
    """Show the candidates in a table, and what is recommended."""
    rows = [_cells(each) for each in results["candidates"]]
    print_table("alone", ["setting", "times as fast", "95 % interval", "result", "note"], rows, stream)
    lines = [results["headroom"]["sentence"]] if results["headroom"] else []
    if results["chosen"]["settings"]:
        lines.append(f"Chosen: {' + '.join(results['chosen']['settings'])}")
    lines += [f"{_headline(results)}.", *map(str, paths)]
    print_lines(*lines, *filter(None, [why_no_picture()]), stream=stream)


def _cells(row: Mapping[str, Any]) -> list[str]:
    factor = f"{1 / row['ratio']:.2f}" if row["ratio"] else ""
    spread = "-".join(f"{1 / end:.2f}" for end in reversed(row["interval"] or ()))
    return [row["name"], factor, spread, row["result"] if factor else "", row["why"]]
