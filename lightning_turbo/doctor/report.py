"""The report: for the terminal, as JSON, and as a page."""

from __future__ import annotations

import dataclasses
import json as json_format
import os
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_turbo._files import whole_file
from lightning_turbo.doctor.advice import LEVELS, Finding
from lightning_turbo.doctor.facts import Facts, Site
from lightning_turbo.doctor.page import as_html
from lightning_turbo.doctor.timeline import PHASE_NAMES, Segment

__all__ = ["Report", "as_json", "as_text", "place", "summary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the doctor found.

    Attributes:
        facts: What was measured.
        findings: The findings, the gravest first.
        timeline: The segments of the step of median length.
        short: What is missing if the run was too short, else empty.
    """

    facts: Facts
    findings: tuple[Finding, ...]
    timeline: tuple[Segment, ...] = ()
    short: str = ""

    def above(self, level: str) -> list[Finding]:
        """Return the findings that are graver than ``level``."""
        return [each for each in self.findings if LEVELS.index(each.level) < LEVELS.index(level)]

    def save(self, html: str | os.PathLike[str] | None = None, json: str | os.PathLike[str] | None = None) -> None:
        """Write the report to files; ``None`` writes none."""
        if html is not None:
            _write(Path(html), as_html(as_json(self)))
        if json is not None:
            _write(Path(json), json_format.dumps(as_json(self), indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def place(site: Site) -> str:
    """Return a site as ``file:line``, relative to the working directory if it lies within."""
    relative = (
        os.path.relpath(site.file) if os.path.splitdrive(site.file)[0] == os.path.splitdrive(os.getcwd())[0] else ""
    )
    file = relative if relative and not relative.startswith(os.pardir) else site.file
    return f"{file}:{site.line}"


def summary(report: Report) -> str:
    """Return the report in one line."""
    counts = [sum(each.level == level for each in report.findings) for level in LEVELS]
    parts = ", ".join(
        f"{count} {level}{'s' if count != 1 and level != 'info' else ''}"
        for count, level in zip(counts, LEVELS, strict=True)
    )
    facts = report.facts
    return f"{parts}; {facts.timed} steps timed and {facts.watched} watched on {facts.device}"


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain dicts, lists, strings and numbers."""

    def finding(each: Finding) -> dict[str, Any]:
        row = dataclasses.asdict(each)
        row["place"] = place(each.site) if each.site else ""
        row["card"] = f"docs/cards/{each.card}.md"
        return row

    facts = report.facts
    return {
        "summary": summary(report),
        "short": report.short,
        "notes": list(facts.notes),
        "device": facts.device,
        "precision": facts.precision,
        "timed": facts.timed,
        "watched": facts.watched,
        "step_seconds": facts.step,
        "phases": [{"phase": key, "name": PHASE_NAMES[key], "seconds": value} for key, value in facts.phases.items()],
        "timeline": [dataclasses.asdict(segment) for segment in report.timeline],
        "findings": [finding(each) for each in report.findings],
    }


def as_text(report: Report, width: int | None = None) -> str:
    """Return the report as text for the terminal.

    Args:
        report: The report.
        width: Columns; ``None`` asks the terminal.
    """
    width = max(60, min(width or shutil.get_terminal_size().columns, 120))
    lines = textwrap.wrap(f"lightning-turbo doctor: {summary(report)}", width)
    lines += textwrap.wrap(report.short, width)
    for note in report.facts.notes:
        lines += textwrap.wrap(f"Note: {note}.", width)
    lines += ["", *_phase_table(report.facts, width)] if report.facts.timed else []
    told: set[str] = set()
    for each in report.findings:
        lines += ["", f"{each.level.upper():8}{each.rule}" + (f"  {place(each.site)}" if each.site else "")]
        rows = [("", each.what), ("cost", each.cost), ("mended", each.mended), ("remedy", each.remedy)]
        for label, text in [*rows, ("card", f"docs/cards/{each.card}.md")]:
            if text and not (label in ("remedy", "card") and each.rule in told):
                head = f"        {label:8}" if label else "        "
                lines += textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head))
        told.add(each.rule)
        lines += [f"        | {line}" for line in each.diff.splitlines()]
    if not report.findings and report.facts.watched:
        lines += ["", "Nothing to mend was found."]
    return "\n".join(lines)


def _phase_table(facts: Facts, width: int) -> list[str]:
    rows = []
    for phase, seconds in facts.phases.items():
        share = seconds / facts.step if facts.step else 0.0
        rows.append(
            f"  {PHASE_NAMES[phase]:22}{seconds * 1e3:10.3f} ms {share:6.1%}  {'#' * round((width - 50) * share)}"
        )
    return [f"The median step takes {facts.step * 1e3:.3f} ms:", *rows]
