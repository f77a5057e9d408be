"""The Python functions that the doctor looks out for, recognised by their code, none of them replaced."""

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
]


class CallTable:
    """A profile function (see ``sys.setprofile``) that notes the calls of known functions.

    Args:
        note: Called with the kind, the name and the frame of the caller.
    """

    def __init__(self, note: Callable[[str, str, FrameType | None], None]) -> None:
        self.note = note
        self.scaled = False  # whether gradients carry a loss scale now
        # Below its decorators: what is called by its name is the wrapper, and what runs is this.
        self._rows = {inspect.unwrap(each).__code__: (kind, name) for each, kind, name in _FUNCTIONS}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Note one event of the interpreter."""
        if event == "call" and frame.f_code in self._rows:
            self._note_call(frame, *self._rows[frame.f_code])
        elif event == "c_call" and arg is gc.collect:
            self._note("housekeeping", "gc.collect()", frame)

    def _note_call(self, frame: FrameType, kind: str, name: str) -> None:
        given = frame.f_locals
        # Clipping is judged by which of the two came last: gradients of a scaled loss are scaled until ``unscale_``.
        if kind in ("scale", "unscale"):
            self.scaled = kind == "scale"
        elif kind == "log":
            if given["prog_bar"] and given["on_step"] is not False:
                self._note(kind, str(given["name"]), frame.f_back)
        elif kind != "clip" or self.scaled:
            self._note(kind, name, frame.f_back)

    def _note(self, kind: str, name: str, caller: FrameType | None) -> None:
        # What torch does for itself, such as its compiler collecting garbage, is no habit of the user's.
        by_torch = caller is not None and str(caller.f_globals.get("__name__")).startswith("torch.")
        if not (by_torch and kind == "housekeeping"):
            self.note(kind, name, caller)
