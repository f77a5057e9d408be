"""Writes ``tune.json``, ``tune.md``, ``turbo.yaml``, ``turbo.py`` and, with matplotlib, ``tune.png``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_turbo._files import whole_file
from lightning_turbo.measure import (
    Bar,
    count_cores,
    describe_machine,
    draw_bars,
    markdown_table,
    three_digits,
    why_no_picture,
    write_json,
)
from lightning_turbo.tune.candidates import SMALL_SHARE, Baseline, Settings, combine
from lightning_turbo.tune.evidence import DEFAULT, Comparison
from lightning_turbo.tune.search import Search, Trial

__all__ = ["as_text", "describe_headroom", "make_results", "script_text", "write_results", "yaml_text"]

COLORS = {"default": "#334155", "setting": "#94a3b8", "chosen": "#0f766e"}
COVERS = (
    "Factors are of an epoch: steps, its border (end, start of loading, first batch) and validation, projected from "
    "some batches of it. Checkpoints, set-up and what is outside of fit are not in them."
)
STEPS = (
    "Factors are of training steps alone: Lightning does not know how many batches an epoch has, and none ended while "
    "it was measured. What loading does at the beginning of an epoch is not in them; --confirm measures whole epochs."
)
BUSY = 0.1  # cores used by other programs that are worth reporting


def describe_headroom(baseline: Baseline) -> str:
    """Return in words how long a step takes, and how much of it loading ahead can save."""
    text = (
        f"Your step takes {three_digits(baseline.step_ms)} ms, with one batch again and again "
        f"{three_digits(baseline.one_batch_ms)} ms, and the loader alone {three_digits(baseline.loader_ms)} ms a batch"
    )
    if baseline.loading < SMALL_SHARE:
        return f"{text}: loading ahead cannot help."
    if baseline.loads_ahead:
        return f"{text}; batches are loaded beside the step already."
    if baseline.loading > 0.95:
        return f"{text}: loading takes nearly all of the time."
    # On a busy machine, the two estimates of the loading time differ; use the larger bound.
    left = min(baseline.step_ms - baseline.loader_ms, baseline.one_batch_ms)
    return f"{text}: loading ahead can make it {baseline.step_ms / left:.2f} times as fast at most."


def _describe_epoch(search: Search) -> str:
    """Return in words how long an epoch and the fit take, without and with the chosen settings."""
    baseline = search.baseline
    if baseline is None or baseline.epoch_ms is None:
        return STEPS if baseline is not None else ""
    epoch = baseline.epoch_ms / 1e3
    ratio = search.final.ratio if search.chosen.names else 1.0
    parts = f"{baseline.batches} steps, border {three_digits(baseline.border_ms / 1e3)} s"
    if baseline.validations:
        parts += f", validation {three_digits(baseline.validation_ms / 1e3)} s"
    text = f"An epoch takes about {three_digits(epoch)} s ({parts})"
    text += f" and {three_digits(epoch * ratio)} s with it" if search.chosen.names else ""
    if baseline.epochs:
        minutes = baseline.epochs * epoch / 60
        text += f"; the {baseline.epochs:g} epochs of the fit {three_digits(minutes)} minutes"
        text += f" and {three_digits(minutes * ratio)}" if search.chosen.names else ""
    return f"{text}. {COVERS}"


def _describe_load(cores: float | None) -> str:
    """Return how many cores other programs used, or an empty string."""
    if cores is None or cores < BUSY:
        return ""
    return (
        f"Other programs took {cores:.1f} of {count_cores()} cores meanwhile: factors may be off, and intervals are "
        "wider than on a quiet machine."
    )


def _describe_untried(search: Search) -> str:
    """Return how many settings were not tried, and how long trying them would take."""
    if not search.untried:
        return ""
    names = [name for name, trial in search.trials.items() if trial.is_untried]
    listed = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    minutes = math.ceil(search.more_minutes)
    more = "1 minute" if minutes == 1 else f"{minutes} minutes"
    about = "up to" if search.baseline is None else "about"  # the headroom excludes some without a process
    return f"{len(names)} of {len(search.trials)} settings were not tried ({listed}): {about} {more} more."


def _numbers(comparison: Comparison) -> dict[str, Any]:
    ratio = comparison.ratio
    return {
        "ratio": ratio if math.isfinite(ratio) else None,
        "interval": list(comparison.interval) if comparison.interval else None,
        "step_ratio": comparison.step_ratio if comparison.of_steps else None,
    }


def make_results(search: Search, command: Sequence[str], other_cores: float | None = None) -> dict[str, Any]:
    """Return the results as plain values: verdict, reasons and next steps in words, then the numbers.

    Args:
        search: A completed search.
        command: The command that starts the script.
        other_cores: Number of cores used by other programs meanwhile, or ``None`` if unknown.
    """
    chosen = search.chosen
    baseline = search.baseline
    headroom = {} if baseline is None else {
        "one_batch_ms": baseline.one_batch_ms,
        "loader_ms": baseline.loader_ms,
        "waiting_ms": baseline.waiting_ms,
        "sentence": describe_headroom(baseline),
    }  # fmt: skip
    return {
        "format": 1,
        "command": list(command),
        "interrupted": search.interrupted,
        "verdict": _verdict(search),
        "why": " ".join(filter(None, [headroom.get("sentence"), _describe_epoch(search), _describe_load(other_cores)])),
        "untried": _describe_untried(search),
        "other_cores": other_cores,
        "epoch": None
        if baseline is None
        else {
            "seconds": None if baseline.epoch_ms is None else baseline.epoch_ms / 1e3,
            "batches": baseline.batches,
            "border_seconds": baseline.border_ms / 1e3,
            "validation_seconds": baseline.validation_ms / 1e3,
            "epochs": baseline.epochs,
        },
        "next": _next(search, command),
        "machine": describe_machine("cpu" if baseline is None else baseline.device),
        "default": {
            "step_ms": None if baseline is None else baseline.step_ms,
            "processes_ms": search.times.get(DEFAULT, []),
        },
        "headroom": headroom or None,
        "candidates": [_row(search, trial) for trial in search.trials.values()],
        "chosen": {
            "settings": list(chosen.names),
            "processes_ms": search.times.get(chosen, []),
            **_numbers(search.final if chosen.names else Comparison()),
            "result": search.result(chosen, search.final) or "same bits",
        },
    }


def _row(search: Search, trial: Trial) -> dict[str, Any]:
    return {
        "name": trial.candidate.name,
        **_numbers(trial.alone),
        "kept": trial.kept,
        "why": trial.why,
        "result": search.result(trial.configuration, trial.alone),
        "beside": _numbers(trial.beside),
    }


def _verdict(search: Search) -> str:
    """Return the verdict: first the factor, then the effect on the result."""
    if search.verdict or not search.chosen.names:
        return search.verdict
    curves = ": losses in the picture" if _curves(search) else ""
    return f"{search.final} with {search.chosen}, {search.result(search.chosen, search.final)}{curves}"


def _next(search: Search, command: Sequence[str]) -> str:
    if search.chosen.names:
        start = _start_line(_settings(search), command)
        return (
            "Give the Trainer's arguments to turbo() of turbo.py, as Trainer(**turbo(max_epochs=3, callbacks=[...])); "
            f"with LightningCLI add --config turbo.yaml after your own. Measure whole epochs with --confirm. {start}"
        ).strip() + _by_hand(search)
    if search.interrupted and search.baseline is None:
        return (
            "Give it more time with --minutes: measuring the unchanged script takes longer than it had. "
            "lightning-turbo doctor needs only a few steps, and names the lines that cost time."
        )
    if search.interrupted or any(
        trial.why.startswith("not tried because the time") for trial in search.trials.values()
    ):
        return "Give it more time with --minutes, or fewer settings with --only."
    return "Leave the script as it is, or ask lightning-turbo doctor which lines take the time."


def _by_hand(search: Search) -> str:
    """Return what no argument of a Trainer can do, or an empty string."""
    if search.baseline is None:
        return ""
    settings = _settings(search)
    loader = ", ".join(f"{name}={value!r}" for name, value in settings.loader.items())
    texts = [f" Give the training DataLoader {loader}." if loader else ""]
    texts += [f" For augment-batches {search.baseline.random_part}." if settings.augment_batches else ""]
    return "".join(texts)


def _curves(search: Search) -> dict[str, list[float]]:
    """Return the losses to draw: if the maths changed and the script returns comparable losses."""
    chosen, default = search.final.losses
    changed = search.chosen.names and search.result(search.chosen, search.final) == "other maths"
    return {"default": default, "chosen": chosen} if changed and chosen and default and not why_no_picture() else {}


def _settings(search: Search) -> Settings:
    return combine(search.trials[name].candidate for name in search.chosen.names)


def _start_line(settings: Settings, command: Sequence[str]) -> str:
    variables = " ".join(f"{name}={value}" for name, value in settings.environment.items())
    return f"Start it with: {variables} {shlex.join(command)}" if variables else ""


def _strategy(settings: Settings) -> str:
    return "TurboStrategy" if settings.ranks == 1 else "TurboDDPStrategy"


def yaml_text(settings: Settings, headline: str, command: Sequence[str]) -> str:
    """Return ``turbo.yaml``: an additional ``--config`` for LightningCLI."""
    import yaml  # Lightning brings it

    trainer: dict[str, Any] = {"devices": settings.ranks, "strategy": "ddp"} if settings.ranks > 1 else {}
    if settings.strategy:
        where = f"lightning_turbo.{_strategy(settings)}"
        trainer["strategy"] = {"class_path": where, "init_args": dict(settings.strategy)}
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
    lines = (f"{headline}.", "A further config: --config turbo.yaml, after yours.", _start_line(settings, command))
    return _as_comment(*lines) + yaml.safe_dump({"trainer": trainer}, sort_keys=False)


def _as_comment(*texts: str) -> str:
    """Return texts as comments for Python or YAML; user text, such as a command, may contain newlines and quotes."""
    return "".join(f"# {line}\n" for text in texts for line in text.splitlines())


def script_text(settings: Settings, headline: str, command: Sequence[str]) -> str:
    """Return ``turbo.py``: a function that adds the settings to the arguments of a script's Trainer."""
    callbacks = [_call(name, arguments) for name, arguments in settings.callbacks.items()]
    lines = [f"devices={settings.ranks}", "strategy='ddp'"] if settings.ranks > 1 else []
    lines += [f"callbacks=[{', '.join(['*as_list(callbacks)', *callbacks])}]"]
    if settings.strategy:
        lines.append(f"strategy={_call(_strategy(settings), settings.strategy)}")
    if settings.precision:
        lines.append(f"precision={settings.precision!r}")
    if settings.opt_level:
        lines.append("precision=None")
        lines.append(f"plugins=[*as_list(arguments.get('plugins')), ApexAMP({settings.opt_level!r})]")
    parts = {_strategy(settings): settings.strategy, "ApexAMP": settings.opt_level}
    names = [*settings.callbacks, *(name for name, used in parts.items() if used)]
    imports = f"from lightning_turbo import {', '.join(sorted(names))}\n" if names else ""
    use = "In the script: Trainer(**turbo(max_epochs=3, callbacks=[...])), with all arguments of the Trainer."
    return SCRIPT.format(
        head=_as_comment(f"{headline}.", use, _start_line(settings, command)),
        imports=imports,
        body="".join(f"    arguments.update({line})\n" for line in lines),
    )


