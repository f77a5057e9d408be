"""A check for the tests of any project: does a loader that is stopped and resumed yield each sample once, in order?"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch

from lightning_turbo._checks import check_count, check_functions, expect, is_list, is_whole
from lightning_turbo._random import set_shared_state, shared_state

__all__ = ["ResumeReport", "check_resume", "report_resume"]

_MOST = 8  # samples listed in a message
_PLAIN = (int, float, complex, str, bytes, np.generic, type(None))  # a bool is an int


@dataclass(frozen=True)
class ResumeReport:
    """The result of one series of stops; samples are counted over all epochs."""

    workers: int
    ranks: tuple[int, ...]
    stops: int
    """Number of stops, including those at the ends of epochs."""
    samples: int
    """Number of samples without a stop."""
    twice: int
    """Samples seen more often than without a stop."""
    never: int
    """Samples seen less often than without a stop."""
    in_order: bool
    """Whether the samples came in the same order in every epoch."""
    reproducible: bool
    """Whether a second run without a stop yields the same as the first; otherwise the others say nothing."""
    faults: tuple[str, ...] = field(default=(), repr=False)
    """One sentence for each epoch that differs."""


def check_resume(
    make_loader: Callable[..., Any],
    *,
    stops: int = 3,
    workers: Sequence[int] = (0, 2),
    ranks: Sequence[int] = (1,),
    epochs: int = 2,
) -> None:
    """Raise an error if a loader that is stopped and resumed yields other samples than one that never stops.

    For each number of workers, the loader is built and iterated to the end, twice, to see that two runs without a stop
    yield the same. Then it is iterated again with stops: before and after each epoch, and at random batches inside it.
    At a stop, its state is pickled and the loader discarded; a new loader loads the state and continues, with the
    states of the global RNGs of torch, NumPy and Python, like a resumed Trainer run with ``ExactResume``. ``set_epoch``
    of the loader and its samplers is called before each epoch.

    Args:
        make_loader: ``make_loader(workers)`` returns a new loader with ``state_dict`` and ``load_state_dict``. Its
            batches are tensors (sparse and nested ones too, but not quantized), arrays, numbers, strings, bytes and
            ``None``, in lists, tuples, mappings (such as ``UserDict``) and dataclasses. With ``ranks``, it is called as
            ``make_loader(workers, rank, world_size)``.
        stops: Number of stops at random batches of each epoch, at least 0.
        workers: Numbers of worker processes; each is tested separately.
        ranks: World sizes, used one after the other from stop to stop, cyclically. Values other than 1 are for loaders
            of this package, whose ranks interleave the order like ``DistributedSampler``. All ranks run in this
            process.
        epochs: Number of epochs, at least 1.

    Raises:
        AssertionError: If samples were seen twice, never or in another order; the message says which and after which
            stops. If two runs without a stop differ already, it says so.
        TypeError: If the loader lacks ``state_dict`` or ``load_state_dict``, a batch holds anything else than the
            above, or an argument has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from lightning_turbo import PrefetchLoader
        >>> from lightning_turbo.testing import check_resume
        >>> data = TensorDataset(torch.arange(40))
        >>> check_resume(lambda workers: PrefetchLoader(data, batch_size=4, shuffle=True), workers=(0,))
    """
    valid = is_list(workers) and workers and all(is_whole(each, 0) for each in workers)
    expect(valid, "check_resume(workers)", workers, "integers of 0 or more", TypeError)
    reports = [report_resume(make_loader, stops=stops, workers=each, ranks=ranks, epochs=epochs) for each in workers]
    if unseeded := [report.workers for report in reports if not report.reproducible]:
        raise AssertionError(
            f"Two runs without a stop differ already (workers={unseeded}), with the same global random generators: one "
            "that the loader, its dataset or its transforms hold has no seed, or goes on from run to run. Make all of "
            "them in make_loader, and seed what it builds: np.random.RandomState(0), set_random_state(seed=0) of "
            "MONAI's transforms. Nothing is known of the resume before that."
        )
    faults = [f"workers={report.workers}: {fault}" for report in reports for fault in report.faults]
    if faults:
        raise AssertionError("The loader does not resume exactly.\n" + "\n".join(faults))


def report_resume(
    make_loader: Callable[..., Any], *, stops: int, workers: int, ranks: Sequence[int] = (1,), epochs: int = 2
) -> ResumeReport:
    """Return the findings of ``check_resume`` for one number of worker processes.

    Args:
        make_loader: As in ``check_resume``.
        stops: As in ``check_resume``.
        workers: Number of worker processes.
        ranks: As in ``check_resume``.
        epochs: As in ``check_resume``.
    """
    check_functions(make_loader=make_loader)
    check_count("stops", stops, 0)
    check_count("epochs", epochs)
    valid = is_list(ranks) and ranks and all(is_whole(each, 1) for each in ranks)
    expect(valid, "check_resume(ranks)", ranks, "integers of 1 or more", TypeError)
    before = shared_state()
    try:
        whole, again = (_Run(make_loader, workers, ranks).epochs_of(epochs, 0) for _ in range(2))
        run = _Run(make_loader, workers, ranks)
        resumed = run.epochs_of(epochs, stops, whole)
    finally:
        set_shared_state(before)
    pairs = [(_samples(a), _samples(b)) for a, b in zip(whole, resumed, strict=True)]
    return ResumeReport(
        workers=workers,
        ranks=tuple(ranks),
        stops=len(run.stopped),
        samples=sum(len(expected) for expected, _ in pairs),
        twice=sum((Counter(got) - Counter(expected)).total() for expected, got in pairs),
        never=sum((Counter(expected) - Counter(got)).total() for expected, got in pairs),
        in_order=all(expected == got for expected, got in pairs),
        reproducible=whole == again,
        faults=tuple(
            f"epoch {epoch}, stopped after samples {run.stopped_in(epoch)}: {_fault(expected, got)}"
            for epoch, (expected, got) in enumerate(pairs)
            if expected != got
        ),
    )


Step = list[list[str]]  # per rank, the samples of its batch


class _Run:
    """A series of epochs of loaders, one per rank, that are rebuilt at each stop."""

    def __init__(self, make_loader: Callable[..., Any], workers: int, ranks: Sequence[int]) -> None:
        self._make = make_loader
        self._workers = workers
        self._numbers = cycle(ranks)
        self._several = tuple(ranks) != (1,)
        self._most = max(ranks)
        self.stopped: list[tuple[int, int]] = []  # epoch, and the number of its samples that were used
        _seed(0)
        self._loaders = self._build()

    def epochs_of(self, epochs: int, stops: int, whole: list[list[Step]] | None = None) -> list[list[Step]]:
        """Return the steps of each epoch. Given those of a run without stops, stop inside and after each epoch."""
        chance = random.Random(0)
        seen = list[list[Step]]()
        for epoch in range(epochs):
            seen.append(list(self._epoch(epoch, self._places(whole[epoch], stops, chance) if whole else [])))
            if whole is not None:
                self._stop(epoch, len(_samples(seen[-1])))
        self._close()
        return seen

    def _places(self, steps: list[Step], stops: int, chance: random.Random) -> list[int]:
        """Return the numbers of samples after which an epoch stops, always before its last step."""
        last = len(_samples(steps)) - self._most * len(_samples(steps[:1]))
        return sorted(chance.randrange(1, last) for _ in range(stops)) if last > 1 else []

    def stopped_in(self, epoch: int) -> list[int]:
        """Return the numbers of samples after which the run was stopped in an epoch."""
        return [samples for number, samples in self.stopped if number == epoch]

    def _epoch(self, epoch: int, places: list[int]) -> Iterator[Step]:
        for loader in self._loaders:
            _set_epoch(loader, epoch)
        iterators = [iter(loader) for loader in self._loaders]
        done = 0
        for place in [*places, math.inf]:
            while done < place:
                step = [next(iterator, None) for iterator in iterators]
                if step[0] is None:
                    return
                yield (samples := [_samples_of(batch) for batch in step if batch is not None])
                done += sum(map(len, samples))
            iterators = []  # they end with their loader
            state = self._stop(epoch, done)
            for loader in self._loaders:
                _set_epoch(loader, epoch)
            iterators = [iter(loader) for loader in self._loaders]
            set_shared_state(state)  # undo the draws of iter(): a run without a stop made them long before

    def _stop(self, epoch: int, done: int) -> Any:
        """Rebuild the loaders from their states; set and return the states of the global RNGs."""
        state = shared_state()
        states = [pickle.loads(pickle.dumps(loader.state_dict())) for loader in self._loaders]
        self._close()
        self.stopped.append((epoch, done))
        _seed(len(self.stopped))  # a new process starts with other states
        self._loaders = self._build()
        for rank, loader in enumerate(self._loaders):
            loader.load_state_dict(states[rank if rank < len(states) else 0])
        set_shared_state(state)
        return state

    def _build(self) -> list[Any]:
        number = next(self._numbers)
        made = [
            self._make(self._workers, rank, number) if self._several else self._make(self._workers)
            for rank in range(number)
        ]
        for loader in made:
            valid = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
            expect(valid, "make_loader", loader, "a loader with state_dict and load_state_dict", TypeError)
        return made

    def _close(self) -> None:
        for loader in self._loaders:
            if callable(close := getattr(loader, "close", None)):
                close()
        self._loaders = []


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` on a loader and its samplers; Lightning calls it on the samplers."""
    batches = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for owner in {id(each): each for each in (loader, getattr(loader, "sampler", None), batches)}.values():
        if callable(set_epoch := getattr(owner, "set_epoch", None)):
            set_epoch(epoch)


