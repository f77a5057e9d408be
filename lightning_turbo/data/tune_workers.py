"""``tune_workers``: the number of worker processes, found by measurement."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lightning_turbo._checks import check_functions, expect, is_number, is_whole
from lightning_turbo._machine import count_cores
from lightning_turbo._random import generator_state, set_generator_state, set_shared_state, shared_state
from lightning_turbo.data.loader import PrefetchLoader
from lightning_turbo.data.resume import end_workers, generators_of

__all__ = ["WorkerRow", "WorkerTuning", "tune_workers", "why_not_processes"]

LATE = "too late"


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """The measurement of one number of workers.

    Attributes:
        num_workers: Worker processes.
        batches: Number of timed batches.
        seconds: Mean time of a batch, in seconds; infinite if there is none.
        note: Why there is no time, if there is none.
    """

    num_workers: int
    batches: int = 0
    seconds: float = float("inf")
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkerTuning:
    """The number of workers that ``tune_workers`` chose, and what it measured.

    Attributes:
        num_workers: Worker processes, 0 or more.
        rows: Every number that was measured.
    """

    num_workers: int
    rows: tuple[WorkerRow, ...] = field(repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments for a ``DataLoader``."""
        return {"num_workers": self.num_workers}

    def __str__(self) -> str:
        """Return the table of measurements with the choice marked."""
        lines = ["workers  batches  ms a batch"]
        for row in self.rows:
            mark = " <-" if row.num_workers == self.num_workers else ""
            shown = f"{row.seconds * 1e3:10.3f}" if row.batches else f"{row.note:>10}"
            lines.append(f"{row.num_workers:7}  {row.batches:7}  {shown}{mark}")
        return "\n".join(lines)


def tune_workers(
    make_loader: Callable[..., Any],
    *,
    step: Callable[[Any], Any] | None = None,
    seconds: float = 5.0,
    max_workers: int | None = None,
    tolerance: float = 0.05,
    show: Callable[[str], Any] | None = print,
) -> WorkerTuning:
    """Measure how fast a loader is with 0, 1, 2, 4, ... workers, and choose the smallest number that is fast enough.

    More workers are not always faster: they share the machine's cores with each other and with the training.

    Args:
        make_loader: Called with ``num_workers`` as keyword; returns a new ``DataLoader``.
        step: Called on each batch, for example a training step, so that loading is measured with it: in turns, or
            beside it where ``make_loader`` returns a ``PrefetchLoader``. Called once more, not timed, on the first
            batch. Without it, loading alone is measured.
        seconds: Time for everything together, finite and above zero.
        max_workers: The most workers to try, 0 or more. Default: the number of CPU cores that this process may use.
        tolerance: How much slower than the best a smaller number may be, 0 or more; 0.05 is 5 %.
        show: Called with the finished table; ``None`` to show nothing.

    Returns:
        The choice; its ``settings`` are keyword arguments for a ``DataLoader``.

    Raises:
        TypeError: If ``make_loader``, ``step`` or ``show`` cannot be called.
        ValueError: If a number is out of range.
        RuntimeError: If nothing gave a batch; its text says what happened with each number.

    Note:
        Starts and ends worker processes; none is left. The global RNGs, and those of torch that the loader and its
        samplers hold, are restored; those of a dataset are not. Worker processes that give no batch in time are ended,
        and the search with them; at ``num_workers=0`` a batch that was begun is waited for. An error of ``step`` is
        raised.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> def make_loader(**settings):
        ...     return DataLoader(range(64), batch_size=8, **settings)
        >>> tune_workers(make_loader, seconds=1.0, max_workers=0, show=None).settings["num_workers"]
        0
    """
    check_functions(step=step, show=show)
    _check(make_loader, seconds, tolerance, max_workers)
    counts = _list_counts(max_workers)
    rows: list[WorkerRow] = []
    before, end = shared_state(), time.monotonic() + 0.9 * seconds  # a tenth is for ending worker processes
    try:
        while counts and not (rows and rows[-1].note == LATE):
            rows.append(_measure(make_loader, step, end, len(counts), counts.pop(0)))
    finally:
        set_shared_state(before)
    tuning = WorkerTuning(num_workers=_choose(rows, tolerance), rows=tuple(sorted(rows, key=lambda r: r.num_workers)))
    if show is not None:
        show(str(tuning))
    return tuning


def _check(make_loader: Any, seconds: Any, tolerance: Any, most: Any) -> None:
    expect(callable(make_loader), "make_loader", make_loader, "a function that returns a DataLoader", TypeError)
    expect(is_number(seconds) and seconds > 0, "seconds", seconds, "a finite number above zero")
    expect(is_number(tolerance) and tolerance >= 0, "tolerance", tolerance, "a finite number of 0 or more, as 0.05")
    expect(most is None or is_whole(most, 0), "max_workers", most, "a whole number of 0 or more, or None")


