"""The doctor: what slows a run and what is installed, as facts, rules on the facts, and a report."""

__all__: list[str] = []
