"""Defines rules and findings, and groups hits into one finding per cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_turbo.doctor.facts import FEW, Call, Facts, Site

__all__ = ["LAYER", "LEVELS", "RULES", "Finding", "Hit", "Place", "Rule", "hits_of_calls", "rule"]

LEVELS = ("error", "warning", "info")
"""From most to least severe: wrong results, lost time, worth knowing."""
LAYER = "a layer of torch"
MEASURED = "{ms} ms a step (measured while watching)"


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule found at one place."""

    what: str
    site: Site | None
    cost: str  # measured or estimated; "{ms}" stands for the milliseconds of all hits with this cause
    level: str = "warning"
    name: str = ""  # of the layer or parameter, if several share a line
    cause: str = ""  # hits with the same cause form one finding; default: the text
    seconds: float = 0.0  # measured seconds per step, 0 if not measured
    remedy: str = ""  # replaces that of the rule
    epoch_seconds: float = 0.0  # measured seconds of what was seen of the fit, outside steps


@dataclass(frozen=True, slots=True)
class Place:
    """A line of user code, and the layers or parameters there that a finding is about."""

    site: Site | None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One cause that slows down or spoils the run, its places, and what to do about it."""

    rule: str
    level: str
    what: str
    remedy: str
    card: str
    cost: str = ""
    seconds: float = 0.0  # measured seconds per step
    epoch_seconds: float = 0.0  # measured seconds of what was seen of the fit, outside steps
    count: int = 1  # number of places
    places: tuple[Place, ...] = ()

    @property
    def site(self) -> Site | None:
        """The first place."""
        return self.places[0].site if self.places else None

    def in_fit(self, facts: Facts) -> float:
        """Return the seconds that it costs of what was seen of the fit."""
        return self.seconds * max(facts.fit.batches, 1) + self.epoch_seconds


@dataclass(frozen=True, slots=True)
class Rule:
    """A pure function from facts to hits; docs/symptoms.md says when it reports."""

    name: str
    card: str  # the card in docs/cards with more information, without ".md"
    remedy: str
    check: Callable[[Facts], Iterable[Hit]]
    by_time: bool = False  # whether its warnings are about step times, which need enough timed steps

    def findings(self, facts: Facts) -> list[Finding]:
        """Apply the rule to ``facts``; hits with one cause become one finding."""
        # Grouped by remedy as well, because lines that need different changes are different findings.
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
    """Register a rule with the decorated function, which yields hits for the given facts."""

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
    """Yield a hit for each call of a kind; without ``level``, one in at least half of the steps is a warning.

    Args:
        facts: What was measured.
        kind: The calls' kind.
        what: The message, with ``{name}``, ``{rate}`` and ``{within}`` of the call.
        cost: The cost, with ``{ms}`` for the measured milliseconds per step.
        level: The level, whatever the rate.
        remedies: Remedies by the library that makes the call.
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
    # In fewer than half of the steps it may be intended, like occasional logging; a layer of torch is not the user's.
    return "warning" if 2 * call.steps >= steps and call.within != LAYER else "info"


def _rate(call: Call, steps: int) -> str:
    if call.count < steps:
        return f"in {call.steps} of {steps} steps"
    return "once a step" if call.count == steps else f"{call.count / steps:g} times a step"
