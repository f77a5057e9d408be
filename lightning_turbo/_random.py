"""The global RNGs of torch, Python and NumPy: read, set, and left as they were."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = [
    "GeneratorWatch",
    "changed_generators",
    "generator_state",
    "generators_at",
    "generators_in",
    "parts_in",
    "same_random_numbers",
    "same_states",
    "set_generator_state",
    "set_shared_state",
    "shared_state",
    "torch_state",
    "uncollected",
]

NAMES = ("torch", "random", "numpy.random")
GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
# What holds no generator, or leads away from the dataset.
DATA = (torch.Tensor, np.ndarray, str, bytes, int, float, type, types.ModuleType)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# Among about how many objects generators are looked for, and in containers of how many items at most.
MOST_OBJECTS, MOST_PARTS = 10_000, 256

# Packages whose own lines are not looked at: to seed torch once takes thousands of them, and an interrupt comes most
# likely at a line that is looked at, which is not to be one where this package lets go of a lock.
QUIET = {*sys.stdlib_module_names, "torch", "numpy", "lightning_turbo"}
# Of those, what seeds generators for a sample and puts them back, which only its own lines show.
SEEDING = "lightning_turbo.data.sample_seeds"

# Held while a state of torch's is read, and by a fork: a child is not to begin with it held and without a collector. A
# fork takes locks in the reverse order of their registration, so those of loaders before this one, as loads do.
_reading = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release)


def shared_state(held: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the states of the global RNGs of torch (CPU), Python and, if imported, NumPy, and of ``held`` ones.

    Tensors and plain Python objects only, so that a checkpoint that holds one loads with ``weights_only=True``.
    """
    state: dict[str, Any] = {"torch": torch_state(), "random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        if kind == "MT19937":  # a program may have exchanged it for a generator that has no such state
            state["numpy"] = [torch.from_numpy(keys.astype("int64")), *rest]
    if held:
        state["held"] = [generator_state(generator) for generator in held]
    return state


def torch_state() -> torch.Tensor:
    """Return the state of torch's generator on the CPU."""
    with uncollected():
        return torch.get_rng_state()


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from running while states of torch's generators are read.

    A collection lets another thread go on. If that asks for the same generator, which torch has locked, it waits with
    the interpreter's lock held, for ever.
    """
    with _reading:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def generator_state(generator: Any) -> torch.Tensor | str:
    """Return the state of one of ``GENERATORS``: a tensor for torch's, a text for the others."""
    if isinstance(generator, torch.Generator):
        with uncollected():
            return generator.get_state()
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
    elif isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    return json.dumps(state, default=np.ndarray.tolist)


def set_generator_state(generator: Any, state: torch.Tensor | str) -> None:
    """Set a generator to a state that ``generator_state`` returned of one of its kind."""
    if isinstance(state, torch.Tensor):
        with uncollected():
            generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, numbers, second = json.loads(state)
        generator.setstate((version, tuple(numbers), second))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(json.loads(state))
    else:
        generator.bit_generator.state = json.loads(state)


def set_shared_state(state: dict[str, Any], held: Sequence[Any] = ()) -> None:
    """Set the global RNGs, and ``held`` ones, to a state that ``shared_state`` returned, or a part of one."""
    torch.set_rng_state(state["torch"])
    if "random" in state:
        random.setstate(state["random"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        keys, *rest = state["numpy"]
        numpy.random.set_state(("MT19937", keys.numpy(), *rest))
    for generator, own in zip(held, state.get("held", ()), strict=False):
        set_generator_state(generator, own)


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
def same_random_numbers(held: Sequence[Any] = ()) -> Iterator[None]:
    """Leave the global RNGs, and ``held`` ones, as they were, whatever is drawn from them inside."""
    state = shared_state(held)
    try:
        yield
    finally:
        set_shared_state(state, held)


@contextmanager
def generators_at(state: dict[str, Any], held: Sequence[Any] = ()) -> Iterator[None]:
    """Draw inside as from ``state``, a result of ``shared_state``; the generators are as before afterwards."""
    with same_random_numbers(held):
        set_shared_state(state, held)
        yield


class GeneratorWatch:
    """Tells which random generators are used inside a ``with``: global ones, and those that a dataset holds.

    A generator that is set for a sample and put back shows in no state afterwards. So the calling thread is traced, and
    the states are compared line by line, for the first ``COMPARISONS`` lines of Python code. Under a debugger, which
    traces too, they are compared at the end alone.

    Attributes:
        drew: What was drawn from, in words, after the ``with``; empty if nothing was.
    """

    COMPARISONS = 2000

    def __init__(self, dataset: Any = None) -> None:
        self.drew: list[str] = []
        self._generators = [] if dataset is None else generators_in(dataset)
        self._names: set[str] = set()  # of the global RNGs that were drawn from
        self._left = self.COMPARISONS

    def __enter__(self) -> GeneratorWatch:
        self._before = shared_state()
        self._own = [generator_state(each) for each in self._generators]
        self._traces = sys.gettrace() is None
        if self._traces:
            sys.settrace(self._compare)
        return self

    def __exit__(self, *error: object) -> None:
        if self._traces:
            sys.settrace(None)
        self._look()
        if self._names:
            names = sorted(self._names, key=NAMES.index)
            self.drew.append(f"the global RNG of {' and '.join(names)}, which the model may use too")
        if not same_states(self._own, [generator_state(each) for each in self._generators]):
            self.drew.append("a random generator that the dataset holds")

    def _compare(self, frame: Any, *event: Any) -> Any:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in QUIET and module != SEEDING:
            return None  # what they set, the next line of the dataset's code shows
        # To read the states at each line is slow, and where all of them are drawn from, nothing is left to find.
        self._left -= 1
        if self._left < 0 or len(self._names) == len(self._before):
            sys.settrace(None)
            return None
        self._look()
        return self._compare

    def _look(self) -> None:
        self._names.update(changed_generators(self._before, shared_state()))


def generators_in(owner: Any) -> list[Any]:
    """Return the random generators with a state of their own that an object and its parts hold.

    The global ones are not among them, nor those of the operating system.
    """
    return [part for part in parts_in(owner) if _has_own_state(part)]


def parts_in(owner: Any, is_whole: Callable[[Any], bool] = lambda part: False) -> list[Any]:
    """Return the parts of an object and theirs, nearest first: what it refers to, but for the items of long containers.

    Data are left out, and containers of many items: a list of a million files is not looked at. What is a generator, or
    whole by ``is_whole``, is not looked into.
    """
    seen: dict[int, Any] = {}  # the objects themselves, because one that is gone leaves its id to another
    # Level by level, and not into whatever comes first: states are saved in this order, which has to be the same in a
    # process that resumes.
    level = [owner]
    while level and len(seen) < MOST_OBJECTS:
        new = {id(part): part for each in level for part in _parts_of(each) if id(part) not in seen}
        parts = {key: part for key, part in new.items() if not isinstance(part, DATA)}
        seen.update(parts)
        level = [part for part in parts.values() if not (isinstance(part, GENERATORS) or is_whole(part))]
    return list(seen.values())


def _has_own_state(each: Any) -> bool:
    shared = (torch.default_generator, random.random.__self__, np.random.rand.__self__)
    is_own = isinstance(each, GENERATORS) and not isinstance(each, random.SystemRandom)
    return is_own and all(each is not one for one in shared)


def same_states(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists of what ``generator_state`` returned are equal."""
    return len(some) == len(others) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(some, others, strict=True)
    )


def _parts_of(each: Any) -> list[Any]:
    if isinstance(each, CONTAINERS) and len(each) > MOST_PARTS:
        return []
    if isinstance(each, types.FunctionType):  # its other parts lead to all that its module knows
        return [each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__]
    # Attributes first, however the interpreter keeps them: states are told apart by their order. Behind them what is in
    # slots, in a partial(), at a bound method.
    attributes = getattr(each, "__dict__", {})
    return [*attributes.values(), *(part for part in gc.get_referents(each) if part is not attributes)]
