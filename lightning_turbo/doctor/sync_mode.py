"""Torch's own account of the calls that make the host wait for a CUDA device."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

__all__ = ["report_waits"]

WAIT = "called a synchronizing CUDA operation"
PROTOTYPE = "Synchronization debug mode is a prototype feature"


@contextmanager
def report_waits(note: Callable[[FrameType], None]) -> Iterator[None]:
    """Call ``note`` with the frame of each call that waits for the device while the block lasts.

    Torch warns of such calls in the mode ``torch.cuda.set_sync_debug_mode("warn")``. Each warning is taken, however
    often its line has warned before; others are shown as ever. What Python's other threads wait for delays no step, and
    is left out; hooks of the backward pass run in threads of torch's own, for which the step waits.

    Afterwards the mode, the filters and the function that shows warnings are those of before. A mode that the user has
    set stays: ``"error"`` still ends the run, and in ``"warn"`` the warnings are shown, too.
    """
    before, thread = torch.cuda.get_sync_debug_mode(), threading.current_thread()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def take(message: Warning | str, *where: Any, **more: Any) -> None:
            is_wait = WAIT in str(message)
            others = {each.ident for each in threading.enumerate() if each is not thread}
            if is_wait and threading.get_ident() not in others:
                note(_caller(sys._getframe(1)))
            if before or not is_wait:
                show(message, *where, **more)

        warnings.filterwarnings("ignore", PROTOTYPE)  # which torch says once a process, when the mode is set
        warnings.filterwarnings("always", WAIT)
        warnings.showwarning = take
        torch.cuda.set_sync_debug_mode(before or "warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _caller(frame: FrameType) -> FrameType:
    """Return the innermost frame outside of Python's module of warnings."""
    while str(frame.f_globals.get("__name__")) in ("warnings", "_py_warnings") and frame.f_back is not None:
        frame = frame.f_back
    return frame
