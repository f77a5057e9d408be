"""What the step does: torch's functions, and a few Python functions.

Two means, neither of which patches anything: a ``TorchFunctionMode`` sees what Python asks of torch, by the name that
the user wrote; a profile function sees calls of Python functions such as ``self.log``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_turbo.doctor.calls import CallTable
from lightning_turbo.doctor.facts import Call, Site
from lightning_turbo.doctor.origins import Origins, find_tensors
from lightning_turbo.doctor.source import Sources

__all__ = ["Watch"]

# Functions that fetch a value to the host, and how the user would write them.
_NAMES = {
    "__array__": "numpy.asarray(tensor)",
    "__bool__": "`if tensor`",
    "__complex__": "complex(tensor)",
    "__contains__": "`x in tensor`",
    "__float__": "float(tensor)",
    "__format__": "a tensor in an f-string",
    "__getitem__": "tensor[mask]",
    "__index__": "a tensor as an index of a list",
    "__int__": "int(tensor)",
    "__repr__": "print(tensor)",
    "__setitem__": "tensor[mask] = values",
    "cpu": ".cpu()",
    "item": ".item()",
    "numpy": ".numpy()",
    "one_hot": "one_hot without num_classes",
    "repeat_interleave": "repeat_interleave without output_size",
    "to": ".to('cpu')",
    "tolist": ".tolist()",
    "where": "torch.where with one argument",
    **{
        name: f"torch.{name}"
        for name in (
            *("allclose", "argwhere", "bincount", "equal", "gaussian_nll_loss", "is_nonzero", "masked_select"),
            *("nonzero", "unique", "unique_consecutive"),
        )
    },
}


class Watch:
    """Watches steps and counts what they do, by the line of the user's own code.

    Nothing is computed differently while it watches: the mode calls on with the very arguments it was given.

    Args:
        sources: Tells the user's own files from others.
        cuda: Whether the run is on a CUDA device.
    """

    def __init__(self, sources: Sources, *, cuda: bool = False) -> None:
        self.sources, self.cuda = sources, cuda
        self.table = CallTable(self._note_call)
        self.inside = True  # whether to use the mode; a compiled model would fall back to eager under it
        self.traced = sys.getprofile() is None
        self.watched = 0
        self.biases: set[int] = set()  # ids of those that a batch norm takes away
        self.origins = Origins(cuda)
        self._mode = _Functions(self)
        self._counts: dict[tuple[str, str, Site, str], list[Any]] = {}
        self._started: ExitStack | None = None

    def resume(self) -> None:
        """Begin to watch, or continue; an error leaves nothing of it behind."""
        if self._started is not None:
            return
        with ExitStack() as started:
            if self.inside:
                started.enter_context(self._mode)
            if self.traced and sys.getprofile() is None:
                sys.setprofile(self.table)
            self._started = started.pop_all()

    def pause(self) -> None:
        """Stop watching until ``resume``; does nothing if it does not watch."""
        if self._started is None:
            return
        if sys.getprofile() is self.table:
            sys.setprofile(None)
        started, self._started = self._started, None
        started.close()

    def end_step(self) -> None:
        """Count the step that was watched as finished."""
        self.watched += 1
        self.origins = Origins(self.cuda)
        self.table.scaled = False

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

    def _note_call(self, kind: str, name: str, caller: FrameType | None) -> None:
        # log_dict calls log: of the progress bar's values the line is beyond Lightning's own.
        self.note(kind, name, self.sources.site(caller, through=kind == "log"))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Call a function of torch and note what it does."""
        name, tensors = getattr(func, "__name__", ""), find_tensors(args, kwargs)
        fetches = _fetches(name, args, kwargs) and not self.origins.are_on_host(tensors)
        start = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        if fetches:
            self.note("sync", _NAMES[name], self.sources.site(frame), seconds, self.sources.library(frame))
        if isinstance(result, torch.Tensor) and self.origins.follow(name, args, kwargs, tensors, result):
            self.note("moved", f".{name}(...)", self.sources.site(frame))
        if name == "batch_norm" and _argument(5, "training", args, kwargs):
            self.biases |= _bias_before(tensors[0])
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.call(func, args, kwargs or {}, sys._getframe(1))


def _argument(position: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _fetches(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call fetches values to the host, or would with tensors on a GPU."""
    return bool(args) and name in _NAMES and (name not in _CONDITIONS or _CONDITIONS[name](args, kwargs))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _scatters(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return _has_mask(args[1]) and isinstance(args[2], torch.Tensor) and args[2].numel() > 1


def _repeats_by_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    repeats = _argument(1, "repeats", args, kwargs, args[0])
    return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None


def _leaves_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    target = _argument(1, "device", args, kwargs)
    if kwargs.get("non_blocking") or not args[0].is_cuda:
        return False
    target = target.device if isinstance(target, torch.Tensor) else target
    return isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"


_CONDITIONS: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {
    "__getitem__": lambda args, kwargs: _has_mask(args[1]),
    "__setitem__": _scatters,
    "one_hot": lambda args, kwargs: _argument(1, "num_classes", args, kwargs, -1) == -1,
    "repeat_interleave": _repeats_by_tensor,
    "to": _leaves_cuda,
    "where": lambda args, kwargs: len(args) + len(kwargs) == 1,
}


def _bias_before(tensor: torch.Tensor) -> set[int]:
    """Return the id of the bias of the convolution that put out ``tensor``, as autograd recorded it."""
    node: Any = tensor.grad_fn
    if node is None or node.name() != "ConvolutionBackward0":
        return set()
    bias = getattr(node.next_functions[2][0], "variable", None)
    return {id(bias)}
