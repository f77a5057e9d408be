"""The rules: each a pure function from facts to findings, with its threshold and its card."""

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules import bounds, data, graph, model, optimization, ranks, waits  # noqa: F401
from lightning_turbo.doctor.rules.rule import LEVELS, RULES, Finding

__all__ = ["RULES", "diagnose"]


def diagnose(facts: Facts) -> list[Finding]:
    """Apply every rule to ``facts``.

    Args:
        facts: What was measured.

    Returns:
        The findings, the gravest first and, among equals, the costliest first.
    """
    findings = [finding for each in RULES for finding in each.findings(facts)]
    return sorted(findings, key=lambda each: (LEVELS.index(each.level), -each.seconds))