def _samples_of(batch: Any) -> list[str]:
    """Return one string per sample of a batch: its numbers and texts, or a digest if there are many."""
    leaves = list(_leaves(batch))
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) != 1:  # not made of samples: one string for all
        return [_word([leaf[row] for leaf in leaves for row in range(len(leaf))])]
    return [_word([leaf[row] for leaf in leaves]) for row in range(lengths.pop())]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and lists of plain values in a batch, whose rows are samples."""
    if isinstance(value, torch.Tensor) and not value.is_quantized:
        yield from _leaves_of_tensor(value.detach().cpu())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield np.atleast_1d(value)
    elif isinstance(value, _PLAIN):
        yield [value]
    elif isinstance(value, (list, tuple)) and all(isinstance(each, _PLAIN) for each in value):
        yield value
    else:
        for part in _parts(value):
            yield from _leaves(part)


def _leaves_of_tensor(value: torch.Tensor) -> Iterator[torch.Tensor]:
    if value.is_nested:
        yield from value.unbind()
        return
    dense = value.as_subclass(torch.Tensor) if value.layout is torch.strided else value.to_dense()
    yield dense.reshape(1) if dense.ndim == 0 else dense


def _parts(value: Any) -> list[Any]:
    """Return the parts of a container; of any other kind it is unknown whether two of them are equal."""
    if isinstance(value, Mapping):
        return [value[key] for key in sorted(value, key=repr)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name) for each in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(
        "batch: expected tensors, arrays, numbers, strings, bytes and None in lists, tuples, mappings or dataclasses, "
        f"got {type(value).__name__}. Convert it in collate_fn, or in a loader around this one."
    )


def _word(parts: list[Any]) -> str:
    """Return a text for one row of each leaf, which differs where a bit differs."""
    if sum(math.prod(getattr(part, "shape", ())) for part in parts) <= 2:
        values = [part.reshape(-1).tolist() if hasattr(part, "shape") else [part] for part in parts]
        return " ".join(str(item) for value in values for item in value)
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(_bytes(part))
    return digest.hexdigest()


def _bytes(part: Any) -> bytes:
    if isinstance(part, torch.Tensor):  # NumPy lacks some of its dtypes
        kind = str((part.dtype, tuple(part.shape))).encode()
        return kind + part.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(part, np.ndarray):
        return str((part.dtype, part.shape)).encode() + part.tobytes()
    return repr(part).encode()


def _samples(steps: list[Step]) -> list[str]:
    """Return the samples of an epoch in the order in which the ranks interleave them."""
    found = list[str]()
    for step in steps:
        for row in range(max(map(len, step))):
            found += [batch[row] for batch in step if row < len(batch)]
    return found


def _fault(expected: list[str], got: list[str]) -> str:
    """Return a clause that says how an epoch differs."""
    twice, never = Counter(got) - Counter(expected), Counter(expected) - Counter(got)
    said = [
        f"{counts.total()} of {len(expected)} samples were seen {how} ({_named(counts)})"
        for how, counts in (("once too often", twice), ("never", never))
        if counts
    ]
    if not said:
        first = next(place for place, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1])
        said = [f"each sample was seen once, but in another order from sample {first} on"]
    return " and ".join(said)


def _named(counts: Counter[str]) -> str:
    names = list(counts)
    return ", ".join(names[:_MOST]) + (", ..." if len(names) > _MOST else "")
