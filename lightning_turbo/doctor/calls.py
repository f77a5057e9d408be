"""The Python functions that the doctor looks out for, recognised by their code, none of them replaced."""

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

# Function -> kind and name; the name of log is that of the value.
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
    (ApexGradScaler._unscale, "unscale", ""),  # by which each of its ways to unscale ends
    # In which the step waits: timed until they return.
    (DataLoader.__iter__, "wait", "iter(DataLoader)"),
    (_BaseDataLoaderIter.__next__, "wait", "next(DataLoader)"),
    (torch.load, "wait", "torch.load"),
    (np.load, "wait", "numpy.load"),
    (subprocess.Popen.wait, "wait", "a process"),
    (subprocess.Popen.communicate, "wait", "a process"),
]
# The same of functions in C.
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
"""Modules of C, and the methods of their classes that wait."""
TIMED = ("wait", "metric")
SHORTEST = 1e-4
"""Seconds below which a wait does not count: a lock that is free, a line that was read ahead."""


class CallTable:
    """A profile function (see ``sys.setprofile``) that notes the calls of known functions.

    Who starts it: a ``Watch``, which sets it for the time of a step. What ends it: the watch, by setting none. What
    always holds: at most one timed call is open; what is called within it does not count by itself.

    Args:
        note: Called with the kind, the name, the frame of the caller and the seconds.
    """

    def __init__(self, note: Callable[[str, str, FrameType | None, float], None]) -> None:
        self.note = note
        self.scaled = False  # whether gradients carry a loss scale now
        # Below its decorators: what is called by its name is the wrapper, and what runs is this.
        self._rows = {inspect.unwrap(each).__code__: (kind, name) for each, kind, name in _FUNCTIONS}
        self._rows |= _metric_rows()
        # Of the timed call: its frame, the function in C if it is one, kind, name, and when it began.
        self._open: tuple[FrameType, Any, str, str, float] | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Note one event of the interpreter."""
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
        """Forget a call that is still open, as the step is over."""
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
        # Clipping is judged by which of the two came last: gradients of a scaled loss are scaled until ``unscale_``.
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
        # What torch does for itself, such as its compiler collecting garbage, is no habit of the user's.
        by_torch = caller is not None and str(caller.f_globals.get("__name__")).startswith("torch.")
        if not (by_torch and kind == "housekeeping"):
            self.note(kind, name, caller, seconds)


def _name_of_wait(function: Any) -> str:
    """Return how the user writes a function in C that waits; empty of others."""
    try:
        if name := _BUILTINS.get(function, ""):
            return name
    except TypeError:  # what cannot be hashed is none of them
        return ""
    owner = type(getattr(function, "__self__", None))
    name = getattr(function, "__name__", "")
    return f"{owner.__name__}.{name}" if name in _METHODS.get(owner.__module__, ()) else ""


def _metric_rows() -> dict[Any, tuple[str, str]]:
    """Return the code by which torchmetrics computes a metric, once it is imported."""
    module = sys.modules.get("torchmetrics.metric")
    if module is None:
        return {}
    codes = (each for each in module.Metric._wrap_compute.__code__.co_consts if inspect.iscode(each))
    return {code: ("metric", "") for code in codes if code.co_name == "wrapped_func"}
