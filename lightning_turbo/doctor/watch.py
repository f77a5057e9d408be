"""What the step does: torch's functions, the operations below them, and a few Python functions.

Three means, none of which patches anything: a ``TorchFunctionMode`` sees what Python asks of torch, by the name that
the user wrote; a ``TorchDispatchMode`` sees what the operations below do without being asked by name; a profile
function sees calls of Python functions such as ``self.log``.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_turbo.doctor.calls import CallTable
from lightning_turbo.doctor.facts import Call, Site
from lightning_turbo.doctor.origins import LAYERS, Origins, find_tensors
from lightning_turbo.doctor.source import Sources

__all__ = ["Watch"]

_ATEN = torch.ops.aten
_CAST = _ATEN._to_copy.default
# Operations that wait for the device, whichever function they are part of.
_SYNCS = {
    _ATEN._local_scalar_dense.default,
    _ATEN._unique2.default,
    _ATEN.bincount.default,
    _ATEN.equal.default,
    _ATEN.masked_select.default,
    _ATEN.nonzero.default,
    _ATEN.repeat_interleave.Tensor,
    _ATEN.unique_consecutive.default,
    _ATEN.unique_dim.default,
}
# Functions that fetch a value to the host, and how the user would write them.
_NAMES = {
    "__array__": "numpy.asarray(tensor)",
    "__bool__": "`if tensor`",
    "__complex__": "complex(tensor)",
    "__contains__": "`x in tensor`",
    "__float__": "float(tensor)",
    "__format__": "a tensor in an f-string",
    "__index__": "a tensor as an index of a list",
    "__int__": "int(tensor)",
    "__repr__": "print(tensor)",
    "cpu": ".cpu()",
    "item": ".item()",
    "masked_select": "masked_select",
    "nonzero": "nonzero",
    "numpy": ".numpy()",
    "tolist": ".tolist()",
    **{
        name: f"torch.{name}"
        for name in ("allclose", "argwhere", "equal", "is_nonzero", "unique", "unique_consecutive")
    },
}


@dataclass(slots=True)
class _Function:
    """One call of a function of torch."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    frame: FrameType
    seconds: float = 0.0


