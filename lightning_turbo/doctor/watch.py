"""Watches what a step does: torch functions, and a few Python functions.

It uses three means, none of which patches anything: a ``TorchFunctionMode`` sees the torch functions called from
Python, by the name that the user wrote; torch's sync debug mode reports which calls wait for a CUDA device; a profile
function sees calls of Python functions such as ``self.log``.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_turbo.doctor.calls import CallTable
from lightning_turbo.doctor.facts import Call, Site
from lightning_turbo.doctor.guard import Guard
from lightning_turbo.doctor.names import (
    copied_array,
    fetch,
    find_tensors,
    generic_name,
    is_training_norm,
    upload,
)
from lightning_turbo.doctor.source import Sources

__all__ = ["StepWatch", "report_waits"]

# The warnings of torch's sync debug mode.
WAIT = "called a synchronizing CUDA operation"
PROTOTYPE = "Synchronization debug mode is a prototype feature"


class StepWatch:
    """Watches steps and counts what they do, by the line of the user's code.

    A ``Session`` lets it watch from the fetch of a batch to the end of its step, and in ``validation_step``. While it
    watches, nothing is computed differently, because the mode passes every call on with its original arguments. At all
    other times, function mode, profile function and sync debug mode are the user's.

    Args:
        sources: Distinguishes the user's files from others.
        guard: Keeps errors of the watch away from the step.
        cuda: Whether the run is on a CUDA device.
        why_not: Called once, before the first step, for a reason not to use the mode; empty if there is none. A
            compiled model would fall back to eager mode under it.
    """

    def __init__(
        self,
        sources: Sources,
        guard: Guard,
        *,
        cuda: bool = False,
        why_not: Callable[[], str] = str,
    ) -> None:
        self.sources = sources
        self.guard = guard
        self.cuda = cuda
        # None if another profile function is set, which this one would replace.
        self.table = CallTable(self._note_call) if sys.getprofile() is None else None
        self.watched = 0
        self.reason = ""  # why the mode was not used
        self.anomaly = False  # whether autograd's anomaly detection was on
        self.biases: set[int] = set()  # ids of the biases that a norm cancels
        # Seconds of torch's functions by the calling function, in steps and in batches of validation.
        self.computed: dict[str, dict[tuple[str, str], float]] = {"steps": {}, "validation": {}}
        self.validated = 0  # watched batches of validation
        self._part = "steps"
        self._why_not: Callable[[], str] | None = why_not
        self._mode = _Functions(self)
        self._counts: dict[tuple[str, str, Site, str], list[Any]] = {}
        self._started: ExitStack | None = None
        self._calling = 0  # the thread of the current call
        self._waited = False  # whether it has waited for the device

    def begin_step(self) -> None:
        """Watch the step whose batch has arrived."""
        # Starting inside ``training_step`` would end contexts out of order with those that the user enters there.
        self.anomaly = torch.is_anomaly_enabled()
        self._part = "steps"
        self.resume()

    def end_step(self) -> None:
        """Stop, and count the step."""
        if self._started is not None:
            self.pause()
            self.watched += 1

    def begin_validation(self) -> None:
        """Watch a batch of validation, for the time of torch's functions alone."""
        self._part = "validation"
        self.resume()

    def end_validation(self) -> None:
        """Stop, and count the batch."""
        if self._started is not None:
            self.pause()
            self.validated += 1

    def resume(self) -> None:
        """Start or continue watching; after an error nothing of it remains."""
        if self._started is not None:
            return
        if self._why_not is not None:
            self.reason, self._why_not = self._why_not(), None
        with ExitStack() as started:
            if self.cuda:
                started.enter_context(report_waits(self._note_wait))
            if not self.reason:
                started.enter_context(self._mode)
            if self.table is not None and sys.getprofile() is None:
                sys.setprofile(self.table)
            self._started = started.pop_all()

    def pause(self) -> None:
        """Stop watching until ``resume``. No effect if it is not watching."""
        if self._started is None:
            return
        if self.table is not None and sys.getprofile() is self.table:
            sys.setprofile(None)
            self.table.end()
        started, self._started = self._started, None
        started.close()

    def calls(self) -> tuple[Call, ...]:
        """Return what was seen, summed up by kind, name, line and library."""
        return tuple(
            Call(kind=kind, name=name, site=site, within=within, count=count, steps=len(steps), seconds=seconds)
            for (kind, name, site, within), (count, steps, seconds) in self._counts.items()
        )

    def note(self, kind: str, name: str, site: Site | None, seconds: float = 0.0, within: str = "") -> None:
        """Count one event at ``site``; without a site it is not the user's doing."""
        if site is not None and self._part == "steps":
            entry = self._counts.setdefault((kind, name, site, within), [0, set(), 0.0])
            entry[0] += 1
            entry[1].add(self.watched)
            entry[2] += seconds

    def _note_call(self, kind: str, name: str, caller: FrameType | None) -> None:
        self.guard.note(self._note_python, kind, name, caller)

    def _note_python(self, kind: str, name: str, caller: FrameType | None) -> None:
        self.note(kind, name, self.sources.site(caller))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Call a torch function and record what it does."""
        self._calling = threading.get_ident()
        self._waited = False
        start = time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            self._calling = 0
        seconds = time.perf_counter() - start
        code = frame.f_code
        if self.sources.owns_file(code.co_filename):
            sums, key = self.computed[self._part], (code.co_filename, code.co_name)
            sums[key] = sums.get(key, 0.0) + seconds
        self.guard.note(self._note_torch, getattr(func, "__name__", ""), args, kwargs, result, frame, seconds)
        return result

    def _note_torch(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, frame: FrameType, seconds: float
    ) -> None:
        tensors = find_tensors(args, kwargs)
        judge = self._judge_on_cuda if self.cuda else self._judge_by_name
        kind, shown = judge(name, args, kwargs, tensors, result)
        if kind:
            within = self.sources.library(frame) if kind == "sync" else ""
            self.note(kind, shown, self.sources.site(frame), seconds, within)
        if is_training_norm(name, args, kwargs):
            self.biases |= _bias_before(tensors[0])

    def _judge_on_cuda(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], result: Any
    ) -> tuple[str, str]:
        """Return kind and name of what a call did in a run on CUDA, where torch reports whether it waited."""
        copied = copied_array(name, args, kwargs)
        uploaded = upload(name, args, kwargs)
        if not self._waited:
            return ("copied", copied) if copied else ("", "")
        # A wait is a copy to the device if a value arrived there and not all inputs were there before.
        arrived = name == "__setitem__" or (isinstance(result, torch.Tensor) and result.is_cuda)
        if uploaded or (arrived and not (tensors and all(each.is_cuda for each in tensors))):
            return "moved", uploaded or f".{name}(...)"
        return "sync", fetch(name, args, kwargs) or generic_name(name)

    def _judge_by_name(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], result: Any
    ) -> tuple[str, str]:
        """Return kind and name of what a call did in a run on the CPU, where nothing waits."""
        if copied := copied_array(name, args, kwargs):
            return "copied", copied
        if fetched := fetch(name, args, kwargs):
            return "sync", fetched
        uploaded = upload(name, args, kwargs)
        return ("moved", uploaded) if uploaded else ("", "")

    def _note_wait(self, frame: FrameType) -> None:
        """Record a wait that torch reported: ``call`` names it, unless it is in a backward hook or outside any call."""
        if self._calling == threading.get_ident():
            self._waited = True
        else:
            self.note("sync", "a call", self.sources.site(frame), within=self.sources.library(frame))


class _Functions(TorchFunctionMode):
    """Passes calls of torch functions to a ``StepWatch``, from ``resume`` to ``pause``, without changing them."""

    def __init__(self, watch: StepWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.call(func, args, kwargs or {}, sys._getframe(1))


def _bias_before(tensor: torch.Tensor) -> set[int]:
    """Return the id of the bias of the layer that computed ``tensor``, as recorded by autograd."""
    node: Any = tensor.grad_fn
    places = {"ConvolutionBackward0": 2, "AddmmBackward0": 0}
    if node is None or node.name() not in places:
        return set()
    bias = getattr(node.next_functions[places[node.name()]][0], "variable", None)
    return {id(bias)} - {id(None)}


@contextmanager
def report_waits(note: Callable[[FrameType], None]) -> Iterator[None]:
    """Call ``note`` with the frame of each call inside the block that waits for the device.

    Torch warns about such calls in the mode ``torch.cuda.set_sync_debug_mode("warn")``. Every warning is caught,
    however often its line has warned before; other warnings are shown as usual. Waits in other Python threads delay no
    step and are ignored; backward hooks run in torch's own threads, for which the step does wait.

    Afterwards the mode, the warning filters and ``showwarning`` are restored. A mode set by the user stays in effect:
    ``"error"`` still ends the run, and with ``"warn"`` the warnings are also shown.
    """
    before = torch.cuda.get_sync_debug_mode()
    thread = threading.current_thread()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def take(message: Warning | str, *where: Any, **more: Any) -> None:
            is_wait = WAIT in str(message)
            others = {each.ident for each in threading.enumerate() if each is not thread}
            if is_wait and threading.get_ident() not in others:
                note(_caller(sys._getframe(1)))
            if before or not is_wait:
                show(message, *where, **more)

        warnings.filterwarnings("ignore", PROTOTYPE)  # torch issues it once per process, when the mode is set
        warnings.filterwarnings("always", WAIT)
        warnings.showwarning = take
        torch.cuda.set_sync_debug_mode(before or "warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _caller(frame: FrameType) -> FrameType:
    """Return the innermost frame outside Python's warnings module."""
    while str(frame.f_globals.get("__name__")) in ("warnings", "_py_warnings") and frame.f_back is not None:
        frame = frame.f_back
    return frame
