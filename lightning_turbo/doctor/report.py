"""The report, as text for a terminal or a file, and as JSON."""

from __future__ import annotations

import dataclasses
import os
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_turbo.doctor.facts import BOUNDS, NOTICEABLE, Facts, FitFacts, LineTime, Site
from lightning_turbo.doctor.rules.rule import LEVELS, Finding, Place
from lightning_turbo.doctor.timeline import PARTS, PHASES
from lightning_turbo.measure import write_json

__all__ = ["Report", "as_json", "as_text", "place", "verdict"]

LITTLE = 0.03
"""Waiting for data is negligible up to this share of the step; a choice, not a measurement."""
SHOWN = 3
"""Number of names of layers or parameters shown per line."""
ROW = 0.005
"""Parts below this share of what was seen are omitted from the table."""
_TITLES = {"compute": "Compute-bound", "copy": "Bound by copies to the device", "loop": "Bound by the loop"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of the doctor.

    Attributes:
        facts: The measurements.
        findings: The findings, most severe first.
        short: What is missing if the run was too short, otherwise empty.
    """

    facts: Facts
    findings: tuple[Finding, ...]
    short: str = ""

    def above(self, level: str) -> list[Finding]:
        """Return the findings that are more severe than ``level``."""
        return [each for each in self.findings if LEVELS.index(each.level) < LEVELS.index(level)]

    def save(self, json: str | os.PathLike[str] | None = None) -> None:
        """Write the report to a file; ``None`` writes none."""
        if json is not None:
            write_json(as_json(self), Path(json))


def verdict(facts: Facts) -> str:
    """Return in one sentence what bounds the step; ``rules.bounds`` and ``waits-for-data`` say what helps."""
    bound = facts.bound
    if not bound:
        return "No step was timed."
    waits = f"waits {facts.waiting:.0%} of its {facts.step * 1e3:.2f} ms for data"
    if bound == "data":
        most = f": loading ahead makes it up to {1 / max(1.0 - facts.waiting, 0.01):.1f} times as fast."
        return f"Your step {waits}" + (most if facts.phases["data"] > NOTICEABLE else ".")
    if bound in ("lines", "waits"):
        title = "Idle" if bound == "waits" else "Bound by your own lines"
        does = "wait without computing" if bound == "waits" else "are not the network's computation"
        return (
            f"{title}: your step takes {facts.step * 1e3:.2f} ms, of which {facts.own * 1e3:.2f} ms {does}; no setting "
            "of the computation helps."
        )
    parts = ", ".join(PHASES[phase] for phase in BOUNDS[bound])
    helps = "not" if facts.waiting < LITTLE else "hardly"
    share = f"{facts.seconds_in(BOUNDS[bound]) / facts.step:.0%} of it is {parts}"
    return f"{_TITLES[bound]}: your step {waits}, so prefetching will {helps} help; {share}."


def place(site: Site) -> str:
    """Return a site as ``file:line``, relative to the working directory if inside it."""
    return f"{site.file.removeprefix(os.getcwd() + os.sep)}:{site.line}"


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain values."""
    facts = report.facts
    return {
        "verdict": verdict(facts),
        "summary": _summarize(report),
        "short": report.short,
        "notes": list(facts.notes),
        "device": facts.run.device,
        "precision": facts.run.precision,
        "timed": facts.timed,
        "watched": facts.seen.watched,
        "step_seconds": facts.step,
        "waiting": facts.waiting,
        "fit": _fit_as_json(facts.fit),
        "phases": [{"phase": key, "name": PHASES[key], "seconds": value} for key, value in facts.phases.items()],
        "steps": list(facts.steps),
        "lines": [_line_as_json(each) for each in facts.lines],
        "findings": [_finding_as_json(each) for each in report.findings],
    }


def as_text(report: Report, width: int | None = None) -> str:
    """Return the report as text for the terminal.

    Args:
        report: The report.
        width: Number of columns; ``None`` uses that of the terminal.
    """
    width = max(60, min(width or shutil.get_terminal_size().columns, 120))
    lines = [f"lightning-turbo doctor: {verdict(report.facts)}", f"{_summarize(report)}.", report.short]
    lines += [f"Note: {note}." for note in report.facts.notes]
    lines += [f"Next: {each.remedy}" for each in report.above("info")[:1]]
    nothing = ["", "Nothing to change was found."] if report.facts.seen.watched else []
    findings = chain.from_iterable(_finding_rows(each, width) for each in report.findings)
    rows = (_phase_rows(report.facts, width), _fit_rows(report.facts.fit, width))
    parts = (*(textwrap.wrap(line, width) for line in lines), *rows, findings)
    return "\n".join([*chain.from_iterable(parts), *([] if report.findings else nothing)])


def _summarize(report: Report) -> str:
    counts = [(sum(each.level == level for each in report.findings), level) for level in LEVELS]
    parts = ", ".join(
        f"{count} {level}" if count == 1 or level == "info" else f"{count} {level}s" for count, level in counts
    )
    facts = report.facts
    return f"{parts}; {facts.timed} steps timed and {facts.seen.watched} watched on {facts.run.device}"


def _places(finding: Finding) -> list[str]:
    """Return the places in words; if there is only one, its names are already in the finding's sentence."""
    return [_place(each, with_names=finding.count > 1 or each.site is None) for each in finding.places]


def _place(each: Place, with_names: bool) -> str:
    more = [f"and {len(each.names) - SHOWN} more"] if len(each.names) > SHOWN else []
    names = " ".join([", ".join(each.names[:SHOWN]), *more]) if with_names else ""
    if each.site is None:
        return names
    return f"{place(each.site)} ({names})" if names else place(each.site)


def _finding_as_json(each: Finding) -> dict[str, Any]:
    return {
        **{
            name: getattr(each, name)
            for name in ("rule", "level", "what", "cost", "seconds", "epoch_seconds", "remedy", "card", "count")
        },
        "place": place(each.site) if each.site else "",
        "site": dataclasses.asdict(each.site) if each.site else None,
        "places": _places(each),
    }


def _line_as_json(each: LineTime) -> dict[str, Any]:
    own = {name: value for name, value in dataclasses.asdict(each).items() if name != "sites"}
    return {**own, "places": [place(site) for site in each.sites]}


def _finding_rows(each: Finding, width: int) -> Iterator[str]:
    where = "; ".join(_places(each))
    if each.count > 1:
        where = f"{each.count} places: {where}"
    card = f"see {each.card!r} in the cards of the documentation"
    yield from ("", f"{each.level.upper():8}{each.rule}")
    for label, text in (("", where), ("", each.what), ("cost", each.cost), ("remedy", each.remedy), ("card", card)):
        head = f"        {label:8}" if label else " " * 8
        yield from textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head))


