"""The doctor: what is installed, what slows a run, and what to do about it."""

__all__: list[str] = []
