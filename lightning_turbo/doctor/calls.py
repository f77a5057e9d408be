"""The Python functions that the doctor watches, recognized by their code objects without replacing them."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from lightning_turbo._lightning import LightningModule
from lightning_turbo.amp.grad_scaler import ApexGradScaler

__all__ = ["CallTable"]

# Function, kind, name; the name for log is that of the logged value.
_FUNCTIONS: list[tuple[Any, str, str]] = [
    (torch.cuda.empty_cache, "housekeeping", "torch.cuda.empty_cache()"),
    (torch.cuda.synchronize, "housekeeping", "torch.cuda.synchronize()"),
    (torch.autograd.detect_anomaly.__init__, "anomaly", "torch.autograd.detect_anomaly"),
    (LightningModule.log, "log", ""),
    (nn.utils.clip_grad_norm_, "clip", "clip_grad_norm_"),
    (nn.utils.clip_grad_value_, "clip", "clip_grad_value_"),
    (LightningModule.clip_gradients, "clip", "clip_gradients"),
    (torch.amp.GradScaler.scale, "scale", ""),
    (torch.amp.GradScaler.unscale_, "unscale", ""),
    (ApexGradScaler._unscale, "unscale", ""),  # all its ways to unscale call this
]
# The same for C functions.
_BUILTINS = ((gc.collect, "housekeeping", "gc.collect()"), (print, "print", "print(...)"))


class CallTable:
    """A profile function (see ``sys.setprofile``) that records the calls of known functions.

    A ``StepWatch`` installs it for the duration of a step and removes it.

    Args:
        note: Called with the kind, the name and the caller's frame.
    """

    def __init__(self, note: Callable[[str, str, FrameType | None], None]) -> None:
        self.note = note
        self.scaled = False  # whether gradients currently carry a loss scale
        # Unwrapped, because decorators hide the function whose code actually runs.
        self._rows = {inspect.unwrap(each).__code__: (kind, name) for each, kind, name in _FUNCTIONS}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Record one event of the interpreter."""
        if event == "call" and frame.f_code in self._rows:
            self._note_call(frame, *self._rows[frame.f_code])
        elif event == "c_call":
            for function, kind, name in _BUILTINS:
                if arg is function:
                    self._note(kind, name, frame)

    def end(self) -> None:
        """Forget the loss scale, because the step is over."""
        self.scaled = False

    def _note_call(self, frame: FrameType, kind: str, name: str) -> None:
        given = frame.f_locals
        # Clipping is judged by the more recent of the two: gradients of a scaled loss are scaled until ``unscale_``.
        if kind in ("scale", "unscale"):
            self.scaled = kind == "scale"
        elif kind == "log":
            if given["prog_bar"] and given["on_step"] is not False:
                self._note(kind, str(given["name"]), _outside(frame))
        elif kind != "clip" or self.scaled:
            self._note(kind, name, frame.f_back)

    def _note(self, kind: str, name: str, caller: FrameType | None) -> None:
        # Calls by torch itself, such as its compiler collecting garbage, are not the user's.
        by_torch = caller is not None and str(caller.f_globals.get("__name__")).startswith("torch.")
        if not (by_torch and kind == "housekeeping"):
            self.note(kind, name, caller)


def _outside(frame: FrameType) -> FrameType | None:
    """Return the caller of a function from another file: ``log_dict`` calls ``log``."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename == frame.f_code.co_filename:
        caller = caller.f_back
    return caller
