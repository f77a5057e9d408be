"""What the step does: torch's functions, the operations below them, and a few Python functions.

Three means, none of which patches anything: a ``TorchFunctionMode`` sees what Python asks of torch, by the name that
the user wrote; a ``TorchDispatchMode`` sees what the operations below do without being asked by name; a profile
function sees calls of Python functions such as ``self.log``.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_turbo.doctor.calls import CallTable
from lightning_turbo.doctor.facts import Call, Site
from lightning_turbo.doctor.origins import LAYERS, Origins, tensors_in
from lightning_turbo.doctor.source import Sources
from lightning_turbo.doctor.syncs import SYNC_OPERATIONS, sync_name

__all__ = ["Watch"]

_CAST = torch.ops.aten._to_copy.default
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Watch:
    """Watches steps and counts what they do, by the line of the user's own code.

    Nothing is computed differently while it watches: each mode calls on with the very arguments it was given.

    Args:
        sources: Tells the user's own files from others.
        calls: The Python functions to look out for.
        cuda: Whether the run is on a CUDA device; then torch's sync debug mode is asked, too.
        inside: Whether to use the modes. A compiled model must not be watched from inside: it would fall back to
            eager.
    """

    def __init__(self, sources: Sources, calls: CallTable, *, cuda: bool = False, inside: bool = True) -> None:
        self.sources = sources
        self.table = calls
        self.cuda = cuda
        self.inside = inside
        self.watched = 0
        self.operations = self.casts = self.elements = 0
        self.traced = sys.getprofile() is None
        self._functions = _Functions(self)
        self._operations = _Operations(self)
        self._on = False
        self._counts: dict[tuple[str, str, Site | None], list[Any]] = {}
        self.origins = Origins(cuda)
        self._backwards: list[tuple[str, Site | None, bool]] = []
        self.biases: dict[int, Site | None] = {}
        self._named = False
        """Whether the function under way is known to fetch values, or has no reason to wait."""
        self._name = ""
        self._waits: list[warnings.WarningMessage] | None = None
        self._started = ExitStack()

    def resume(self) -> None:
        """Begin to watch, or go on; an error leaves nothing of it behind."""
        if self._on:
            return
        with ExitStack() as started:
            if self.inside:
                if self.cuda:
                    started.enter_context(self._listening())
                started.enter_context(self._functions)
            if self.traced and sys.getprofile() is None:
                self.table.watch = self
                sys.setprofile(self.table)
            self._started = started.pop_all()
        self._on = True

    def pause(self) -> None:
        """Stop watching until ``resume``; does nothing if it does not watch."""
        if not self._on:
            return
        self._on = False
        self.table.watch = None
        if sys.getprofile() is self.table:
            sys.setprofile(None)
        self._started.close()

    def end_step(self) -> None:
        """Count the step that was watched as finished."""
        for i, (name, site, retains) in enumerate(self._backwards):
            if retains:
                self.note("last retain" if i == len(self._backwards) - 1 else "retain", name, site)
        self.watched += 1
        self._backwards.clear()
        self.origins.clear()
        self.table.end_step()

    def calls(self) -> tuple[Call, ...]:
        """Return what was seen, summed up by kind, name and line."""
        return tuple(
            Call(kind=kind, name=name, site=site, count=count, steps=len(steps), seconds=seconds, confirmed=confirmed)
            for (kind, name, site), (count, steps, seconds, confirmed) in self._counts.items()
        )

    def note(
        self, kind: str, name: str, site: Site | None, seconds: float = 0.0, confirmed: bool | None = None
    ) -> None:
        """Count one thing that happened at ``site``; without a site it is not the user's doing."""
        if site is not None:
            entry = self._counts.setdefault((kind, name, site), [0, set(), 0.0, None])
            entry[0] += 1
            entry[1].add(self.watched)
            entry[2] += seconds
            entry[3] = confirmed if entry[3] is None else entry[3] or confirmed

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Call a function of torch and note what it does."""
        name = getattr(func, "__name__", "")
        if name in ("backward", "grad") and not hasattr(func, "__self__"):
            retains = bool(kwargs.get("retain_graph")) and not kwargs.get("create_graph")
            site = self.sources.site(frame, through=True) if retains else None
            self._backwards.append((f".{name}()", site, retains))
            return func(*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        on_host = bool(tensors) and all(self.origins.on_host(tensor) for tensor in tensors)
        sync = None if on_host or not args else sync_name(name, args, kwargs)
        copies = name == "tensor" and bool(args) and isinstance(args[0], (np.ndarray, np.generic, torch.Tensor))
        self._named = sync is not None or copies or on_host
        self._name = name
        before = len(self._waits) if self._waits is not None else 0
        start = time.perf_counter()
        with self._operations:
            result = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        if sync is not None:
            site = self.sources.site(frame)
            if self.origins.fetched_at(args[0]) != site:  # x.cpu().numpy() fetches once
                kind = "layer sync" if self.sources.in_a_layer(frame) else "sync"
                self.note(kind, sync, site, seconds, None if self._waits is None else len(self._waits) > before)
            if name == "cpu":
                self.origins.fetched(result, site)
        if copies:
            what = "tensor" if isinstance(args[0], torch.Tensor) else "array"
            self.note("copy", f"torch.tensor(existing {what})", self.sources.site(frame), seconds)
        if name == "binary_cross_entropy" and tensors and torch.is_autocast_enabled(tensors[0].device.type):
            self.note("bce", name, self.sources.site(frame))
        if isinstance(result, torch.Tensor):
            move = self.origins.moved(name, args, kwargs, tensors, result)
            if move is not None:
                self.note(move, f".{name}(...)", self.sources.site(frame))
            if name in LAYERS:
                self.origins.layer(args, kwargs, result, self.sources.site(frame))
            elif name == "batch_norm" and tensors and (kwargs.get("training") or (len(args) > 5 and args[5])):
                layer = self.origins.bias_before(tensors[0])
                if layer is not None:
                    self.biases[id(layer[0])] = layer[1]
        return result

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation below a function of torch and note what it does."""
        result = func(*args, **kwargs)
        first = args[0] if args else None
        self.operations += 1
        if isinstance(result, torch.Tensor):
            self.elements += result.numel()
            if func is _CAST and isinstance(first, torch.Tensor) and first.dtype != result.dtype:
                self.casts += {first.dtype, result.dtype} <= _FLOATS
        if not self._named:
            waits = func in SYNC_OPERATIONS and _on_device(first, self.cuda)
            if func is _CAST and self.cuda:
                waits = _on_device(first, True) and isinstance(result, torch.Tensor) and not result.is_cuda
            if waits:
                self._named = True
                shown = f"{self._name} (by {func.overloadpacket.__name__})"
                frame = sys._getframe(1)
                kind = "layer sync" if self.sources.in_a_layer(frame) else "sync"
                self.note(kind, shown, self.sources.site(frame))
        return result

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Let torch's sync debug mode warn of every wait, and keep what it says."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as heard:
            warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("warn")
            self._waits = heard
            try:
                yield
            finally:
                self._waits = None
                torch.cuda.set_sync_debug_mode(before)
        for warning in heard:
            if "synchronizing CUDA operation" not in str(warning.message):
                warnings.showwarning(
                    warning.message, warning.category, warning.filename, warning.lineno, warning.file, warning.line
                )


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


def _on_device(value: Any, cuda: bool) -> bool:
    return not cuda or (isinstance(value, torch.Tensor) and value.is_cuda)
