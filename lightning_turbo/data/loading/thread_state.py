"""The modes of torch that belong to one thread, taken over by another."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading

import torch
from torch.autograd.grad_mode import inference_mode

__all__ = ["ThreadState", "add_thread_note"]

_NOTE = (
    "This was loaded in a background thread, as prefetching does. What belongs to the thread that made it does not "
    "work there: a database connection, an event loop, a signal handler, values of threading.local. Make it in "
    "__getitem__, once for each thread, or pass num_workers=1, so that a process loads in its main thread."
)

_here = threading.local()


class ThreadState:
    """The modes of the thread that makes this object: ``enter`` puts another thread into them, until that thread ends.

    Grad mode, inference mode, autocast, the default device, the CUDA device and its stream, and context variables.
    Without them a dataset that runs in the background would not see the ``no_grad`` or ``autocast`` of the loop that it
    feeds, and what it makes on the device would be read before it is written. Whoever starts a thread makes one for it.
    """

    def __init__(self) -> None:
        self.variables = contextvars.copy_context()
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        ]
        self.caches = torch.is_autocast_cache_enabled()
        self.device = _default_device()
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def enter(self) -> None:
        """Put the calling thread, which must be a new one, into these modes."""
        for variable, value in self.variables.items():
            variable.set(value)
        if self.stream is not None:
            torch.cuda.set_device(self.stream.device)
            torch.cuda.set_stream(self.stream)
        # The class itself, because Lightning replaces torch.inference_mode in the middle of a step. The mode ends with
        # this object, which has to end in the thread that it is for.
        _here.mode = inference_mode(True) if self.inference else contextlib.nullcontext()
        _here.mode.__enter__()
        torch._C._set_grad_enabled(self.grad)
        if _default_device() != self.device:
            self.device.__enter__()
        for kind, dtype in self.autocast:
            torch.autocast(kind, dtype=dtype, cache_enabled=self.caches).__enter__()


def _default_device() -> torch.device:
    return torch.empty(0).device  # torch 2.6's get_default_device() does not see ``with torch.device(...)``


def add_thread_note(error: BaseException | None) -> None:
    """Add to an error, once, that it was raised in a background thread: as a note or, before Python 3.11, in its text.

    Interrupts and ``StopIteration`` are not changed.
    """
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        return
    if sys.version_info >= (3, 11):
        if _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)
    elif error.args and isinstance(error.args[0], str) and _NOTE not in error.args[0]:
        error.args = (f"{error.args[0]}\n{_NOTE}", *error.args[1:])
