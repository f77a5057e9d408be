"""Findings, and the rules that make them out of facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_turbo.doctor.facts import Facts, Site

__all__ = ["LEVELS", "Finding", "Hit", "Rule", "rule"]

LEVELS = ("error", "warning", "info")
"""From the gravest to the mildest: wrong results, lost time, worth knowing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """What a rule found at one place."""

    what: str
    level: str = "warning"
    site: Site | None = None
    cost: str = ""
    """Measured or estimated, in words."""
    seconds: float = 0.0
    """Measured seconds per step, 0 if not measured; findings are ordered by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that slows or spoils the run, and what to do about it."""

    rule: str
    level: str
    what: str
    remedy: str
    card: str
    cost: str = ""
    seconds: float = 0.0
    site: Site | None = None
    diff: str = ""
    """A change to the user's source, as a unified diff; no file is ever edited."""
    mended: str = ""
    """What ``fix=True`` changed at run time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A pure function from facts to advice, with its documentation."""

    name: str
    symptom: str
    threshold: str
    """When it speaks, in words."""
    remedy: str
    card: str
    """The card in ``docs/cards`` that tells more, without ``.md``."""
    check: Callable[[Facts], Iterable[Hit]]

    def findings(self, facts: Facts) -> list[Finding]:
        """Apply the rule to ``facts``."""
        return [
            Finding(
                rule=self.name,
                level=hit.level,
                what=hit.what,
                remedy=self.remedy,
                card=self.card,
                cost=hit.cost,
                seconds=hit.seconds,
                site=hit.site,
            )
            for hit in self.check(facts)
        ]


def rule(
    *, name: str, symptom: str, threshold: str, remedy: str, card: str
) -> Callable[[Callable[[Facts], Iterable[Hit]]], Rule]:
    """Make a rule of the decorated function, which yields hits for the facts that it is given."""

    def make(check: Callable[[Facts], Iterable[Hit]]) -> Rule:
        return Rule(name=name, symptom=symptom, threshold=threshold, remedy=remedy, card=card, check=check)

    return make
