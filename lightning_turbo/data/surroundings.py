"""What a background thread has to take over from the thread that it works for."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator

import torch
from torch.autograd.grad_mode import inference_mode

__all__ = ["Surroundings", "short_switches"]

# Seconds. A thread that wakes up while another one runs Python waits this long for its turn; Python's default is
# 5 ms, in which a loader loses more than it loads.
SWITCH_INTERVAL = 1e-5

_lock = threading.Lock()
_holders = 0
_found = 0.0


class Surroundings:
    """The modes of torch that belong to one thread, taken in one thread and entered in another.

    Grad mode, inference mode, autocast, the default device, the CUDA device and its stream, and context variables.
    Without them a dataset that runs in the background would not see the ``no_grad`` or ``autocast`` of the loop that it
    feeds, and what it makes on the device would be read before it is written.
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

    def run(self, function: Callable[[], None]) -> None:
        """Call ``function`` in this thread as if it were called where this object was made."""
        self.variables.run(self._run, function)

    def _run(self, function: Callable[[], None]) -> None:
        if self.stream is not None:
            torch.cuda.set_device(self.stream.device)
            torch.cuda.set_stream(self.stream)
        with contextlib.ExitStack() as stack:
            # The classes themselves, because Lightning exchanges torch.no_grad and torch.inference_mode in mid-step.
            if self.inference:
                stack.enter_context(inference_mode(True))
            torch._C._set_grad_enabled(self.grad)
            if _default_device() != self.device:
                stack.enter_context(self.device)
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.caches))
            function()


def _default_device() -> torch.device:
    return torch.empty(0).device  # torch 2.6's get_default_device() does not see ``with torch.device(...)``


@contextlib.contextmanager
def short_switches() -> Iterator[None]:
    """Shorten the interpreter's switch interval while any thread is inside, and put the old one back after the last.

    A value that the program itself sets in the meantime is left alone.
    """
    global _holders, _found
    _guard_forks()
    with _lock:
        if _holders == 0:
            _found = sys.getswitchinterval()
            if _found > SWITCH_INTERVAL:
                sys.setswitchinterval(SWITCH_INTERVAL)
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders = max(0, _holders - 1)  # a thread that forked goes on in the child, where nobody is inside
            if _holders == 0:
                _put_back()


def _put_back() -> None:
    """Set the interval that was found, unless the program has set another."""
    if abs(sys.getswitchinterval() - SWITCH_INTERVAL) < 1e-9:
        sys.setswitchinterval(_found + 5e-7)  # Python cuts it off to whole microseconds


def _leave_behind() -> None:
    """In a forked process, which has none of the threads that are inside."""
    global _holders
    if _holders:
        _holders = 0
        _put_back()
    _lock.release()


@functools.cache
def _guard_forks() -> None:
    """Give forked processes the program's interval, and the lock free."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_leave_behind)
