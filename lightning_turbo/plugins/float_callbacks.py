"""Lightning's callbacks that average weights, or thaw them, work on the float32 masters of O2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning_turbo._compat import Callback, callbacks_named

__all__ = ["FloatCallbacks"]

_STATE = ("on_load_checkpoint", "on_save_checkpoint")


class FloatCallbacks:
    """Runs the hooks of Lightning's own callbacks for averaging and finetuning on float32 weights, until removed."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[Callback, str]] = []

    def wrap(self, trainer: Any, widened: Callable[[], AbstractContextManager[None]]) -> None:
        """Let such callbacks of a Trainer run inside a context.

        Args:
            trainer: Whose callbacks.
            widened: Makes the context, in which the module's parameters are the masters.
        """
        for callback in trainer.callbacks:
            if isinstance(callback, callbacks_named("BaseFinetuning", "StochasticWeightAveraging", "WeightAveraging")):
                for hook in _own_hooks(type(callback)):
                    setattr(callback, hook, _inside(getattr(callback, hook), widened))
                    self._wrapped.append((callback, hook))

    def remove(self) -> None:
        """Leave the callbacks as they were."""
        for callback, hook in self._wrapped:
            delattr(callback, hook)
        self._wrapped.clear()


def _own_hooks(kind: type[Callback]) -> list[str]:
    hooks = [name for name in dir(Callback) if name.startswith("on_") and name not in _STATE]
    return [name for name in hooks if getattr(kind, name) is not getattr(Callback, name)]


def _inside(hook: Callable[..., Any], widened: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with widened():
            return hook(*args, **kwargs)

    return wrapped
