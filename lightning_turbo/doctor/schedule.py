"""How many steps the doctor lets pass, times and watches."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Schedule"]

_LEAST = {"warmup": 1, "timed": 1, "watched": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Counts of steps, one after the other.

    Raises:
        TypeError: If a count is no whole number.
        ValueError: If a count is too small.
    """

    warmup: int = 3
    """Steps before the first look, at least 1."""
    timed: int = 10
    """Steps timed with nothing but clock readings, at least 1."""
    watched: int = 4
    """Steps watched from inside, at least 2, because growth shows between two steps."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Doctor({name}={value!r}): a whole number of steps is needed, such as {name}={least}.")
            if value < least:
                raise ValueError(f"Doctor({name}={value!r}): at least {least} is needed; raise it to {least} or more.")

    @property
    def steps(self) -> int:
        """All steps together."""
        return self.warmup + self.timed + self.watched
