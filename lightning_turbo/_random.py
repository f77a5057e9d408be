"""The global RNGs of torch, Python and NumPy: read, set and restored."""

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
# Types that hold no generator, or that lead away from the dataset.
DATA = (torch.Tensor, np.ndarray, str, bytes, int, float, type, types.ModuleType)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# The search for generators ends after about this many objects and skips containers with more than this many items.
MOST_OBJECTS = 10_000
MOST_PARTS = 256

# Packages whose lines are not traced. Seeding torch alone runs thousands of lines. An interrupt most likely arrives at
# a traced line, and must not arrive where this package releases a lock.
QUIET = {*sys.stdlib_module_names, "torch", "numpy", "lightning_turbo"}
# Traced all the same: it seeds generators for a sample and restores them, which only its own lines show.
SEEDING = "lightning_turbo.data.sample_seeds"

# Held while a torch generator state is read, and across a fork, so that no child starts with the lock held and its
# garbage collector off. A fork takes locks in reverse order of registration: those of loaders before this one, like
# loads.
_reading = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release)


def shared_state(held: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the states of the global RNGs of torch (CPU), Python and NumPy, and of the ``held`` ones.

    A program may have given NumPy another bit generator than MT19937; its state is left out. Holds tensors and plain
    Python objects only, so that a checkpoint with it loads with ``weights_only=True``.
    """
    state: dict[str, Any] = {"torch": torch_state(), "random": random.getstate()}
    numpy: Any = np.random.get_state(legacy=False)
    if numpy["bit_generator"] == "MT19937":
        keys, position = numpy["state"]["key"], numpy["state"]["pos"]
        state["numpy"] = [torch.from_numpy(keys.astype("int64")), position, numpy["has_gauss"], numpy["gauss"]]
    if held:
        state["held"] = [generator_state(generator) for generator in held]
    return state


def torch_state() -> torch.Tensor:
    """Return the state of torch's CPU generator."""
    with uncollected():
        return torch.get_rng_state()


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector while the state of a torch generator is read.

    A collection can switch threads. If the other thread then asks for the same generator, which torch has locked, it
    waits for ever while it holds the GIL.
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
    """Return the state of one of ``GENERATORS``: a tensor for torch, a string for the others."""
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
    """Set a generator to a state that ``generator_state`` returned for one of the same type."""
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
    """Set the global RNGs, and the ``held`` ones, to a result of ``shared_state`` or a part of one."""
    torch.set_rng_state(state["torch"])
    if "random" in state:
        random.setstate(state["random"])
    if "numpy" in state:
        keys, *rest = state["numpy"]
        np.random.set_state(("MT19937", keys.numpy(), *rest))
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
    """Restore the global RNGs, and the ``held`` ones, after the block, whatever it draws."""
    state = shared_state(held)
    try:
        yield
    finally:
        set_shared_state(state, held)


@contextmanager
def generators_at(state: dict[str, Any], held: Sequence[Any] = ()) -> Iterator[None]:
    """Draw from ``state``, a result of ``shared_state``, inside the block; restore the generators afterwards."""
    with same_random_numbers(held):
        set_shared_state(state, held)
        yield


class GeneratorWatch:
    """Finds out which random generators the body of a ``with`` uses: global ones, and those that a dataset holds.

    A generator that is seeded for a sample and then restored leaves no trace in the final state. So the calling thread
    is traced, and the states are compared the first two times that each line of Python is reached: a line between the
    seeding and the restoring sees different states. Call events do not suffice, because NumPy's functions cause none.
    Under a debugger, which traces too, only the final states are compared.

    Args:
        held: Generators that the dataset holds, as ``generators_in`` returns them.
        lines: How many lines are traced; 0 compares only the final states. A body that runs more lines counts as one
            that may draw.

    Attributes:
        drew: What the body drew from, in words, set after the ``with``; empty if nothing.
        found: The same as a clause. It also covers a body that ran more lines than are traced; empty if nothing was
            drawn.
    """

    LINES = 200_000
    LINE_SECONDS = 2.5e-7  # cost of tracing one line
    VISITS = 2  # of each line at which the states are compared

    def __init__(self, held: Sequence[Any] = (), *, lines: int = LINES) -> None:
        self.drew: list[str] = []
        self._held = held
        self._names: set[str] = set()  # the global RNGs that were drawn from
        self._left = lines
        self._limit = lines
        self._traces: dict[types.CodeType, Any] = {}  # the line tracer of each function

    @property
    def found(self) -> str:
        """The result as a clause."""
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
        """Return the line tracer for a function; ``None`` if its lines are not traced."""
        code = frame.f_code
        if code not in self._traces:
            module = frame.f_globals.get("__name__", "")
            is_quiet = module.partition(".")[0] in QUIET and module != SEEDING
            # If an untraced function sets a generator, the next traced line of the dataset's code shows it.
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
            # Once every generator has been drawn from, nothing is left to find.
            if self._left < 0 or len(self._names) == len(self._before):
                sys.settrace(None)
                return None
            return frame.f_trace  # this function; naming it here would create a reference cycle

        return trace

    def _look(self) -> None:
        self._names.update(changed_generators(self._before, shared_state()))


class _Snapshot:
    """The states of the global RNGs at its creation; it compares them with the current ones in microseconds."""

    MT19937 = ctypes.c_char * (625 * 4)  # 624 words and the position

    def __init__(self) -> None:
        self._torch = torch_state()
        self._python = random.getstate()
        # Where NumPy keeps the state of its global generator, as published for other compilers. It lacks the cached
        # second normal number, but that changes only when words are drawn.
        generator = np.random.rand.__self__._bit_generator
        is_known = type(generator) is np.random.MT19937
        address = generator.ctypes.state_address if is_known else 0
        self._memory = self.MT19937.from_address(address) if is_known else None
        self._numpy = self._read_numpy()

    def _read_numpy(self) -> bytes:
        return b"" if self._memory is None else self._memory.raw

    def holds(self) -> bool:
        """Return whether the states are unchanged."""
        is_same = self._numpy == self._read_numpy() and torch.equal(self._torch, torch_state())
        return is_same and random.getstate() == self._python


def generators_in(owner: Any) -> list[Any]:
    """Return the random generators that an object and its parts hold and that have a state of their own.

    Global generators and those of the operating system are excluded.
    """
    return [part for part in parts_in(owner) if _has_own_state(part)]


def parts_in(owner: Any, is_whole: Callable[[Any], bool] = lambda part: False) -> list[Any]:
    """Return the objects reachable from an object, breadth first, except the items of long containers.

    Data and containers of many items are skipped: a list of a million files is not searched. The search does not
    descend into generators, nor into parts for which ``is_whole`` is true. It reads no attribute that a class may
    answer with code of its own: a proxy to a deleted object raises an error, and a lazy connection opens.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    # Breadth first: states are saved in this order, and it must be the same in a resumed process.
    level = [owner]
    while level and len(seen) < MOST_OBJECTS:
        new = {id(part): part for each in level for part in _parts_of(each) if id(part) not in seen}
        parts = {key: part for key, part in new.items() if not is_a(part, DATA)}
        seen.update(parts)
        level = [part for part in parts.values() if not (is_a(part, GENERATORS) or is_whole(part))]
    return list(seen.values())


def is_a(part: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether an object's type is one of ``kinds``; ``isinstance`` would trust the class that a proxy claims."""
    return issubclass(type(part), kinds)


def attributes_of(part: Any) -> dict[str, Any]:
    """Return the attributes of an object as the interpreter stores them, even if its class overrides ``__dict__``."""
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
    """Return whether two lists of results of ``generator_state`` are equal."""
    return len(some) == len(others) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(some, others, strict=True)
    )


def _parts_of(each: Any) -> list[Any]:
    # The real length of the container, not the one that a subclass computes.
    if any(is_a(each, kind) and kind.__len__(each) > MOST_PARTS for kind in CONTAINERS):
        return []
    if type(each) is types.FunctionType:  # its globals lead to everything in its module
        return [each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__]
    # Attributes come first, however the interpreter stores them, because states are matched by position. The rest
    # covers slots, partial() and bound methods.
    attributes = attributes_of(each)
    return [*attributes.values(), *(part for part in gc.get_referents(each) if part is not attributes)]
