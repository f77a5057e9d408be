"""The Python functions that the doctor looks out for, recognised by their code, none of them replaced."""

from __future__ import annotations

import gc
import inspect
import sys
import time
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_turbo._lightning import LightningModule
from lightning_turbo.doctor.facts import Site

if TYPE_CHECKING:
    from lightning_turbo.doctor.watch import Watch

__all__ = ["CallTable", "GradientCalls"]


class CallTable:
    """A profile function (see ``sys.setprofile``) that notes the calls of known functions.

    Args:
        optimizers: The run's optimizers.
        schedulers: The run's learning-rate schedulers.
        automatic: Whether Lightning runs the optimization; then the order of steps is not the user's doing.
    """

    def __init__(self, optimizers: Iterable[Any] = (), schedulers: Iterable[Any] = (), automatic: bool = True) -> None:
        self.watch: Watch | None = None
        self._began: dict[FrameType, float] = {}
        self._collecting = 0.0
        self._scaled = False
        self._stepped = False
        self._early: list[tuple[str, Site | None]] = []
        self._timed: dict[CodeType, tuple[str, str]] = {
            _code(torch.cuda.empty_cache): ("housekeeping", "torch.cuda.empty_cache()"),
            _code(torch.cuda.synchronize): ("housekeeping", "torch.cuda.synchronize()"),
            _code(torch.autograd.gradcheck): ("gradcheck", "gradcheck"),
            _code(torch.autograd.gradgradcheck): ("gradcheck", "gradgradcheck"),
        }
        self._noted: dict[CodeType, Callable[[Watch, FrameType], None]] = {
            _code(LightningModule.log): self._log,
            _code(LightningModule.clip_gradients): self._clip,
            _code(torch.autograd.detect_anomaly.__init__): self._switch("anomaly", "torch.autograd.detect_anomaly"),
            _code(torch.autograd.set_detect_anomaly.__init__): self._set_anomaly,
            _code(torch.autograd.profiler.profile.__init__): self._switch(
                "profiler", "torch.autograd.profiler.profile"
            ),
            _code(torch.profiler.profile.__init__): self._switch("profiler", "torch.profiler.profile"),
            _code(nn.utils.clip_grad_norm_): self._clip,
            _code(nn.utils.clip_grad_value_): self._clip,
            _code(torch.optim.Optimizer.zero_grad): self._zero_grad,
            _code(nn.Module.zero_grad): self._zero_grad,
            _code(torch.amp.GradScaler.scale): self._scale,
            _code(torch.amp.GradScaler.unscale_): self._unscale,
        }
        self._norm = _code(nn.utils.clip_grad_norm_)
        self._log_dict = _code(LightningModule.log_dict)
        if not automatic:
            self._noted.update((_code(type(each).step), self._optimizer_step) for each in optimizers)
            self._noted.update((_code(type(each).step), self._scheduler_step) for each in schedulers)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Note one event of the interpreter."""
        watch = self.watch
        if watch is None:
            return
        if event == "call":
            if frame.f_code in self._timed:
                self._began[frame] = time.perf_counter()
            elif frame.f_code in self._noted:
                self._noted[frame.f_code](watch, frame)
        elif event == "return":
            if frame in self._began:
                seconds = time.perf_counter() - self._began.pop(frame)
                if not _by_torch(frame.f_back):
                    watch.note(*self._timed[frame.f_code], watch.sources.site(frame.f_back), seconds)
            elif (
                frame.f_code is self._norm
                and frame.f_locals.get("grads") == []
                and any(parameter.requires_grad for parameter in frame.f_locals["parameters"])
            ):
                watch.note("empty clip", frame.f_code.co_name, watch.sources.site(frame.f_back))
        elif arg is gc.collect and not _by_torch(frame):
            if event == "c_call":
                self._collecting = time.perf_counter()
            else:
                site = watch.sources.site(frame)
                watch.note("housekeeping", "gc.collect()", site, time.perf_counter() - self._collecting)

    def end_step(self) -> None:
        """Forget what holds for one step only."""
        self._began.clear()
        self._early.clear()
        self._scaled = self._stepped = False

    def _switch(self, kind: str, name: str) -> Callable[[Watch, FrameType], None]:
        return lambda watch, frame: watch.note(kind, name, watch.sources.site(frame.f_back))

    def _set_anomaly(self, watch: Watch, frame: FrameType) -> None:
        if frame.f_locals["mode"]:
            watch.note("anomaly", "torch.autograd.set_detect_anomaly(True)", watch.sources.site(frame.f_back))

    def _log(self, watch: Watch, frame: FrameType) -> None:
        given = frame.f_locals
        if given["prog_bar"] and given["on_step"] is not False:
            caller = frame.f_back
            if caller is not None and caller.f_code is self._log_dict:
                caller = caller.f_back
            watch.note("log", str(given["name"]), watch.sources.site(caller))

    def _clip(self, watch: Watch, frame: FrameType) -> None:
        if self._scaled:
            watch.note("scaled clip", frame.f_code.co_name, watch.sources.site(frame.f_back))

    def _zero_grad(self, watch: Watch, frame: FrameType) -> None:
        if not frame.f_locals["set_to_none"]:
            watch.note("kept gradients", "zero_grad(set_to_none=False)", watch.sources.site(frame.f_back))

    def _scale(self, watch: Watch, frame: FrameType) -> None:
        self._scaled = True

    def _unscale(self, watch: Watch, frame: FrameType) -> None:
        self._scaled = False

    def _optimizer_step(self, watch: Watch, frame: FrameType) -> None:
        self._stepped = True
        for name, site in self._early:
            watch.note("early schedule", name, site)
        self._early.clear()

    def _scheduler_step(self, watch: Watch, frame: FrameType) -> None:
        if not self._stepped:
            name = type(frame.f_locals.get("self")).__name__
            self._early.append((f"{name}.step()", watch.sources.site(frame.f_back)))


class GradientCalls:
    """Listens, from ``start`` to ``stop``, whether gradients are asked for.

    Attributes:
        heard: Whether they were, at any time so far.
    """

    def __init__(self) -> None:
        self.heard = False
        self._codes = {_code(torch.autograd.grad), _code(torch.autograd.backward)}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Hear one event of the interpreter."""
        if event == "call" and frame.f_code in self._codes:
            self.heard = True

    def start(self) -> None:
        """Begin to listen, where nobody else does."""
        if sys.getprofile() is None:
            sys.setprofile(self)

    def stop(self) -> bool:
        """Stop listening, and return whether it did."""
        listened = sys.getprofile() is self
        if listened:
            sys.setprofile(None)
        return listened


def _by_torch(frame: FrameType | None) -> bool:
    """Whether the code of a frame is torch's: its compiler cleans up after itself."""
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.")


def _code(function: Any) -> CodeType:
    """The code of a function, below its decorators."""
    return inspect.unwrap(function).__code__
