"""apex's ways to put a function of the user's own on one of O1's lists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lightning_turbo.amp.autocast import FunctionCasts, to_widest
from lightning_turbo.amp.half_forward import cast_floats

__all__ = [
    "apply_registered",
    "casts_in_force",
    "float_function",
    "half_function",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "restore_registered",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_active: FunctionCasts | None = None
_CASTS: dict[str, Callable[[Any, torch.dtype], Any]] = {
    "half": cast_floats,
    "float": lambda values, _: cast_floats(values, torch.float32),
    "promote": lambda values, _: to_widest(values),
}
_registered: list[tuple[Any, str, str]] = []
_replaced: list[tuple[Any, str, Any]] = []
_ABSENT = object()  # of a name that a class only inherits


def half_function(function: _F) -> _F:
    """Decorate a function so that under O1 its floating tensors come in half precision."""
    return _decorate(function, "half")


def float_function(function: _F) -> _F:
    """Decorate a function so that under O1 its floating tensors come in float32."""
    return _decorate(function, "float")


def promote_function(function: _F) -> _F:
    """Decorate a function so that under O1 its floating tensors come in the widest dtype among them."""
    return _decorate(function, "promote")


def register_half_function(module: Any, name: str) -> None:
    """Put ``module.name`` on O1's half list; takes effect at the next ``initialize``.

    A function of torch's is put on a list. Another module's function is wrapped in place in that module for as
    long as O1 is on, because the program asked for it.

    Args:
        module: A module or class that has the function.
        name: The function's name in it.

    Raises:
        ValueError: If ``module`` has no function ``name``.
    """
    _register(module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """Put ``module.name`` on O1's float32 list; see ``register_half_function``."""
    _register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Put ``module.name`` on O1's list of functions that take the widest dtype; see ``register_half_function``."""
    _register(module, name, "promote")


def apply_registered(casts: FunctionCasts) -> None:
    """Let registered and decorated functions cast from now on."""
    global _active
    _active = casts
    for module, name, kind in _registered:
        function = getattr(module, name)
        if function in torch.overrides.get_overridable_functions().get(module, []):
            casts.register(function, kind)
        else:
            _replaced.append((module, name, vars(module).get(name, _ABSENT)))
            wrapped: Any = _decorate(function, kind)
            # A function that a class holds as it is would be a method of its objects.
            is_method = not isinstance(inspect.getattr_static(module, name), (staticmethod, classmethod))
            setattr(module, name, wrapped if is_method else staticmethod(wrapped))


def casts_in_force() -> FunctionCasts | None:
    """Return what ``apply_registered`` was called with last, until ``restore_registered``."""
    return _active


def restore_registered() -> None:
    """End what ``apply_registered`` began."""
    global _active
    _active = None
    while _replaced:
        module, name, before = _replaced.pop()
        if before is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, before)


def _register(module: Any, name: str, kind: str) -> None:
    if not callable(getattr(module, name, None)):
        raise ValueError(f"register_{kind}_function: expected the name of a function in {module!r}, got {name!r}.")
    _registered[:] = [entry for entry in _registered if entry[0] is not module or entry[1] != name]
    _registered.append((module, name, kind))


def _decorate(function: _F, kind: str) -> _F:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casts = _active
        if casts is not None and torch.is_autocast_enabled(casts.device_type):
            args, kwargs = _CASTS[kind]((args, kwargs), casts.dtype)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # wraps keeps the signature