class Watch:
    """Watches steps and counts what they do, by the line of the user's own code.

    Nothing is computed differently while it watches: each mode calls on with the very arguments it was given.

    Args:
        sources: Tells the user's own files from others.
        cuda: Whether the run is on a CUDA device.
    """

    def __init__(self, sources: Sources, *, cuda: bool = False) -> None:
        self.sources, self.cuda = sources, cuda
        self.table = CallTable()
        self.inside = True  # whether to use the modes; a compiled model would fall back to eager under them
        self.traced = sys.getprofile() is None
        self.watched = self.operations = 0
        self.biases: dict[int, Site | None] = {}
        self.origins = Origins(cuda)
        self._functions, self._operations = _Functions(self), _Operations(self)
        self._counts: dict[tuple[str, str, Site, str], list[Any]] = {}
        self._backwards: list[tuple[str, Site | None, bool]] = []
        self._named, self._name = False, ""  # the function under way, and whether its waits are accounted for
        self._started: ExitStack | None = None

    def resume(self) -> None:
        """Begin to watch, or continue; an error leaves nothing of it behind."""
        if self._started is not None:
            return
        with ExitStack() as started:
            if self.inside:
                started.enter_context(self._functions)
            if self.traced and sys.getprofile() is None:
                self.table.watch = self
                sys.setprofile(self.table)
            self._started = started.pop_all()

    def pause(self) -> None:
        """Stop watching until ``resume``; does nothing if it does not watch."""
        if self._started is None:
            return
        self.table.watch = None
        if sys.getprofile() is self.table:
            sys.setprofile(None)
        started, self._started = self._started, None
        started.close()

    def end_step(self) -> None:
        """Count the step that was watched as finished."""
        for i, (name, site, retains) in enumerate(self._backwards):
            if retains:
                self.note("last retain" if i == len(self._backwards) - 1 else "retain", name, site)
        self.watched += 1
        self._backwards.clear()
        self.origins = Origins(self.cuda)
        self.table.end_step()

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

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Call a function of torch and note what it does."""
        name = getattr(func, "__name__", "")
        if name in ("backward", "grad") and not hasattr(func, "__self__"):
            self._note_backward(name, kwargs, frame)
            return func(*args, **kwargs)
        call = _Function(name, args, kwargs, find_tensors(args, kwargs), frame)
        on_host = bool(call.tensors) and all(map(self.origins.on_host, call.tensors))
        sync = None if on_host else _sync_name(name, args, kwargs)
        copied = _copied_kind(name, args)
        self._named, self._name = any((sync, copied, on_host)), name
        start = time.perf_counter()
        with self._operations:
            result = func(*args, **kwargs)
        call.seconds = time.perf_counter() - start
        if sync is not None:
            self._note_sync(sync, call, result)
        if copied:
            self.note("copy", f"torch.tensor(existing {copied})", self.sources.site(frame), call.seconds)
        if isinstance(result, torch.Tensor):
            self._follow(call, result)
        return result

    def _note_backward(self, name: str, kwargs: dict[str, Any], frame: FrameType) -> None:
        retains = bool(kwargs.get("retain_graph")) and not kwargs.get("create_graph")
        self._backwards.append((f".{name}()", self.sources.site(frame, through=True) if retains else None, retains))

    def _note_sync(self, sync: str, call: _Function, result: Any) -> None:
        site = self.sources.site(call.frame)
        if (
            not isinstance(call.args[0], torch.Tensor) or self.origins.fetched.get(call.args[0]) != site
        ):  # x.cpu().numpy() fetches once
            self.note("sync", sync, site, call.seconds, self.sources.library(call.frame))
        if call.name == "cpu" and site is not None and isinstance(result, torch.Tensor):
            self.origins.fetched[result] = site

    def _follow(self, call: _Function, result: torch.Tensor) -> None:
        """Note where the result of a call comes from, and what that says about the call."""
        name, args, kwargs = call.name, call.args, call.kwargs
        move = self.origins.follow(name, args, kwargs, call.tensors, result)
        if move is not None:
            self.note(move, f".{name}(...)", self.sources.site(call.frame))
        if name in LAYERS:
            self.origins.put_layer(args, kwargs, result, self.sources.site(call.frame))
        elif name == "batch_norm" and call.tensors and (kwargs.get("training") or (len(args) > 5 and args[5])):
            layer = self.origins.bias_before(call.tensors[0])
            if layer is not None:
                self.biases[id(layer[0])] = layer[1]

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation below a function of torch and note what it does."""
        result = func(*args, **kwargs)
        first = args[0] if args else None
        self.operations += 1
        if not self._named and self._waits_for_device(func, first, result):
            self._named = True
            shown = f"{self._name} (by {func.overloadpacket.__name__})"
            frame = sys._getframe(2)
            self.note("sync", shown, self.sources.site(frame), within=self.sources.library(frame))
        return result

    def _waits_for_device(self, func: Any, first: Any, result: Any) -> bool:
        if not self.cuda:
            return func in _SYNCS
        if not (isinstance(first, torch.Tensor) and first.is_cuda):
            return False
        return func in _SYNCS or (func is _CAST and isinstance(result, torch.Tensor) and not result.is_cuda)


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.function(func, args, kwargs or {}, sys._getframe(1))


class _Operations(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.operation(func, args, kwargs or {})


def _sync_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return what a call that fetches values would look like in the user's code, ``None`` if it fetches nothing."""
    if not args:
        return None
    if name == "where" and len(args) + len(kwargs) == 1:
        return "torch.where with one argument"
    if name == "__getitem__" and _has_mask(args[1]):
        return "tensor[mask]"
    if name == "__setitem__" and _has_mask(args[1]) and isinstance(args[2], torch.Tensor) and args[2].numel() > 1:
        return "tensor[mask] = values"
    if name == "to" and _leaves_cuda(args[0], args, kwargs):
        return ".to('cpu')"
    return _NAMES.get(name)


def _copied_kind(name: str, args: tuple[Any, ...]) -> str:
    """What ``torch.tensor`` copies although it is an array or a tensor already; empty for all else."""
    given = args[0] if name == "tensor" and args else None
    return "tensor" if isinstance(given, torch.Tensor) else "array" * isinstance(given, (np.ndarray, np.generic))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _leaves_cuda(tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    target = None if kwargs.get("non_blocking") else kwargs.get("device", args[1] if len(args) > 1 else None)
    if isinstance(target, torch.Tensor):
        target = target.device
    return tensor.is_cuda and isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"
