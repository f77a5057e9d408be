"""What a rule is, what it finds, and how what it finds is grouped: one finding for a cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_turbo.doctor.facts import FEW, Call, Facts, Site

__all__ = ["LAYER", "LEVELS", "RULES", "Finding", "Hit", "Place", "Rule", "hits_of_calls", "rule"]

LEVELS = ("error", "warning", "info")
"""From the gravest to the mildest: wrong results, lost time, worth knowing."""
LAYER = "a layer of torch"
MEASURED = "{ms} ms a step (measured while watching)"


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule found at one place."""

    what: str
    site: Site | None
    cost: str  # measured or estimated; "{ms}" is replaced by the milliseconds of all hits of the cause
    level: str = "warning"
    name: str = ""  # of the layer or parameter, where several have one line
    cause: str = ""  # hits with the same cause are one finding; by default the text itself
    seconds: float = 0.0  # measured seconds a step, 0 if not measured
    remedy: str = ""  # in place of the rule's
    epoch_seconds: float = 0.0  # measured seconds an epoch, of what is no part of a step


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's, and the layers or parameters there that a finding is about."""

    site: Site | None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One cause that slows or spoils the run, where it is, and what to do about it."""

    rule: str
    level: str
    what: str
    remedy: str
    card: str
    cost: str = ""
    seconds: float = 0.0  # measured seconds a step
    epoch_seconds: float = 0.0  # measured seconds an epoch, of what is no part of a step
    count: int = 1  # how many places there are
    places: tuple[Place, ...] = ()

    @property
    def site(self) -> Site | None:
        """The first place."""
        return self.places[0].site if self.places else None

    def an_epoch(self, facts: Facts) -> float:
        """Return the seconds that it costs in an epoch of the run."""
        batches = facts.run.batches if facts.run.batches < math.inf else facts.fit.batches or 1
        return self.seconds * batches + self.epoch_seconds


@dataclass(frozen=True, slots=True)
class Rule:
    """A pure function from facts to hits; docs/symptoms.md says when it speaks."""

    name: str
    card: str  # the card in docs/cards that tells more, without ".md"
    remedy: str
    check: Callable[[Facts], Iterable[Hit]]
    by_time: bool = False  # whether its warnings are about the times of steps, of which a few tell nothing

    def findings(self, facts: Facts) -> list[Finding]:
        """Apply the rule to ``facts``; hits of one cause become one finding."""
        # By the remedy as well: lines with one cause that need another change are another finding.
        groups: dict[tuple[str, str, str], list[Hit]] = {}
        for hit in self.check(facts):
            if self.by_time and facts.timed < FEW and hit.level == "warning":
                hit = replace(hit, level="info")
            groups.setdefault((hit.level, hit.cause or hit.what, hit.remedy or self.remedy), []).append(hit)
        return [self._join(hits) for hits in groups.values()]

    def _join(self, hits: list[Hit]) -> Finding:
        seconds, first = sum(hit.seconds for hit in hits), hits[0]
        names: dict[Site | None, tuple[str, ...]] = {}
        for hit in hits:
            names[hit.site] = (*names.get(hit.site, ()), *([hit.name] if hit.name else []))
        return Finding(
            rule=self.name,
            level=first.level,
            what=f"{first.what} (and {len(hits) - 1} more)" if len(hits) > 1 else first.what,
            remedy=first.remedy or self.remedy,
            card=self.card,
            cost=first.cost.replace("{ms}", f"{seconds * 1e3:.2f}"),
            seconds=seconds,
            epoch_seconds=sum(hit.epoch_seconds for hit in hits),
            count=len(hits),
            places=tuple(Place(site, names[site]) for site in names if site or names[site]),
        )


RULES: list[Rule] = []
"""All rules, in the order of the documentation."""


def rule(
    name: str, card: str, remedy: str, *, by_time: bool = False
) -> Callable[[Callable[[Facts], Iterable[Hit]]], Rule]:
    """Add a rule made of the decorated function, which yields hits for the facts that it gets."""

    def add(check: Callable[[Facts], Iterable[Hit]]) -> Rule:
        RULES.append(Rule(name, card, remedy, check, by_time))
        return RULES[-1]

    return add


def hits_of_calls(
    facts: Facts,
    kind: str,
    what: str,
    cost: str = MEASURED,
    level: str = "",
    remedies: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Hit]:
    """Yield a hit for each call of a kind; without ``level`` a call in half of the steps or more is a warning.

    Args:
        facts: What was measured.
        kind: The calls' kind.
        what: What is said, with ``{name}``, ``{rate}`` and ``{within}`` of the call.
        cost: What it costs, with ``{ms}`` for the measured milliseconds a step.
        level: The level, whatever the rate.
        remedies: What to do, by the library that does it.
    """
    steps = max(facts.seen.watched, 1)
    for call in (each for each in facts.seen.calls if each.kind == kind):
        yield Hit(
            what.format(
                name=call.name, rate=_rate(call, steps), within=f" within {call.within}" if call.within else ""
            ),
            call.site,
            cost,
            level or _level(call, steps),
            cause=call.within or call.name,
            seconds=call.seconds / steps,
            remedy=remedies.get(call.within, ""),
        )


def _level(call: Call, steps: int) -> str:
    # In fewer than half of the steps it may be meant, as logging every so often is; a layer of torch is not the user's.
    return "warning" if 2 * call.steps >= steps and call.within != LAYER else "info"


def _rate(call: Call, steps: int) -> str:
    if call.count < steps:
        return f"in {call.steps} of {steps} steps"
    return "once a step" if call.count == steps else f"{call.count / steps:g} times a step"
