"""What the steady loading of a loader is like: how long it takes, and whether it draws from shared generators."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_turbo._random import set_shared_state, shared_state, torch_state, uncollected
from lightning_turbo.errors import NoEffectWarning

__all__ = [
    "LoadWatch",
    "SharedDraws",
    "generators_in",
    "moved",
    "parts_of",
    "set_shared_state",
    "shared_state",
    "torch_state",
    "uncollected",
]

# Seconds. A batch that is loaded faster than this is loaded where it is asked for: to hand it over from a thread costs
# 0.1 to 0.4 ms.
WORTH = 5e-4
# Batches. How long torch's generator has to stand still before the thread is not looked at in every call of torch.
STILL = 8
# Names of the functions of torch that draw: from its generators, and those in which such a call cannot be seen.
# fmt: off
DRAWS = frozenset({
    "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial",
    "normal", "normal_", "poisson",
    "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm", "uniform_",
    "_sample_dirichlet", "_standard_gamma",
    "alpha_dropout", "alpha_dropout_", "dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_",
    "feature_alpha_dropout",
    "feature_alpha_dropout_", "feature_dropout", "feature_dropout_", "native_dropout", "rrelu", "rrelu_",
    "fractional_max_pool2d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d",
    "fractional_max_pool3d_with_indices",
    "gumbel_softmax", "kaiming_normal_", "kaiming_uniform_",
})
# fmt: on


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the generators that differ between two states."""
    names = []
    if not torch.equal(before["torch"], after["torch"]):
        names.append("torch")
    if before["random"] != after["random"]:
        names.append("random")
    old, new = before.get("numpy"), after.get("numpy")
    if old is not None and new is not None and (old[1:] != new[1:] or not torch.equal(old[0], new[0])):
        names.append("numpy.random")
    return names


class SharedDraws(TorchFunctionMode):
    """While it is entered, calls ``before`` ahead of each draw of this thread from a process-wide generator of torch.

    Of the calls that pass through Python, that is; each of them takes one to three microseconds longer.

    Args:
        before: Called without arguments.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self.before = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, after ``before`` if it draws."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in DRAWS and kwargs.get("training", True):
            generator = kwargs.get("generator")
            if generator is None or generator is torch.default_generator:
                self.before()
        return func(*args, **kwargs)


class LoadWatch:
    """Remembers, for one loader, whether its steady loading draws from shared generators, and whether it takes long.

    A loader that draws cannot work in a background thread: the thread and the model would take turns on one generator
    in an order that no seed fixes. Its batches are then loaded in the thread that asks for them, as a plain
    ``DataLoader`` does, and a warning says so once.

    Attributes:
        known: ``None`` until a batch was watched, then whether it drew.
        slow: Whether batches take so long that a thread pays, ``WORTH`` on average.
        owners: Objects whose own generators are watched as well, because several threads are to use them.
        workers: Whether worker processes load, so that nothing but a sampler draws here.
        alone: Whether those drew, so that one thread has to load alone.
        refused: Whether it was said that several threads cannot be used.
        still: How many batches a thread handed over since it last saw torch's generator move.
        unsure: Whether torch's generator moved after all while nobody looked who draws.
    """

    def __init__(self) -> None:
        self.known: bool | None = None
        self.slow = False
        self.owners: tuple[Any, ...] = ()
        self.workers = False
        self.alone = False
        self.refused = False
        self.still = 0
        self.unsure = False
        self._batches, self._seconds = 0, 0.0

    def note(self, seconds: float) -> None:
        """Take note of how long a batch took, in seconds, in the thread that asked for it."""
        self._batches += 1
        self._seconds += seconds
        # The first few have to be clearly slow: caches are cold then, and one number says little.
        self.slow = self.slow or self._seconds >= WORTH * max(self._batches, 4)

    @property
    def looking(self) -> bool:
        """Whether threads have to look who draws from torch's generator: not while nobody does."""
        return self.unsure or self.still < STILL

    def note_state(self, has_moved: bool) -> None:
        """Take note of whether torch's generator moved until a thread handed over one more batch."""
        self.unsure = self.unsure or (has_moved and not self.looking)
        self.still = 0 if has_moved else self.still + 1

    def judge(self, names: list[str], late: bool = False) -> bool:
        """Take note of what one watched batch drew from.

        Args:
            names: What ``moved`` returned for it.
            late: Whether batches were loaded in the background before.

        Returns:
            Whether the loader has to stay in the asking thread.

        Warns:
            NoEffectWarning: The first time that a batch drew.
        """
        first = bool(names) and not self.known
        if names or self.known is None:
            self.known = bool(names)
        if first:
            past = " Batches before this one were loaded in the background, so this run may not repeat." if late else ""
            what = "Loading a batch"
            remedy = (
                "Use num_workers=1 (a process has generators of its own), or draw from a generator that belongs to the "
                "dataset."
            )
            if self.workers:
                what, remedy = "Drawing the indices of a batch", "Give the sampler a generator of its own."
            warnings.warn(
                f"{what} draws from the process-wide generator of {' and '.join(names)}, which the model may use too: "
                "in a background thread no seed would fix the result. Batches are loaded in the training thread "
                f"instead, as by a plain DataLoader, with nothing gained. {remedy}{past}",
                NoEffectWarning,
                stacklevel=3,
            )
        return bool(self.known)

    def private(self) -> list[bytes]:
        """Return the states of the generators that ``owners`` hold."""
        return [
            g.get_state().numpy().tobytes() if isinstance(g, torch.Generator) else pickle.dumps(g)
            for g in generators_in(self.owners)
        ]

    def judge_private(self, before: list[bytes]) -> None:
        """Take note of whether a batch drew from generators of ``owners``.

        Args:
            before: What ``private`` returned before that batch.

        Warns:
            NoEffectWarning: If it did.
        """
        self.alone = self.private() != before
        if self.alone:
            warnings.warn(
                "Loading a batch draws from a random generator that the dataset holds: among several threads no seed "
                "would fix who draws what. One thread loads instead of prefetch_threads. Derive the random numbers of "
                "a sample from its index, or use worker processes, which have generators of their own.",
                NoEffectWarning,
                stacklevel=3,
            )


def parts_of(value: Any) -> Iterator[Any]:
    """Yield what an object holds: attributes, items, arguments and closures of functions; of a container the first 100.

    Args:
        value: Any object.
    """
    if isinstance(value, dict):
        yield from itertools.islice(value.values(), 100)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from itertools.islice(value, 100)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())  # the empty one
    elif not isinstance(value, (type, types.ModuleType)):
        yield from getattr(value, "__dict__", {}).values()


def generators_in(owners: Any, parts: Callable[[Any], Iterable[Any]] = parts_of) -> list[Any]:
    """Find random generators of torch, Python and NumPy in objects and what they hold.

    At most 10,000 objects are looked at, what is near the owners first.

    Args:
        owners: Objects.
        parts: Tells what an object holds.
    """
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    data: tuple[type, ...] = (torch.Tensor, str, bytes, int, float, complex)
    if numpy is not None:
        kinds = (*kinds, numpy.random.Generator, numpy.random.RandomState)
        data = (*data, numpy.ndarray)
    found: list[Any] = []
    seen: set[int] = set()
    left: deque[Any] = deque([owners])
    while left and len(seen) < 10_000:
        value = left.popleft()
        if id(value) in seen or isinstance(value, data):
            continue
        seen.add(id(value))
        if isinstance(value, kinds):
            found.append(value)
        else:
            left.extend(parts(value))
    return found