def _choose(rows: list[WorkerRow], tolerance: float) -> int:
    """Return the smallest number of workers within ``tolerance`` of the fastest."""
    fastest = min(row.seconds for row in rows)
    if fastest == float("inf"):
        told = "; ".join(f"num_workers={row.num_workers}: {row.note}" for row in rows)
        raise RuntimeError(f"tune_workers got no batch ({told}). Give it more seconds, or repair the loader.")
    return min(row.num_workers for row in rows if row.seconds <= fastest * (1 + tolerance))


def _list_counts(max_workers: int | None) -> list[int]:
    """Return 0, 1, 2, 4, ... up to ``max_workers``, in the order in which they are tried."""
    top = count_cores() if max_workers is None else int(max_workers)
    counts = [0, *(1 << power for power in range(top.bit_length()))]
    # One worker first: its process can be ended if a batch never comes. Where each process imports torch, their start
    # may be what takes too long, and 0 workers come first.
    if top and multiprocessing.get_start_method() == "fork":
        counts[:2] = 1, 0
    return counts


class _NoBatchError(Exception):
    """A loader gave no batch, for the reason that the text tells."""


def _measure(make_loader: Any, step: Any, end: float, parts: int, num_workers: int) -> WorkerRow:
    """Time one number of workers for its share, one of ``parts``, of the time that is left at its first batch."""
    left = end - time.monotonic()
    if left / parts < 0.01:
        return WorkerRow(num_workers=num_workers, note="no time")
    loader = make_loader(num_workers=num_workers)
    if num_workers:
        loader.timeout = left
    try:
        with _same_orders(loader):
            times = _time_batches(loader, step or _nothing, lambda: max(0.0, end - time.monotonic()) / parts)
    except _NoBatchError as error:
        return WorkerRow(num_workers=num_workers, note=str(error))
    warm_up = num_workers * (loader.prefetch_factor or 0) + 1  # these hold the start of the workers
    times = times[min(warm_up, len(times) // 2) :]
    return WorkerRow(num_workers=num_workers, batches=len(times), seconds=sum(times) / len(times))


@contextlib.contextmanager
def _same_orders(loader: Any) -> Iterator[None]:
    """Leave the generators of a loader and its samplers, and the epoch of one that counts its passes, as they were."""
    sampler = loader.batch_sampler or loader.sampler
    own, epoch = generators_of(loader.generator, sampler), getattr(sampler, "epoch", None)
    states = [generator_state(generator) for generator in own]
    try:
        yield
    finally:
        for generator, state in zip(own, states, strict=True):
            set_generator_state(generator, state)
        if hasattr(sampler, "continue_after"):
            sampler.continue_after([epoch], over=False)


def _nothing(batch: Any) -> None:
    """Do nothing with a batch."""


def _time_batches(loader: Any, step: Callable[[Any], Any], share: Callable[[], float]) -> list[float]:
    """Return the seconds of each batch with its step."""
    times: list[float] = []
    end = float("inf")
    with contextlib.closing(_repeat(loader)) as batches:
        while not times or time.monotonic() < end:
            began = time.monotonic()
            batch = next(batches)
            loaded = time.monotonic() - began
            if not times:
                step(batch)  # memory that was shared at the fork of the workers is copied at the first writing
                end = time.monotonic() + share()
            began = time.monotonic()
            step(batch)
            times.append(loaded + time.monotonic() - began)
    return times


def _repeat(loader: Any) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after another."""
    iterator: Any = None
    try:
        while True:
            iterator = iter(loader)
            yield next(iterator)
            yield from iterator
    except StopIteration:
        raise _NoBatchError("the loader is empty") from None
    except Exception as error:  # whatever a dataset raises
        late = isinstance(error, RuntimeError) and "timed out" in str(error)
        raise _NoBatchError(LATE if late else f"{type(error).__name__}: {error}".splitlines()[0]) from error
    finally:
        loader.close() if isinstance(loader, PrefetchLoader) else end_workers(iterator)


_PLAIN = (torch.Tensor, np.ndarray, str, bytes, int, float, type, FunctionType, ModuleType)


class _Walk(pickle.Pickler):
    """Walks through an object as pickle does, past its data, functions and classes, and writes nothing."""

    def __init__(self) -> None:
        super().__init__(self)

    def write(self, data: Any) -> int:
        return len(data)

    def persistent_id(self, obj: Any) -> str | None:
        return "plain" if isinstance(obj, _PLAIN) else None


def why_not_processes(dataset: Any) -> str:
    """Return why worker processes might not load what this process loads; empty if nothing speaks against them."""
    if isinstance(dataset, IterableDataset):
        return (
            f"{type(dataset).__name__} is an IterableDataset, and with another number of processes it gives other "
            "batches: each sample several times, if it does not divide its data among them."
        )
    try:
        _Walk().dump(dataset)
    except Exception as error:
        return (
            f"the dataset holds something that processes cannot share, as an open file or a connection ({error}). "
            "Open it in each process, at the first sample."
        )
    return ""
