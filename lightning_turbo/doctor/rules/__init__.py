"""The rules: each a pure function from facts to advice, with its threshold and its card."""

from lightning_turbo.doctor.rules.table import RULES, diagnose

__all__ = ["RULES", "diagnose"]
