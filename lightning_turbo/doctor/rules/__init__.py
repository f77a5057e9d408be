"""The rules: each is a pure function from facts to findings, with a threshold and a card."""

from lightning_turbo.doctor import guard
from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules import bounds, data, fit, lines, model, optimization, waits  # noqa: F401
from lightning_turbo.doctor.rules.rule import LEVELS, RULES, Finding, Rule

__all__ = ["RULES", "diagnose"]


def diagnose(facts: Facts) -> list[Finding]:
    """Apply every rule to ``facts``.

    Args:
        facts: What was measured.

    Returns:
        The findings, most severe first and, within a level, most expensive first.
    """
    findings = [finding for each in RULES for finding in _apply(each, facts)]
    return sorted(findings, key=lambda each: (LEVELS.index(each.level), -each.in_fit(facts)))


def _apply(rule: Rule, facts: Facts) -> list[Finding]:
    """Return a rule's findings; if the rule raises an error, report it in one line and return none."""
    try:
        return rule.findings(facts)
    except Exception as error:
        if guard.RAISES:
            raise
        guard.say(f"Doctor: the rule {rule.name!r} found nothing, because of {guard.describe_error(error)}.")
        return []
