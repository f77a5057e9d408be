"""Hooks that look at weights or gradients, or change them, find O2's float32 masters in the module."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_turbo._lightning import Callback, LightningModule, callbacks_named
from lightning_turbo.amp.half_weights import HalfWeights

__all__ = ["FloatHooks"]

_STATE = ("on_load_checkpoint", "on_save_checkpoint")
_AFTER_BACKWARD = ("on_after_backward",)
_BEFORE_STEP = ("on_before_optimizer_step", "configure_gradient_clipping")


class FloatHooks:
    """Runs hooks inside a context in which the module's parameters are the masters.

    These are the hooks between the backward pass and the step, where anybody overrides one, and all hooks of
    Lightning's own callbacks for averaging and finetuning. ``zero_grad`` of the module, and of every one in it, clears
    the gradients of masters too.
    """

    def __init__(self) -> None:
        self.after_backward: Callable[[], AbstractContextManager[None]] = nullcontext
        self.before_step: Callable[[], AbstractContextManager[None]] = nullcontext
        self._wrapped: list[tuple[Callback | nn.Module, str, Any]] = []  # with what the object itself had there

    def wrap(
        self, module: LightningModule, widened: Callable[[], AbstractContextManager[None]], weights: HalfWeights
    ) -> None:
        """Begin.

        Args:
            module: Whose hooks and whose Trainer's callbacks.
            widened: Makes the context.
            weights: Have the masters.
        """
        callbacks: list[Callback] = module.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if _overridden(module, callbacks, _AFTER_BACKWARD):
            self.after_backward = widened
        if _overridden(module, callbacks, _BEFORE_STEP):
            self.before_step = widened
        for callback in callbacks:
            if isinstance(callback, callbacks_named("BaseFinetuning", "StochasticWeightAveraging", "WeightAveraging")):
                for hook in dir(Callback):
                    if hook.startswith("on_") and hook not in _STATE and _overrides(callback, Callback, hook):
                        self._set(callback, hook, _inside(getattr(callback, hook), widened))
        clear = _clearing(weights)
        for part in module.modules():
            own = vars(part).get("zero_grad")
            if own is None or getattr(own, "__code__", None) is clear.__code__:  # of an earlier run, in a copy
                # A bound method, which a copy of the module has bound to itself.
                self._set(part, "zero_grad", types.MethodType(clear, part))

    def remove(self) -> None:
        """Leave all as it was."""
        self.after_backward = self.before_step = nullcontext
        for owner, name, before in self._wrapped:
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
        self._wrapped.clear()

    def _set(self, owner: Callback | nn.Module, name: str, value: Any) -> None:
        self._wrapped.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = value  # not setattr: a compiled module would pass it on to the one in it


def _overridden(module: LightningModule, callbacks: list[Callback], hooks: tuple[str, ...]) -> bool:
    """Whether the module, or a callback that is not of this library, overrides one; ours work on the optimizers'."""
    if any(_overrides(module, LightningModule, hook) for hook in hooks):
        return True
    theirs = [callback for callback in callbacks if _overrides(callback, Callback, hooks[0])]
    return any(not getattr(c, hooks[0]).__module__.startswith("lightning_turbo.") for c in theirs)


def _overrides(owner: Any, base: type, hook: str) -> bool:
    return hook in vars(owner) or getattr(type(owner), hook) is not getattr(base, hook)


def _inside(hook: Callable[..., Any], widened: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with widened():
            return hook(*args, **kwargs)

    return wrapped


def _clearing(weights: HalfWeights) -> Callable[..., None]:
    alive = weakref.ref(weights)  # a copy of the module may outlive the run

    @functools.wraps(nn.Module.zero_grad)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        type(self).zero_grad(self, set_to_none)
        own, weights = set(self.parameters()), alive()
        for master, weight in weights.by_master().items() if weights is not None else ():
            if weight in own and master.grad is not None:
                master.grad = None if set_to_none else torch.zeros_like(master.grad)

    return zero_grad
