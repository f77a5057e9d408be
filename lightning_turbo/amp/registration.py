"""apex's decorators and functions that add a user's function to one of O1's lists."""

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
_ABSENT = object()  # marks a name that a class only inherits


def half_function(function: _F) -> _F:
    """Decorate a function so that it receives its floating-point tensors in half precision under O1."""
    return _decorate(function, "half")


def float_function(function: _F) -> _F:
    """Decorate a function so that it receives its floating-point tensors in float32 under O1."""
    return _decorate(function, "float")


def promote_function(function: _F) -> _F:
    """Decorate a function so that it receives its floating-point tensors in their widest dtype under O1."""
    return _decorate(function, "promote")


def register_half_function(module: Any, name: str) -> None:
    """Add ``module.name`` to O1's half list, from the next ``initialize`` on.

    A torch function is added to the list. A function of any other module is replaced in that module while O1 is active,
    at the program's explicit request.

    Args:
        module: The module or class that has the function.
        name: The function's name.

    Raises:
        ValueError: If ``module`` has no function ``name``.
    """
    _register(module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """Add ``module.name`` to O1's float32 list; see ``register_half_function``."""
    _register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Add ``module.name`` to O1's list of functions that use the widest dtype; see ``register_half_function``."""
    _register(module, name, "promote")


def apply_registered(casts: FunctionCasts) -> None:
    """Start the casts of registered and decorated functions."""
    global _active
    _active = casts
    for module, name, kind in _registered:
        function = getattr(module, name)
        if function in torch.overrides.get_overridable_functions().get(module, []):
            casts.register(function, kind)
        else:
            _replaced.append((module, name, vars(module).get(name, _ABSENT)))
            wrapped: Any = _decorate(function, kind)
            # A plain function stored on a class would become a method of its instances.
            is_method = not isinstance(inspect.getattr_static(module, name), (staticmethod, classmethod))
            setattr(module, name, wrapped if is_method else staticmethod(wrapped))


def casts_in_force() -> FunctionCasts | None:
    """Return the argument of the last ``apply_registered``, until ``restore_registered``."""
    return _active


def restore_registered() -> None:
    """Undo ``apply_registered``."""
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
