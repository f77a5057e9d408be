"""The Python functions that the doctor looks out for, recognised by their code, none of them replaced."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_turbo._lightning import LightningModule

if TYPE_CHECKING:
    from lightning_turbo.doctor.watch import Watch

__all__ = ["CallTable"]


class CallTable:
    """A profile function (see ``sys.setprofile``) that notes the calls of known functions."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self._began: dict[object, float] = {}
        self._scaled = False
        anomaly, profile = torch.autograd.set_detect_anomaly, torch.autograd.profiler.profile
        # Function -> kind, name, and whether the call counts, told by the values of its arguments.
        rows: list[tuple[Any, str, str, Callable[[dict[str, Any]], Any]]] = [
            (torch.cuda.empty_cache, "housekeeping", "torch.cuda.empty_cache()", _always),
            (torch.cuda.synchronize, "housekeeping", "torch.cuda.synchronize()", _always),
            (torch.autograd.gradcheck, "gradcheck", "gradcheck", _always),
            (torch.autograd.gradgradcheck, "gradcheck", "gradgradcheck", _always),
            (torch.autograd.detect_anomaly.__init__, "anomaly", "torch.autograd.detect_anomaly", _always),
            (anomaly.__init__, "anomaly", "torch.autograd.set_detect_anomaly(True)", lambda given: given["mode"]),
            (profile.__init__, "profiler", "torch.autograd.profiler.profile", _always),
            (torch.profiler.profile.__init__, "profiler", "torch.profiler.profile", _always),
            (LightningModule.log, "log", "", lambda given: given["prog_bar"] and given["on_step"] is not False),
            (torch.optim.Optimizer.zero_grad, "kept gradients", "zero_grad(set_to_none=False)", _keeps),
            (nn.Module.zero_grad, "kept gradients", "zero_grad(set_to_none=False)", _keeps),
            (nn.utils.clip_grad_norm_, "scaled clip", "clip_grad_norm_", self._is_scaled),
            (nn.utils.clip_grad_value_, "scaled clip", "clip_grad_value_", self._is_scaled),
            (LightningModule.clip_gradients, "scaled clip", "clip_gradients", self._is_scaled),
            (torch.amp.GradScaler.scale, "", "", lambda given: self._set_scaled(True)),
            (torch.amp.GradScaler.unscale_, "", "", lambda given: self._set_scaled(False)),
        ]
        self._rows = {_code(function): (kind, name, counts) for function, kind, name, counts in rows}
        self._norm, self._log_dict = _code(nn.utils.clip_grad_norm_), _code(LightningModule.log_dict)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Note one event of the interpreter."""
        if self.watch is None:
            return
        if event == "call" and frame.f_code in self._rows:
            self._began[frame] = time.perf_counter()
        elif event == "return" and frame in self._began:
            self._end(frame, time.perf_counter() - self._began.pop(frame))
        elif arg is gc.collect and event == "c_call":
            self._began[arg] = time.perf_counter()
        elif arg is gc.collect and arg in self._began:
            self._note("housekeeping", "gc.collect()", frame, time.perf_counter() - self._began.pop(arg))

    def end_step(self) -> None:
        """Forget what holds for one step only."""
        self._began.clear()
        self._scaled = False

    def _end(self, frame: FrameType, seconds: float) -> None:
        kind, name, counts = self._rows[frame.f_code]
        given, caller = frame.f_locals, frame.f_back
        if caller is not None and caller.f_code is self._log_dict:
            caller = caller.f_back
        if counts(given):
            self._note(kind, name or str(given["name"]), caller, seconds)
        elif frame.f_code is self._norm and given.get("grads") == [] and _trains(given["parameters"]):
            self._note("empty clip", name, caller, seconds)

    def _note(self, kind: str, name: str, caller: FrameType | None, seconds: float) -> None:
        # What torch does for itself, such as its compiler cleaning up, is no habit of the user's.
        by_torch = caller is not None and str(caller.f_globals.get("__name__")).startswith("torch.")
        if self.watch is not None and not (by_torch and kind == "housekeeping"):
            self.watch.note(kind, name, self.watch.sources.site(caller), seconds)

    def _is_scaled(self, given: dict[str, Any]) -> bool:
        return self._scaled

    def _set_scaled(self, scaled: bool) -> None:
        self._scaled = scaled


def _trains(parameters: Iterable[Any]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)  # frozen ones have no gradient to clip


def _always(given: dict[str, Any]) -> bool:
    return True


def _keeps(given: dict[str, Any]) -> bool:
    return not given["set_to_none"]


def _code(function: Any) -> CodeType:
    """The code of a function, below its decorators."""
    return inspect.unwrap(function).__code__
