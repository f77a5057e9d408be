"""Hooks that a run registers on modules and that copies of the modules do not inherit.

A callback may copy a network during a run, and a checkpoint may pickle one. The result is the network as it was before
the run, with float32 weights and without hooks of this package.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["add_run_hooks", "remove_run_hooks"]


class _Hooked:
    """The hooks that runs registered on a module, from the first ``add_run_hooks`` to the last removal."""

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []
        self.plain_attributes: list[Callable[[nn.Module], dict[str, Any]]] = []


# By identity, because the hash of a module may follow its state, as in metrics of torchmetrics.
_hooked: Any = WeakIdKeyDictionary()


def add_run_hooks(
    module: nn.Module,
    *handles: RemovableHandle,
    plain_attributes: Callable[[nn.Module], dict[str, Any]] | None = None,
) -> None:
    """Exclude these hooks from copies and pickles of a module, until they are removed.

    Args:
        module: The module with the hooks.
        *handles: The handles of the hooks.
        plain_attributes: Returns the module's attributes as they were before the run, by name.
    """
    if module not in _hooked:
        _hooked[module] = _Hooked()
        # Python looks on the instance before the class, except for shallow copies, which only ask for the state.
        vars(module)["__getstate__"] = functools.partial(_state_of, module)
        # torch.jit.script compiles hooks, which is impossible for these. It asks here for the module to script.
        vars(module)["__prepare_scriptable__"] = functools.partial(copy.deepcopy, module)
        if hasattr(type(module), "__deepcopy__"):  # parametrized modules and torch.fx modules have one
            vars(module)["__deepcopy__"] = functools.partial(_deep_copy, module)
        if type(module).__reduce__ is not object.__reduce__:
            vars(module)["__reduce_ex__"] = functools.partial(_reduce, module)
    _hooked[module].handles.extend(handles)
    if plain_attributes is not None:
        _hooked[module].plain_attributes.append(plain_attributes)


def remove_run_hooks(module: nn.Module, handles: Iterable[RemovableHandle]) -> None:
    """Remove hooks; with the last one, also remove what ``add_run_hooks`` added for copies."""
    for handle in handles:
        handle.remove()
        _hooked[module].handles.remove(handle)
    if module in _hooked and not _hooked[module].handles:
        del _hooked[module]
        for name in _METHODS:
            vars(module).pop(name, None)


_METHODS = ("__getstate__", "__deepcopy__", "__reduce_ex__", "__prepare_scriptable__")


@contextlib.contextmanager
def _as_before(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Temporarily restore a module's attributes from before the run; yields their dict."""
    own = vars(module)
    hooked = _hooked[module]
    shown: dict[str, Any] = {}
    for handle in hooked.handles:
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            hooks = reference()
            for name in [name for name, value in own.items() if value is hooks]:
                without = shown.setdefault(name, copy.copy(own[name]))
                without.pop(handle.id, None)
    for plain_attributes in hooked.plain_attributes:
        shown.update(plain_attributes(module))
    hidden = {name: own[name] for name in shown} | {name: own.pop(name) for name in _METHODS if name in own}
    own.update(shown)
    try:
        yield own
    finally:
        own.update(hidden)


def _state_of(module: nn.Module) -> Any:
    with _as_before(module) as own:
        get_state = getattr(module, "__getstate__", None)  # from its class; every object has one since Python 3.11
        state = own if get_state is None else get_state()
        return dict(own) if state is own else state


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    with _as_before(module):
        return copy.deepcopy(module, memo)


def _reduce(module: nn.Module, protocol: Any) -> Any:
    with _as_before(module):
        return module.__reduce_ex__(protocol)
