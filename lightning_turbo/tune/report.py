"""Writes ``tune.json`` and ``turbo.yaml``, and says in words what was found and which lines to change."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from lightning_turbo._files import whole_file
from lightning_turbo.doctor.timeline import PHASES
from lightning_turbo.measure import count_cores, describe_machine, markdown_table, three_digits, write_json
from lightning_turbo.tune.candidates import Look, Result, Settings, combine, result_of
from lightning_turbo.tune.promise import ACCEPTED, minutes_for
from lightning_turbo.tune.search import Search

__all__ = ["as_text", "changed_lines", "make_results", "write_results", "yaml_text"]

BUSY = 0.1  # cores used by other programs that are worth reporting
SHOWN = 0.02  # share of a step from which on a phase is named


def make_results(search: Search, command: Sequence[str], other_cores: float | None = None) -> dict[str, Any]:
    """Return the results as plain values.

    Args:
        search: A completed search.
        command: The command that starts the script.
        other_cores: Number of cores used by other programs meanwhile, or ``None`` if unknown.
    """
    look, promise, settings = search.look, search.promise, _settings(search)
    trials = search.trials
    stretch = promise.stretch
    return {
        "format": 2,
        "command": list(command),
        "interrupted": search.interrupted,
        "verdict": _verdict(search),
        "why": " ".join(filter(None, [_describe_step(look), _describe_load(other_cores)])),
        "untried": search.untried,
        "other_cores": other_cores,
        "machine": describe_machine("cpu" if look is None else look.device),
        "step": None if look is None else {"seconds": look.step, "phases": dict(look.phases)},
        "epoch": None
        if look is None or look.period is None
        else {"seconds": look.seconds, "batches": look.period, "with_validation": look.is_seen},
        "candidates": [
            {"name": name, "why": trial.why, "result": result_of(trial.candidate, look)}
            for name, trial in trials.items()
        ],
        "promise": {
            "settings": list(promise.names),
            "of": None if stretch is None else ("epochs" if stretch.is_whole else "steps"),
            "steps": None if stretch is None else stretch.steps,
            "factor": promise.factor if promise.logs else None,
            "interval": promise.interval,
            "pairs_seconds": promise.seconds,
        },
        "chosen": {"settings": list(search.chosen), "result": _result(search)},
        "changes": changed_lines(settings, command) if search.chosen else [],
    }


def _settings(search: Search) -> Settings:
    return combine(search.trials[name].candidate for name in search.chosen)


def _result(search: Search) -> str:
    """Return the largest effect on the results that one of the chosen settings may have."""
    results = [result_of(search.trials[name].candidate, search.look) for name in search.chosen]
    return max(results, key=get_args(Result).index, default="same bits")


def _verdict(search: Search) -> str:
    promise = search.promise
    if search.chosen:
        return f"{promise} with {' + '.join(search.chosen)}, {_result(search)}"
    if promise.error:
        return f"nothing is recommended: {' + '.join(promise.names)} {promise.error}"
    if len(promise.logs) >= ACCEPTED:
        return f"nothing is recommended: {promise} with {' + '.join(promise.names)}"
    if search.interrupted or search.untried:
        return f"nothing is recommended: {search.why_ended} before {_before(search)}"
    return "nothing helps here"


def _before(search: Search) -> str:
    """Return what there was no time for, and how there would be."""
    if search.look is None:
        return "any setting was tried"
    ahead = search.ahead
    needed = math.ceil(minutes_for(search.look, ahead, search.runner.start))
    least = f" (a promise of {ahead.what} needs --minutes {needed} or more)" if 60 * needed > search.total else ""
    return f"anything could be promised. Take longer{least}, or try some settings alone (--only)"


def _describe_step(look: Look | None) -> str:
    """Return in words how long a step takes, and with what."""
    if look is None:
        return ""
    shares = sorted(((look.share([phase]), phase) for phase in look.phases), reverse=True)
    parts = [f"{PHASES[phase]} {share:.0%}" for share, phase in shares if share > SHOWN]
    return f"A step takes {three_digits(1e3 * look.step)} ms: {', '.join(parts)}."


def _describe_load(cores: float | None) -> str:
    """Return how many cores other programs used, or an empty string."""
    if cores is None or cores < BUSY:
        return ""
    return (
        f"Other programs took {cores:.1f} of {count_cores()} cores meanwhile: intervals are wider than on a quiet "
        "machine."
    )


def changed_lines(settings: Settings, command: Sequence[str]) -> list[str]:
    """Return the lines of a script with the settings; ``...`` stands for what is there already."""
    callbacks = [_call(name, arguments) for name, arguments in settings.callbacks.items()]
    trainer = [f"strategy={_call('TurboStrategy', settings.strategy)}"] if settings.strategy else []
    trainer += [f"precision={settings.precision!r}"] if settings.precision else []
    trainer += [f"plugins=[ApexAMP({settings.opt_level!r})]"] if settings.opt_level else []
    trainer += [f"callbacks=[..., {', '.join(callbacks)}]"] if callbacks else []
    used = {"TurboStrategy": settings.strategy, "ApexAMP": settings.opt_level}
    names = sorted([*settings.callbacks, *(name for name, given in used.items() if given)])
    lines = [f"from lightning_turbo import {', '.join(names)}"] if names else []
    lines += [f"Trainer(..., {', '.join(trainer)})"] if trainer else []
    lines += [_call("DataLoader", settings.loader, "..., ")] if settings.loader else []
    start = _start_line(settings, command)
    return [*lines, *([start] if start else [])]


def _call(name: str, arguments: Mapping[str, Any], before: str = "") -> str:
    return f"{name}({before}{', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _start_line(settings: Settings, command: Sequence[str]) -> str:
    variables = " ".join(f"{name}={value}" for name, value in settings.environment.items())
    return f"{variables} {shlex.join(command)}" if variables else ""


def yaml_text(settings: Settings, headline: str, command: Sequence[str]) -> str:
    """Return ``turbo.yaml``: an additional ``--config`` for LightningCLI."""
    import yaml  # Lightning brings it

    trainer: dict[str, Any] = {}
    if settings.strategy:
        trainer["strategy"] = {"class_path": "lightning_turbo.TurboStrategy", "init_args": dict(settings.strategy)}
    if settings.precision:
        trainer["precision"] = settings.precision
    if settings.opt_level:
        # A Trainer refuses a precision beside a plugin that sets it.
        trainer["precision"] = None
        trainer["plugins"] = [{"class_path": "lightning_turbo.ApexAMP", "init_args": {"opt_level": settings.opt_level}}]
    if settings.callbacks:
        trainer["callbacks+"] = [
            {"class_path": f"lightning_turbo.{name}", "init_args": dict(arguments)}
            for name, arguments in settings.callbacks.items()
        ]
    lines = [f"{headline}.", "A further config: --config turbo.yaml, after yours."]
    if settings.loader:
        lines.append(f"Where loaders are made: {_call('DataLoader', settings.loader, '..., ')}")
    if start := _start_line(settings, command):
        lines.append(f"Start it with: {start}")
    # User text, such as a command, may contain newlines.
    comments = [f"# {line}\n" for text in lines for line in text.splitlines()]
    return "".join(comments) + yaml.safe_dump({"trainer": trainer}, sort_keys=False)


def write_results(search: Search, results: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the files, and return their paths."""
    path = out / "turbo.yaml"
    with whole_file(path) as part:
        text = yaml_text(_settings(search), results["verdict"], results["command"])
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
    return [write_json(results, out / "tune.json"), path]


def as_text(results: Mapping[str, Any]) -> str:
    """Return verdict, reasons, the changed lines and the outcome of each setting, for a terminal."""
    rows = [[each["name"], each["why"], each["result"]] for each in results["candidates"]]
    words = [f"`{shlex.join(results['command'])}`: {results['verdict']}.", results["why"]]
    if results["changes"]:
        lines = "\n".join(f"    {line}" for line in results["changes"])
        words.append(f"Change these lines, or with LightningCLI add --config turbo.yaml after your own:\n\n{lines}")
    if results["untried"]:
        number = f"{len(results['untried'])} of {len(rows)} settings"
        words.append(f"{number} were not tried: take longer (--minutes), or try fewer (--only).")
    elif not results["changes"]:
        words.append("Leave the script as it is, or ask lightning-turbo doctor which lines take the time.")
    words.append("\n".join(markdown_table(["setting", "how it ended", "result"], rows)))
    return "\n\n".join(filter(None, words)) + "\n"
