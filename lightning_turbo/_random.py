"""The global RNGs of torch, Python and NumPy: read, set and restored."""

from __future__ import annotations

import gc
import json
import os
import random
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
    "states_lock",
    "torch_state",
    "uncollected",
]

GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
# Types that hold no generator, or that lead away from the dataset.
DATA = (torch.Tensor, np.ndarray, str, bytes, int, float, type, types.ModuleType)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# The search for generators ends after about this many objects and skips containers with more than this many items.
MOST_OBJECTS = 10_000
MOST_PARTS = 256

# Held while a torch generator state is read, while the global RNGs are drawn from and put back, and across a fork, so
# that no child starts with the lock held and its garbage collector off. A fork takes locks in reverse order of
# registration: those of loaders before this one, like loads.
states_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=states_lock.acquire, after_in_parent=states_lock.release, after_in_child=states_lock.release
    )


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
    with states_lock:
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
    with states_lock:
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
    """Finds out which random generators the body of a ``with`` draws from: global ones, and those that a dataset holds.

    The states before and after are compared. A generator that is seeded for a sample and then put back counts as not
    drawn from, which is right where nobody else draws meanwhile.

    Args:
        held: Generators that the dataset holds, as ``generators_in`` returns them.

    Attributes:
        drew: What the body drew from, in words, set after the ``with``; empty if nothing.
    """

    def __init__(self, held: Sequence[Any] = ()) -> None:
        self.drew: list[str] = []
        self._held = held

    @property
    def found(self) -> str:
        """The result as a clause; empty if nothing was drawn."""
        return f"draws from {' and '.join(self.drew)}" if self.drew else ""

    def __enter__(self) -> GeneratorWatch:
        self._before = shared_state(self._held)
        return self

    def __exit__(self, *error: object) -> None:
        after = shared_state(self._held)
        if names := changed_generators(self._before, after):
            self.drew.append(f"the global RNG of {' and '.join(names)}, which the model may use too")
        if not same_states(self._before.get("held", ()), after.get("held", ())):
            self.drew.append("a random generator that the dataset holds")


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
