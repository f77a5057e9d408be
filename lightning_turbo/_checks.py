"""Checks of arguments that many constructors share: switches, functions and numbers."""

from __future__ import annotations

import math
import numbers
from typing import Any, TypeGuard

__all__ = ["check_functions", "check_switches", "expect", "is_number", "is_whole"]


def check_switches(**switches: Any) -> None:
    """Refuse what is neither ``True`` nor ``False``.

    Args:
        **switches: What was given, by the name of the argument.

    Raises:
        TypeError: If one is no bool.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is no bool; accepted are True and False. Pass one of the two.")


def check_functions(**functions: Any) -> None:
    """Refuse what can neither be called nor is ``None``.

    Args:
        **functions: What was given, by the name of the argument.

    Raises:
        TypeError: If one is something else.
    """
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise TypeError(
                f"{name}={value!r} cannot be called; accepted is a function, or None. Pass one, or leave it out."
            )


def expect(valid: object, name: str, value: Any, expected: str, error: type[Exception] = ValueError) -> None:
    """Raise an error that names the argument, the expected values and the value, unless it is valid.

    Args:
        valid: Whether the value can be used.
        name: Name of the argument.
        value: Value of the argument.
        expected: Description of the values that can be used.
        error: Class of the error.
    """
    if not valid:
        raise error(f"{name}: expected {expected}, got {value!r}.")


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a finite real number; ``True`` and ``False`` are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(float(value))


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Tell whether a value is a whole number that is not below ``least``; ``True`` and ``False`` are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least
