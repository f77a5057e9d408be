"""The rules in prose: the page that leads from a symptom to a technique."""

from __future__ import annotations

from lightning_turbo.doctor.rules.table import RULES

__all__ = ["BEGIN", "END", "as_markdown"]

BEGIN, END = "<!-- rules: made by lightning_turbo.doctor.rules.prose -->\n", "<!-- end of rules -->\n"

_HEAD = """\
| You notice | Rule | It speaks when | What to do | Card |
|---|---|---|---|---|
"""


def as_markdown() -> str:
    """Return the table of rules in ``docs/symptoms.md``, between its two marks."""
    rows = (
        f"| {_cell(rule.symptom)} | `{rule.name}` | {_cell(rule.threshold)} | {_cell(rule.remedy)} "
        f"| [{rule.card}](cards/{rule.card}.md) |\n"
        for rule in RULES
    )
    return BEGIN + _HEAD + "".join(rows) + END


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
