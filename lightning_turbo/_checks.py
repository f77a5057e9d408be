"""Checks of arguments: switches, functions and numbers."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, cast

__all__ = [
    "answer_unknown", "check_choice", "check_count", "check_functions", "check_switches", "expect", "inherits",
    "is_list", "is_number", "is_size", "is_whole", "refuse_name", "suggest",
]  # fmt: skip

T = TypeVar("T", bound=Callable[..., None])


def check_choice(name: str, value: Any, choices: Sequence[Any], error: type[Exception] = ValueError) -> None:
    """Refuse a value that is not one of the choices; the message lists them."""
    *most, last = map(repr, choices)
    expect(value in choices, name, value, f"{', '.join(most)} or {last}", error)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return ``value`` if it is an integer of ``least`` or more."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    expect(whole, name, value, f"an integer of {least} or more", TypeError)
    expect(int(value) >= least, name, value, f"an integer of {least} or more")
    return int(value)


def check_switches(*, none: bool = False, **switches: Any) -> None:
    """Refuse values that are neither ``True`` nor ``False``.

    Args:
        none: Accept ``None`` too.
        **switches: Name of the argument -> value.

    Raises:
        TypeError: If a value is not a bool.
    """
    for name, value in switches.items():
        if not (isinstance(value, bool) or (none and value is None)):
            raise TypeError(f"{name}={value!r}: expected {'True, False or None' if none else 'True or False'}.")


def inherits(owner: Any, parent: type, names: tuple[str, ...]) -> bool:
    """Tell whether an object overrides none of these methods of ``parent``, in its class or on itself."""
    kind = type(owner)
    own = vars(owner)
    return all(name not in own and getattr(kind, name, None) is getattr(parent, name) for name in names)


def check_functions(**functions: Any) -> None:
    """Refuse values that are neither callable nor ``None``.

    Args:
        **functions: Name of the argument -> value.

    Raises:
        TypeError: If a value is neither.
    """
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r}: expected a function or None.")


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
    """Tell whether a value is a finite real number; ``True`` and ``False`` are not."""
    # Numbers of NumPy are Real and Integral too, and so are True and False, which are hardly meant as numbers.
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(float(value))


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Tell whether a value is a whole number that is not below ``least``; ``True`` and ``False`` are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Tell whether a value is a sequence and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_size(value: object, axes: int) -> TypeGuard[Sequence[int]]:
    """Tell whether a value is a sequence of so many whole numbers, each at least 1."""
    return is_list(value) and len(value) == axes and all(is_whole(length, 1) for length in value)


def answer_unknown(**meant: str) -> Callable[[T], T]:
    """Have an ``__init__`` answer keywords that it does not take with the one that is meant.

    Args:
        **meant: Name that somebody may use -> name of the argument. Names that are nearly right need no entry.

    Raises:
        TypeError: In the ``__init__``, for a keyword that it does not take.
    """

    def decorate(init: T) -> T:
        parameters = inspect.signature(init).parameters
        known = [name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in known:
                    hint = f"; did you mean {meant[name]}?" if name in meant else suggest(name, known[1:])
                    takes = ", ".join(known[1:])
                    raise TypeError(f"{type(self).__name__} has no argument {name}{hint or '.'} It takes {takes}.")
            init(self, *args, **kwargs)

        return cast("T", checked)

    return decorate


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` with the known name that is most like a word, or an empty text."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def refuse_name(module: str, name: str, instead: Mapping[str, str]) -> Exception:
    """Return the error for a name of a module of apex's, which says what to take instead."""
    if name.startswith("_"):  # what asks every module, as inspect
        return AttributeError(name)
    remedy = instead.get(name, "what docs/migration.md names")
    return ImportError(f"{module}.{name} is not part of this package. Take {remedy}.", name=name)