def _phase_rows(facts: Facts, width: int) -> Iterator[str]:
    if facts.timed:
        yield from ("", f"The mean step takes {facts.step * 1e3:.3f} ms:")
    for phase, seconds in facts.phases.items():
        share = seconds / (facts.step or 1.0)
        bar = "#" * round((width - 50) * share)
        yield f"  {PHASES[phase]:22}{seconds * 1e3:10.3f} ms {share:6.1%}  {bar}".rstrip()


def _fit_rows(fit: FitFacts, width: int) -> Iterator[str]:
    """Return the table of the fit: the time of each part in what was seen of it, or in a whole epoch."""
    if not fit.parts:
        return
    total = fit.of()
    seen = f"{fit.batches} steps, {fit.validated} batches of validation"
    what = "An epoch" if fit.is_epoch else "What was seen of the fit, no whole epoch,"
    yield from ("", *textwrap.wrap(f"{what} takes {total:.1f} s ({seen}), after set-up:", width))
    for part, title in PARTS.items():
        seconds = fit.parts.get(part, 0.0)
        share = seconds / (total or 1.0)
        if part == "set-up":
            yield f"  {title:39}{seconds:10.3f} s once"
        elif share >= ROW:
            yield f"  {title:39}{seconds:10.3f} s {share:6.1%}  {'#' * round((width - 60) * share)}".rstrip()


def _fit_as_json(fit: FitFacts) -> dict[str, Any]:
    """Return the table as plain values."""
    names = ("is_epoch", "batches", "validations", "validated", "saves")
    parts = [{"name": name, "title": title, "seconds": fit.parts.get(name, 0.0)} for name, title in PARTS.items()]
    return {
        **{name: getattr(fit, name) for name in names},
        "parts": parts,
        "hooks": [{"name": hook.name, "seconds": hook.seconds, "in_steps": hook.in_steps} for hook in fit.hooks],
    }
