"""The doctor: measures what slows a run and what is installed, applies rules, and writes a report."""

__all__: list[str] = []
