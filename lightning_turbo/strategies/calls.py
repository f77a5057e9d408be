"""Lightning's calls of its hooks, without a log line, a profiler's context and two writes through ``nn.Module``."""

from __future__ import annotations

from typing import Any

from lightning_turbo._lightning import PassThroughProfiler

__all__ = ["call_callbacks", "call_hook", "inherits", "is_unprofiled"]


def is_unprofiled(trainer: Any) -> bool:
    """Whether the Trainer's profiler is the one that does nothing."""
    return type(trainer.profiler) is PassThroughProfiler


def call_callbacks(trainer: Any, module: Any, hook: str, *args: Any) -> None:
    """Call a hook of every callback."""
    state = vars(module)
    before, state["_current_fx_name"] = state["_current_fx_name"], hook
    for callback in trainer.callbacks:
        function = getattr(callback, hook)
        if callable(function):
            function(trainer, module, *args)
    state["_current_fx_name"] = before


def call_hook(owner: Any, module: Any, hook: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the module or the strategy, with the module told of its name, which ``self.log`` asks for.

    A hook that was set to ``None`` is not called.
    """
    state = vars(module)
    before, state["_current_fx_name"] = state["_current_fx_name"], hook
    function = getattr(owner, hook)
    output = function(*args, **kwargs) if callable(function) else None
    state["_current_fx_name"] = before
    return output


def inherits(owner: Any, parent: type, names: tuple[str, ...]) -> bool:
    """Whether neither an object nor its class overrides one of these; a class may be changed between two steps."""
    kind, own = type(owner), vars(owner)
    for name in names:  # noqa: SIM110 - all() would take twice as long
        if name in own or getattr(kind, name) is not getattr(parent, name):
            return False
    return True
