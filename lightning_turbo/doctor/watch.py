"""What the step does: torch's functions, and a few Python functions.

Three means, none of which patches anything: a ``TorchFunctionMode`` sees what Python asks of torch, by the name that
the user wrote; torch's sync debug mode tells which of it waits for a CUDA device; a profile function sees calls of
Python functions such as ``self.log``.
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
from lightning_turbo.doctor.clock import Listener, Plan
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
from lightning_turbo.doctor.origins import Origins
from lightning_turbo.doctor.source import Sources

__all__ = ["Watch", "report_waits"]

# What torch warns of in its sync debug mode.
WAIT = "called a synchronizing CUDA operation"
PROTOTYPE = "Synchronization debug mode is a prototype feature"


ALL = Plan(0, 0, sys.maxsize)


class Watch(Listener):
    """Watches steps and counts what they do, by the line of the user's own code.

    Who starts it: the clock, with the first step that the plan watches. What ends it: that the plan watches no more.
    What always holds: nothing is computed differently while it watches, as the mode calls on with the very arguments
    it was given; and outside of the time from the fetch of a batch to the end of its step, function mode, profile
    function and sync debug mode are as the user has them.

    Args:
        sources: Tells the user's own files from others.
        guard: Keeps errors of the watch away from the step.
        plan: The steps to watch.
        cuda: Whether the run is on a CUDA device.
        why_not: Asked once, before the first of the steps, why none may be watched by the mode; empty if they may. A
            compiled model would fall back to eager under it.
    """

    def __init__(
        self,
        sources: Sources,
        guard: Guard,
        plan: Plan = ALL,
        *,
        cuda: bool = False,
        why_not: Callable[[], str] = str,
    ) -> None:
        self.sources, self.guard, self.plan, self.cuda = sources, guard, plan, cuda
        # None where another profile function is set, whose place this one would take.
        self.table = CallTable(self._note_call) if sys.getprofile() is None else None
        self.watched = 0
        self.reason = ""  # why the mode was not used
        self.anomaly = False  # whether autograd's anomaly detection was on
        self.biases: set[int] = set()  # ids of those that a norm takes away
        self.origins = Origins()
        self._why_not: Callable[[], str] | None = why_not
        self._mode = _Functions(self)
        self._counts: dict[tuple[str, str, Site, str], list[Any]] = {}
        self._started: ExitStack | None = None
        self._calling = 0  # the thread of the call that is under way
        self._waited = False  # whether it has waited for the device

    def fetched(self, step: int) -> None:
        """Begin, if the step is one of those to watch."""
        if self.plan.watches(step):
            # A watch that began within ``training_step`` would end in another order than what the user began there.
            self.anomaly = torch.is_anomaly_enabled()
            self.resume()

    def end_step(self, step: int) -> None:
        """End, and count the step."""
        if self._started is not None:
            self.pause()
            self.watched += 1

    def drop_step(self, step: int) -> None:
        """End, and count nothing."""
        self.pause()

    def resume(self) -> None:
        """Begin to watch, or continue; an error leaves nothing of it behind."""
        if self._started is not None:
            return
        if self._why_not is not None:
            self.reason, self._why_not = self._why_not(), None
        self.origins = Origins()
        with ExitStack() as started:
            if self.cuda:
                started.enter_context(report_waits(self._note_wait))
            if not self.reason:
                started.enter_context(self._mode)
            if self.table is not None and sys.getprofile() is None:
                sys.setprofile(self.table)
            self._started = started.pop_all()

    def pause(self) -> None:
        """Stop watching until ``resume``; does nothing if it does not watch."""
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
        """Count one thing that happened at ``site``; without a site it is not the user's doing."""
        if site is not None:
            entry = self._counts.setdefault((kind, name, site, within), [0, set(), 0.0])
            entry[0] += 1
            entry[1].add(self.watched)
            entry[2] += seconds

    def _note_call(self, kind: str, name: str, caller: FrameType | None, seconds: float) -> None:
        self.guard.note(self._note_python, kind, name, caller, seconds)

    def _note_python(self, kind: str, name: str, caller: FrameType | None, seconds: float) -> None:
        # log_dict calls log, and Lightning computes what was logged: the line is beyond Lightning's own.
        self.note(kind, name, self.sources.site(caller, through=kind in ("log", "metric")), seconds)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Call a function of torch and note what it does."""
        self._calling, self._waited = threading.get_ident(), False
        start = time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            self._calling = 0
        seconds = time.perf_counter() - start
        self.guard.note(self._note_torch, getattr(func, "__name__", ""), args, kwargs, result, frame, seconds)
        return result

    def _note_torch(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, frame: FrameType, seconds: float
    ) -> None:
        tensors = find_tensors(args, kwargs)
        judge = self._judge_on_cuda if self.cuda else self._judge_as_on_cuda
        kind, shown = judge(name, args, kwargs, tensors, result)
        if kind:
            within = self.sources.library(frame) if kind == "sync" else ""
            self.note(kind, shown, self.sources.site(frame), seconds, within)
        if is_training_norm(name, args, kwargs):
            self.biases |= _bias_before(tensors[0])

    def _judge_on_cuda(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], result: Any
    ) -> tuple[str, str]:
        """Return the kind and the name of what a call did, in a run on a CUDA device, where torch says if it waited."""
        copied, uploaded = copied_array(name, args, kwargs), upload(name, args, kwargs)
        if not self._waited:
            return ("copied", copied) if copied else ("", "")
        # A wait is a copy to the device if a value has arrived there and not all that went in was there before.
        arrived = name == "__setitem__" or (isinstance(result, torch.Tensor) and result.is_cuda)
        if uploaded or (arrived and not (tensors and all(each.is_cuda for each in tensors))):
            return "moved", uploaded or f".{name}(...)"
        return "sync", fetch(name, args, kwargs) or generic_name(name)

    def _judge_as_on_cuda(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], result: Any
    ) -> tuple[str, str]:
        """Return the same in a run on the CPU, as if its module and batches were on a GPU."""
        on_host = self.origins.are_on_host(tensors)
        if isinstance(result, torch.Tensor) and self.origins.follow(name, args, kwargs, tensors, result):
            return "moved", f".{name}(...)"
        if copied := copied_array(name, args, kwargs):
            return "copied", copied
        if on_host:
            return "", ""
        if fetched := fetch(name, args, kwargs):
            return "sync", fetched
        uploaded = upload(name, args, kwargs)
        return ("moved", uploaded) if uploaded else ("", "")

    def _note_wait(self, frame: FrameType) -> None:
        """Torch warns of a wait: ``call`` names it, unless it is in a hook of the backward pass or in none."""
        if self._calling == threading.get_ident():
            self._waited = True
        else:
            self.note("sync", "a call", self.sources.site(frame), within=self.sources.library(frame))


class _Functions(TorchFunctionMode):
    """Has a ``Watch`` call torch's functions, from its ``resume`` to its ``pause``, and changes none of them."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.call(func, args, kwargs or {}, sys._getframe(1))


def _bias_before(tensor: torch.Tensor) -> set[int]:
    """Return the id of the bias of the layer that put out ``tensor``, as autograd recorded it."""
    node: Any = tensor.grad_fn
    places = {"ConvolutionBackward0": 2, "AddmmBackward0": 0}
    if node is None or node.name() not in places:
        return set()
    bias = getattr(node.next_functions[places[node.name()]][0], "variable", None)
    return {id(bias)} - {id(None)}


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
