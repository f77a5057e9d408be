"""Checks of arguments: switches, functions and numbers."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

__all__ = [
    "check_choice", "check_count", "check_functions", "check_switches", "expect", "inherits",
    "is_list", "is_number", "is_size", "is_whole", "suggest",
]  # fmt: skip


def check_choice(name: str, value: Any, choices: Sequence[Any], error: type[Exception] = ValueError) -> None:
    """Raise an error that lists the choices if a value is not one of them."""
    *most, last = map(repr, choices)
    expect(value in choices, name, value, f"{', '.join(most)} or {last}", error)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return ``value`` if it is an integer of ``least`` or more."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    expect(whole, name, value, f"an integer of {least} or more", TypeError)
    expect(int(value) >= least, name, value, f"an integer of {least} or more")
    return int(value)


def check_switches(*, none: bool = False, **switches: Any) -> None:
    """Raise an error for values that are neither ``True`` nor ``False``.

    Args:
        none: Also accept ``None``.
        **switches: Name of the argument -> value.

    Raises:
        TypeError: If a value is not a bool.
    """
    for name, value in switches.items():
        if not (isinstance(value, bool) or (none and value is None)):
            raise TypeError(f"{name}={value!r}: expected {'True, False or None' if none else 'True or False'}.")


def inherits(owner: Any, parent: type, names: tuple[str, ...]) -> bool:
    """Return whether an object overrides none of these methods of ``parent``, in its class or on the instance."""
    kind = type(owner)
    own = vars(owner)
    return all(name not in own and getattr(kind, name, None) is getattr(parent, name) for name in names)


def check_functions(**functions: Any) -> None:
    """Raise an error for values that are neither callable nor ``None``.

    Args:
        **functions: Name of the argument -> value.

    Raises:
        TypeError: If a value is neither.
    """
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r}: expected a function or None.")


def expect(valid: object, name: str, value: Any, expected: str, error: type[Exception] = ValueError) -> None:
    """Raise an error that names the argument, the expected values and the value, unless the value is valid.

    Args:
        valid: Whether the value is valid.
        name: Name of the argument.
        value: Value of the argument.
        expected: Description of the valid values.
        error: Class of the error.
    """
    if not valid:
        raise error(f"{name}: expected {expected}, got {value!r}.")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite real number; ``True`` and ``False`` are not."""
    # NumPy's numbers are Real and Integral too. So are True and False, but nobody means them as numbers.
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(float(value))


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is an integer of at least ``least``; ``True`` and ``False`` are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_size(value: object, axes: int) -> TypeGuard[Sequence[int]]:
    """Return whether a value is a sequence of ``axes`` integers, each at least 1."""
    return is_list(value) and len(value) == axes and all(is_whole(length, 1) for length in value)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` with the known name closest to a word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
