"""The Python functions that the doctor watches, recognized by their code objects without replacing them."""

from __future__ import annotations

import gc
import inspect
import io
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

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
    # Functions in which the step waits: timed until they return.
    (DataLoader.__iter__, "wait", "iter(DataLoader)"),
    (_BaseDataLoaderIter.__next__, "wait", "next(DataLoader)"),
    (torch.load, "wait", "torch.load"),
    (np.load, "wait", "numpy.load"),
    (subprocess.Popen.wait, "wait", "a process"),
    (subprocess.Popen.communicate, "wait", "a process"),
]
# The same for C functions.
_BUILTINS: dict[Any, str] = {
    time.sleep: "time.sleep",
    io.open: "open",
    os.read: "os.read",
    os.waitpid: "os.waitpid",
    select.select: "select.select",
    np.fromfile: "numpy.fromfile",
}
_METHODS = {
    "_io": {"read", "read1", "readinto", "readline", "readlines", "readall"},
    "_socket": {"accept", "connect", "recv", "recv_into", "sendall"},
    "select": {"poll"},
    "_thread": {"acquire", "__enter__"},
    "_queue": {"get"},
}
"""C modules -> methods of their classes that wait."""
TIMED = ("wait", "metric")
SHORTEST = 1e-4
"""Shorter waits, in seconds, do not count: a free lock, a buffered line."""


class CallTable:
    """A profile function (see ``sys.setprofile``) that records the calls of known functions.

    A ``StepWatch`` installs it for the duration of a step and removes it. At most one timed call is open at a time;
    calls inside it do not count separately.

    Args:
        note: Called with the kind, the name, the caller's frame and the seconds.
    """

    def __init__(self, note: Callable[[str, str, FrameType | None, float], None]) -> None:
        self.note = note
        self.scaled = False  # whether gradients currently carry a loss scale
        # Unwrapped, because decorators hide the function whose code actually runs.
        self._rows = {inspect.unwrap(each).__code__: (kind, name) for each, kind, name in _FUNCTIONS}
        self._rows |= _metric_rows()
        # The timed call: frame, C function if it is one, kind, name and start time.
        self._open: tuple[FrameType, Any, str, str, float] | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Record one event of the interpreter."""
        if self._open is not None:
            self._close(frame, event, arg)
        elif event == "call" and frame.f_code in self._rows:
            self._note_call(frame, *self._rows[frame.f_code])
        elif event == "c_call":
            if arg is gc.collect:
                self._note("housekeeping", "gc.collect()", frame)
            elif name := _name_of_wait(arg):
                self._open = (frame, arg, "wait", name, time.perf_counter())

    def end(self) -> None:
        """Discard an open call, because the step is over."""
        self._open = None
        self.scaled = False

    def _close(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._open is None or frame is not self._open[0]:
            return
        opened, function, kind, name, begun = self._open
        ended = event == "return" if function is None else event in ("c_return", "c_exception")
        if not ended:
            return
        self._open = None
        seconds = time.perf_counter() - begun
        if seconds >= SHORTEST:
            self._note(kind, name, opened.f_back if function is None else opened, seconds)

    def _note_call(self, frame: FrameType, kind: str, name: str) -> None:
        given = frame.f_locals
        # Clipping is judged by the more recent of the two: gradients of a scaled loss are scaled until ``unscale_``.
        if kind in TIMED:
            shown = name or type(given.get("self")).__name__
            self._open = (frame, None, kind, shown, time.perf_counter())
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


def _name_of_wait(function: Any) -> str:
    """Return how the user writes a C function that waits, or an empty string for other functions."""
    try:
        if name := _BUILTINS.get(function, ""):
            return name
    except TypeError:  # unhashable, so none of them
        return ""
    owner = type(getattr(function, "__self__", None))
    name = getattr(function, "__name__", "")
    return f"{owner.__name__}.{name}" if name in _METHODS.get(owner.__module__, ()) else ""


def _metric_rows() -> dict[Any, tuple[str, str]]:
    """Return the code object with which torchmetrics computes a metric, if it is imported."""
    module = sys.modules.get("torchmetrics.metric")
    if module is None:
        return {}
    codes = (each for each in module.Metric._wrap_compute.__code__.co_consts if inspect.iscode(each))
    return {code: ("metric", "") for code in codes if code.co_name == "wrapped_func"}
