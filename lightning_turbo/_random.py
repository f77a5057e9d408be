"""The global RNGs of torch, Python and NumPy: read, set, and left as they were."""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "changed_generators",
    "same_random_numbers",
    "set_shared_state",
    "shared_state",
    "torch_state",
    "uncollected",
]

_reading = threading.RLock()


def shared_state() -> dict[str, Any]:
    """Return the states of the global RNGs of torch (CPU), Python and, if imported, NumPy.

    Tensors and plain Python objects only, so that a checkpoint that holds one loads with ``weights_only=True``.
    """
    state: dict[str, Any] = {"torch": torch_state(), "random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        if kind == "MT19937":  # a program may have exchanged it for a generator that has no such state
            state["numpy"] = [torch.from_numpy(keys.astype("int64")), *rest]
    return state


def torch_state() -> torch.Tensor:
    """Return the state of torch's generator on the CPU."""
    with uncollected():
        return torch.get_rng_state()


@functools.cache
def _guard_forks() -> None:
    """Let no worker process begin with the lock held and without a collector."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release)


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from running while states of torch's generators are read.

    It may let another thread go on, which would then wait for the generator and hold the interpreter's lock, for ever.
    """
    _guard_forks()
    with _reading:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def set_shared_state(state: dict[str, Any]) -> None:
    """Set the global RNGs to a state that ``shared_state`` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["random"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        keys, *rest = state["numpy"]
        numpy.random.set_state(("MT19937", keys.numpy(), *rest))


def changed_generators(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the global RNGs that differ between two results of ``shared_state``."""
    names = [] if torch.equal(before["torch"], after["torch"]) else ["torch"]
    if before["random"] != after["random"]:
        names.append("random")
    old, new = before.get("numpy"), after.get("numpy")
    if old is not None and new is not None and (old[1:] != new[1:] or not torch.equal(old[0], new[0])):
        names.append("numpy.random")
    return names


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Leave the global RNGs as they were, whatever is drawn from them inside."""
    state = shared_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            set_shared_state(state)
