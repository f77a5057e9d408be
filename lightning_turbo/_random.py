"""The global RNGs of torch, Python and NumPy: read, set, and left as they were."""

from __future__ import annotations

import ctypes
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
    "attributes_of",
    "changed_generators",
    "generator_state",
    "generators_at",
    "generators_in",
    "is_a",
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
MOST_OBJECTS = 10_000
MOST_PARTS = 256

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
    the states are compared at each line of Python code, when it is reached for the first and for the second time: a
    line between the setting and the putting back finds other states than before. Events of calls would not do, because
    NumPy's functions cause none. Under a debugger, which traces too, states are compared at the end alone.

    Args:
        held: Generators that the dataset holds, as ``generators_in`` returns them.
        lines: How many lines are looked at; 0 for the states at the end alone. Whoever runs more of them counts as one
            that may draw.

    Attributes:
        drew: What was drawn from, in words, after the ``with``; empty if nothing was.
        found: The same as a clause, also of a batch that ran more lines than are looked at; empty if it drew nothing.
    """

    LINES = 200_000
    LINE_SECONDS = 2.5e-7  # what it takes to look at one
    VISITS = 2  # at which the states are compared, for each line

    def __init__(self, held: Sequence[Any] = (), *, lines: int = LINES) -> None:
        self.drew: list[str] = []
        self._held = held
        self._names: set[str] = set()  # of the global RNGs that were drawn from
        self._left = lines
        self._limit = lines
        self._traces: dict[types.CodeType, Any] = {}  # what is called at the lines of each function

    @property
    def found(self) -> str:
        """What was found out, as a clause."""
        if self.drew:
            return f"draws from {' and '.join(self.drew)}"
        return "" if self._left >= 0 else f"runs more than {self._limit} lines of Python, so that a draw may go unseen"

    def __enter__(self) -> GeneratorWatch:
        self._before = shared_state()
        self._own = [generator_state(each) for each in self._held]
        self._snapshot = _Snapshot()
        self._is_tracing = self._left > 0 and sys.gettrace() is None
        if self._is_tracing:
            sys.settrace(self._enter_function)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_tracing:
            sys.settrace(None)
        self._traces.clear()  # they refer to this object
        self._look()
        if self._names:
            names = sorted(self._names, key=NAMES.index)
            self.drew.append(f"the global RNG of {' and '.join(names)}, which the model may use too")
        if not same_states(self._own, [generator_state(each) for each in self._held]):
            self.drew.append("a random generator that the dataset holds")

    def _enter_function(self, frame: Any, *event: Any) -> Any:
        """Return what is to be called at the lines of a function; ``None`` if these are not looked at."""
        code = frame.f_code
        if code not in self._traces:
            module = frame.f_globals.get("__name__", "")
            is_quiet = module.partition(".")[0] in QUIET and module != SEEDING
            # What quiet ones set, the next line of the dataset's code shows.
            self._traces[code] = None if is_quiet else self._tracer()
        return self._traces[code]

    def _tracer(self) -> Any:
        visits: dict[int, int] = {}

        def trace(frame: Any, *event: Any) -> Any:
            self._left -= 1
            line = frame.f_lineno
            count = visits.get(line, 0)
            if count < self.VISITS:
                visits[line] = count + 1
                if not self._snapshot.holds():
                    self._look()
            # Where all of them are drawn from, nothing is left to find.
            if self._left < 0 or len(self._names) == len(self._before):
                sys.settrace(None)
                return None
            return frame.f_trace  # this function, which would be in a cycle of references if it named itself

        return trace

    def _look(self) -> None:
        self._names.update(changed_generators(self._before, shared_state()))


class _Snapshot:
    """The states of the global RNGs when it is made, which are compared with those of now in microseconds."""

    MT19937 = ctypes.c_char * (625 * 4)  # 624 numbers, and the place among them

    def __init__(self) -> None:
        self._torch = torch_state()
        self._python = random.getstate()
        # Where NumPy keeps the numbers of its global generator, as it tells other compilers. A normal number that is
        # left over is not among them, but there is a new one only where numbers were drawn.
        generator = np.random.rand.__self__._bit_generator
        is_known = type(generator) is np.random.MT19937
        address = generator.ctypes.state_address if is_known else 0
        self._memory = self.MT19937.from_address(address) if is_known else None
        self._numpy = self._read_numpy()

    def _read_numpy(self) -> bytes:
        return b"" if self._memory is None else self._memory.raw

    def holds(self) -> bool:
        """Whether the states are still the same."""
        is_same = self._numpy == self._read_numpy() and torch.equal(self._torch, torch_state())
        return is_same and random.getstate() == self._python


def generators_in(owner: Any) -> list[Any]:
    """Return the random generators with a state of their own that an object and its parts hold.

    The global ones are not among them, nor those of the operating system.
    """
    return [part for part in parts_in(owner) if _has_own_state(part)]


def parts_in(owner: Any, is_whole: Callable[[Any], bool] = lambda part: False) -> list[Any]:
    """Return the parts of an object and theirs, nearest first: what it refers to, but for the items of long containers.

    Data are left out, and containers of many items: a list of a million files is not looked at. What is a generator, or
    whole by ``is_whole``, is not looked into. No part is asked for anything that its class may answer by code of its
    own: a proxy whose object is gone raises an error, and a lazy connection opens.
    """
    seen: dict[int, Any] = {}  # the objects themselves, because one that is gone leaves its id to another
    # Level by level, and not into whatever comes first: states are saved in this order, which has to be the same in a
    # process that resumes.
    level = [owner]
    while level and len(seen) < MOST_OBJECTS:
        new = {id(part): part for each in level for part in _parts_of(each) if id(part) not in seen}
        parts = {key: part for key, part in new.items() if not is_a(part, DATA)}
        seen.update(parts)
        level = [part for part in parts.values() if not (is_a(part, GENERATORS) or is_whole(part))]
    return list(seen.values())


def is_a(part: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether an object is of a class, by its type alone: ``isinstance`` asks a proxy for the class it pretends."""
    return issubclass(type(part), kinds)


def attributes_of(part: Any) -> dict[str, Any]:
    """Return the attributes of an object as the interpreter keeps them, whatever its class says of ``__dict__``."""
    for kind in type(part).__mro__:
        descriptor = vars(kind).get("__dict__")
        if type(descriptor) is types.GetSetDescriptorType:
            return descriptor.__get__(part) or {}
    return {}


def _has_own_state(each: Any) -> bool:
    shared = (torch.default_generator, random.random.__self__, np.random.rand.__self__)
    is_own = is_a(each, GENERATORS) and not is_a(each, random.SystemRandom)
    return is_own and all(each is not one for one in shared)


def same_states(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists of what ``generator_state`` returned are equal."""
    return len(some) == len(others) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(some, others, strict=True)
    )


def _parts_of(each: Any) -> list[Any]:
    # The length that the container has, not one that a class of its own computes.
    if any(is_a(each, kind) and kind.__len__(each) > MOST_PARTS for kind in CONTAINERS):
        return []
    if type(each) is types.FunctionType:  # its other parts lead to all that its module knows
        return [each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__]
    # Attributes first, however the interpreter keeps them: states are told apart by their order. Behind them what is in
    # slots, in a partial(), at a bound method.
    attributes = attributes_of(each)
    return [*attributes.values(), *(part for part in gc.get_referents(each) if part is not attributes)]
