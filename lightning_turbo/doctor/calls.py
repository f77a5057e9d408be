"""The Python functions that the doctor watches, recognized by their code objects without replacing them."""

from __future__ import annotations

import gc
import inspect
import sys
import time
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
SHORTEST = 1e-4
"""Metrics that take fewer seconds do not count."""


class CallTable:
    """A profile function (see ``sys.setprofile``) that records the calls of known functions.

    A ``StepWatch`` installs it for the duration of a step and removes it. At most one metric is open at a time; calls
    inside it do not count separately.

    Args:
        note: Called with the kind, the name, the caller's frame and the seconds.
    """

    def __init__(self, note: Callable[[str, str, FrameType | None, float], None]) -> None:
        self.note = note
        self.scaled = False  # whether gradients currently carry a loss scale
        # Unwrapped, because decorators hide the function whose code actually runs.
        self._rows = {inspect.unwrap(each).__code__: (kind, name) for each, kind, name in _FUNCTIONS}
        self._rows |= _metric_rows()
        self._open: tuple[FrameType, float] | None = None  # the metric that is being computed, and since when

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Record one event of the interpreter."""
        if self._open is not None:
            if event == "return" and frame is self._open[0]:
                self._close(frame, arg)
        elif event == "call" and frame.f_code in self._rows:
            self._note_call(frame, *self._rows[frame.f_code])
        elif event == "c_call":
            for function, kind, name in _BUILTINS:
                if arg is function:
                    self._note(kind, name, frame)

    def end(self) -> None:
        """Discard an open call, because the step is over."""
        self._open = None
        self.scaled = False

    def _close(self, frame: FrameType, result: Any) -> None:
        seconds = time.perf_counter() - self._open[1] if self._open is not None else 0.0
        self._open = None
        # A result with a graph is the loss, or a part of it.
        is_loss = isinstance(result, torch.Tensor) and result.requires_grad
        if seconds >= SHORTEST and not is_loss:
            self._note("metric", type(frame.f_locals.get("self")).__name__, frame.f_back, seconds)

    def _note_call(self, frame: FrameType, kind: str, name: str) -> None:
        given = frame.f_locals
        # Clipping is judged by the more recent of the two: gradients of a scaled loss are scaled until ``unscale_``.
        if kind == "metric":
            self._open = (frame, time.perf_counter())
        elif kind in ("scale", "unscale"):
            self.scaled = kind == "scale"
        elif kind == "log":
            if given["prog_bar"] and given["on_step"] is not False:
                self._note(kind, str(given["name"]), frame.f_back)
        elif kind != "clip" or self.scaled:
            self._note(kind, name, frame.f_back)

    def _note(self, kind: str, name: str, caller: FrameType | None, seconds: float = 0.0) -> None:
        # Calls by torch itself, such as its compiler collecting garbage, are not the user's.
        by_torch = caller is not None and str(caller.f_globals.get("__name__")).startswith("torch.")
        if not (by_torch and kind == "housekeeping"):
            self.note(kind, name, caller, seconds)


def _metric_rows() -> dict[Any, tuple[str, str]]:
    """Return the code object with which torchmetrics computes a metric, if it is imported."""
    module = sys.modules.get("torchmetrics.metric")
    if module is None:
        return {}
    codes = (each for each in module.Metric._wrap_compute.__code__.co_consts if inspect.iscode(each))
    return {code: ("metric", "") for code in codes if code.co_name == "wrapped_func"}