SCRIPT = '''{head}
{imports}

def turbo(callbacks=None, **arguments):
    """Return the arguments of a Trainer with those that make it faster in their place."""
{body}    return arguments


def as_list(given):
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
'''


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _bars(search: Search, step_ms: float) -> list[Bar]:
    """Return bars for the default, each chosen setting alone, and all of them together."""
    alone = [(name, "setting", search.trials[name].alone) for name in search.chosen.names]
    parts = [("default", "default", Comparison([0.0])), *alone, ("chosen", "chosen", search.final)]
    bars = []
    for name, kind, part in parts if alone else parts[:1]:
        low, high = part.interval or (part.ratio, part.ratio)
        value = step_ms * part.ratio
        text = three_digits(step_ms * part.ratio)
        text += "" if kind == "default" else f", {part}"
        bars.append(Bar(name=name, kind=kind, value=value, text=text, low=step_ms * low, high=step_ms * high))
    return bars


def write_results(search: Search, results: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the files; the picture only if matplotlib is installed."""
    settings, command = _settings(search), results["command"]
    headline = ". ".join(filter(None, (results["verdict"], _by_hand(search).strip(" ."))))
    texts = {
        "tune.md": as_text(results),
        "turbo.yaml": yaml_text(settings, headline, command),
        "turbo.py": script_text(settings, headline, command),
    }
    paths = [write_json(results, out / "tune.json")]
    for name, text in texts.items():
        with whole_file(out / name) as part:
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
        paths.append(out / name)
    (out / "tune.png").unlink(missing_ok=True)  # from an earlier search
    if search.baseline is not None and not why_no_picture():
        draw_bars(
            _bars(search, search.baseline.step_ms),
            out / "tune.png",
            title=f"{shlex.join(command)}\n{results['verdict']}",
            label="ms a step",
            colors=COLORS,
            curves=_curves(search),
        )
        paths.append(out / "tune.png")
    return paths


def as_text(results: Mapping[str, Any]) -> str:
    """Return verdict, reasons, next steps and the outcome of each setting, for a terminal and as Markdown."""
    rows = [[each["name"], each["why"], each["result"] if each["ratio"] else ""] for each in results["candidates"]]
    columns = ["setting", "how it ended", "result"]
    verdict = f"`{shlex.join(results['command'])}`: {results['verdict']}."
    more = [results.get("epochs", {}).get("sentence"), results["untried"]]
    words = [verdict, f"Why: {results['why']}", *filter(None, more)]
    words += [f"Next: {results['next']}", "\n".join(markdown_table(columns, rows))]
    return "\n\n".join(words) + "\n"
