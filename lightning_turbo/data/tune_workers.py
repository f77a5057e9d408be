"""``tune_workers``, the settings of a loader found by measurement."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_turbo._checks import check_functions, expect, is_number, is_whole
from lightning_turbo._random import set_shared_state, shared_state
from lightning_turbo.data.loader import PrefetchLoader
from lightning_turbo.data.position import end_workers, generators_of

__all__ = ["WorkerRow", "WorkerTuning", "tune_workers"]


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """What one setting gave.

    Attributes:
        num_workers: Worker processes.
        prefetch_factor: Batches that each worker loads ahead; ``None`` without workers.
        pin_memory: Whether batches were put into page-locked memory.
        batches: How many batches were timed.
        seconds: Mean time of a batch, in seconds; infinite if none came in time.
        note: Why there is no time, if there is none.
    """

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    batches: int = 0
    seconds: float = float("inf")
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkerTuning:
    """The settings that ``tune_workers`` chose, and what it measured.

    Attributes:
        num_workers: Worker processes, 0 or more.
        prefetch_factor: Batches that each worker loads ahead; ``None`` without workers.
        pin_memory: Whether to use page-locked memory.
        rows: Every setting that was measured.
        cached: Whether the answer was read from a file.
    """

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    rows: tuple[WorkerRow, ...] = field(default=(), repr=False)
    cached: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments for a ``DataLoader``."""
        return _settings(self)

    def __str__(self) -> str:
        """The table of what was measured, with the choice marked."""
        lines = ["workers  prefetch  pinned  batches  ms a batch"]
        for row in self.rows:
            mark = " <-" if _settings(row) == self.settings else ""
            shown = f"{row.seconds * 1e3:10.3f}" if row.batches else f"{row.note:>10}"
            factor, pinned = row.prefetch_factor or "-", "yes" if row.pin_memory else "no"
            lines.append(f"{row.num_workers:7}  {factor:>8}  {pinned:>6}  {row.batches:7}  {shown}{mark}")
        return "\n".join(lines)


def tune_workers(
    make_loader: Callable[..., Any],
    *,
    step: Callable[[Any], Any] | None = None,
    seconds: float = 5.0,
    max_workers: int | None = None,
    prefetch_factors: Sequence[int] = (2, 4),
    tolerance: float = 0.05,
    cache: str | os.PathLike[str] | None = None,
    show: Callable[[str], Any] | None = print,
) -> WorkerTuning:
    """Measure how fast a loader is with 0, 1, 2, 4, ... workers, and choose the smallest setting that is fast enough.

    First the number of workers is chosen, with the first prefetch factor; then, for that number, the prefetch factor;
    then, where there is a CUDA device, whether memory is pinned. More workers are not always faster: they share the
    machine's cores with each other and with the training.

    Args:
        make_loader: Called with ``num_workers``, ``prefetch_factor`` and ``pin_memory`` as keywords; returns a new
            ``DataLoader`` with them.
        step: Called on each batch, for example a training step, so that loading is measured with it: in turns, or
            beside it where ``make_loader`` returns a ``PrefetchLoader``. Called once more, not timed, on the first
            batch of each setting. Without it, loading alone is measured.
        seconds: Time for everything together, finite and above zero.
        max_workers: The most workers to try, 0 or more; by default the number of CPU cores that this process may use.
        prefetch_factors: What to try, each 1 or more, smallest first.
        tolerance: How much slower than the best a smaller setting may be, 0 or more; 0.05 is 5 %.
        cache: A file for the answer. One that was written on a machine with as many cores, by the same release of
            torch, is read instead of measuring.
        show: Called with the finished table; ``None`` to show nothing.

    Returns:
        The choice; its ``settings`` are keyword arguments for a ``DataLoader``.

    Raises:
        TypeError: If ``make_loader``, ``step`` or ``show`` cannot be called.
        ValueError: If a number is out of range.
        RuntimeError: If no setting gave a batch in time; its text says what happened with each.

    Note:
        Starts and ends worker processes; none is left. The global RNGs, and those of torch that the
        loader and its samplers hold, are restored; those of a dataset are not. The time of a setting begins with its
        first batch. Worker processes that give no batch in time are ended, and the search with them; at
        ``num_workers=0`` a batch that was begun is waited for. An error of ``step`` is raised.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> def make_loader(**settings):
        ...     return DataLoader(range(64), batch_size=8, **settings)
        >>> tune_workers(make_loader, seconds=1.0, max_workers=0, show=None).settings["num_workers"]
        0
    """
    _check(make_loader, step, show, seconds, max_workers, prefetch_factors, tolerance)
    if cache is not None and (known := _read(Path(cache))) is not None:
        if show is not None:
            show(str(known))
        return known
    before, end = shared_state(), time.monotonic() + 0.9 * seconds  # a tenth is for ending worker processes
    try:
        measure = functools.partial(_measure, make_loader, step, end)
        rows = _search(measure, _counts(max_workers), list(prefetch_factors), tolerance)
    finally:
        set_shared_state(before)
    best = _choose(rows, tolerance)
    if best is None:
        told = "; ".join(f"num_workers={row.num_workers}: {row.note}" for row in rows)
        raise RuntimeError(
            f"tune_workers(seconds={seconds!r}) got no batch from any setting ({told}). "
            "Give it more seconds, or repair the loader."
        )
    tuning = WorkerTuning(**_settings(best), rows=tuple(rows))
    if cache is not None:
        Path(cache).write_text(json.dumps({"machine": _machine(), **asdict(tuning)}, indent=1))
    if show is not None:
        show(str(tuning))
    return tuning


_LATE = "too late"


def _search(
    measure: Callable[[int, dict[str, Any]], WorkerRow], counts: list[int], factors: list[int], tolerance: float
) -> list[WorkerRow]:
    """Return what ``measure`` gave for the settings that were tried.

    Args:
        measure: Called with the number of settings that share the time that is left, and the setting.
        counts: Numbers of worker processes to try.
        factors: Prefetch factors to try.
        tolerance: As in ``tune_workers``.
    """
    pins = [True] if torch.cuda.is_available() else []
    later, rows = len(factors) - 1 + len(pins), []
    # One worker first: its process can be ended if a batch never comes. Where each process imports torch, their start
    # may be what takes too long, and 0 workers come first.
    first = 1 if multiprocessing.get_start_method() == "fork" else 0
    for done, count in enumerate(sorted(counts, key=lambda number: (number != first, number))):
        settings = {"num_workers": count, "prefetch_factor": factors[0] if count else None, "pin_memory": False}
        rows.append(measure(len(counts) - done + later, settings))
        if rows[-1].note == _LATE:
            break
    for kind, values in (("prefetch_factor", factors[1:]), ("pin_memory", pins)):
        best = _choose(rows, tolerance)
        for value in values:
            if best is not None and (best.num_workers or kind == "pin_memory"):
                rows.append(measure(later, {**_settings(best), kind: value}))
            later -= 1
    return sorted(rows, key=lambda row: row.num_workers)


def _measure(make_loader: Any, step: Any, end: float, parts: int, settings: dict[str, Any]) -> WorkerRow:
    """Time one setting for its share, one of so many ``parts``, of the time that is left when its first batch comes."""
    left = end - time.monotonic()
    if left / parts < 0.01:
        return WorkerRow(**settings, note="no time")
    loader = make_loader(**settings)
    sampler = loader.batch_sampler or loader.sampler
    own, epoch, timeout = generators_of(loader.generator, sampler), getattr(sampler, "epoch", None), loader.timeout
    states = [generator.get_state() for generator in own]
    try:
        if settings["num_workers"]:
            loader.timeout = left - left / parts if parts > 1 else left
        warm_up = settings["num_workers"] * (settings["prefetch_factor"] or 0) + 1
        times, error = _take(loader, step, warm_up, lambda: max(0.0, end - time.monotonic()) / parts)
    finally:
        loader.timeout = timeout
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)
        if hasattr(sampler, "continue_after"):  # it counts its passes
            sampler.continue_after([epoch], over=False)
    if times:
        return WorkerRow(**settings, batches=len(times), seconds=sum(times) / len(times))
    late = isinstance(error, RuntimeError) and "timed out" in str(error)
    return WorkerRow(**settings, note=_LATE if late else f"{type(error).__name__}: {error}".splitlines()[0])


def _take(loader: Any, step: Any, warm_up: int, share: Callable[[], float]) -> tuple[list[float], BaseException | None]:
    """Take batches, and call ``step`` on each.

    Args:
        loader: Where they come from.
        step: Called on each batch, or ``None``.
        warm_up: How many batches are not timed, as they hold the start of the workers; half of them at most.
        share: Tells how long to take batches, in seconds, once the first one is there.

    Returns:
        The seconds of each batch, with its step, and the error of the loading that ended it, if one did.
    """
    times: list[float] = []
    end = float("inf")
    with contextlib.closing(_batches(loader)) as batches:
        while not times or time.monotonic() < end:
            try:
                batch, seconds = next(batches)
            except Exception as error:
                # One that came too late for its time is none.
                return (times if times and "timed out" in str(error) else []), error
            if step is not None and not times:
                step(batch)  # memory that was shared at the fork of the workers is copied at the first writing
            began = time.monotonic()
            if step is not None:
                step(batch)
            end = time.monotonic() + share() if not times else end
            times.append(seconds + time.monotonic() - began)
    return times[min(warm_up, len(times) // 2) :], None


def _batches(loader: Any) -> Generator[tuple[Any, float], None, None]:
    """Yield the batches of one epoch after another, each with the seconds that it was waited for."""
    iterator: Any = None
    try:
        while True:
            iterator, empty, began = iter(loader), True, time.monotonic()
            for batch in iterator:
                empty = False
                yield batch, time.monotonic() - began
                began = time.monotonic()
            if empty:
                raise ValueError("the loader is empty")
    finally:
        loader.close() if isinstance(loader, PrefetchLoader) else end_workers(iterator)


def _choose(rows: Sequence[WorkerRow], tolerance: float) -> WorkerRow | None:
    """The smallest setting within ``tolerance`` of the fastest; ``None`` if none gave a batch."""
    timed = [row for row in rows if row.batches]
    if not timed:
        return None
    limit = min(row.seconds for row in timed) * (1 + tolerance)
    fast = [row for row in timed if row.seconds <= limit]
    return min(fast, key=lambda row: (row.num_workers, row.prefetch_factor or 0, row.pin_memory))


def _settings(of: WorkerRow | WorkerTuning) -> dict[str, Any]:
    return {name: getattr(of, name) for name in ("num_workers", "prefetch_factor", "pin_memory")}


def _counts(max_workers: int | None) -> list[int]:
    """0, 1, 2, 4, ... up to ``max_workers``."""
    top = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    top = top if max_workers is None else max_workers
    return [0, *(n for n in (1 << k for k in range(12)) if n <= top)]


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "torch": torch.__version__, "cuda": torch.cuda.is_available()}


def _read(path: Path) -> WorkerTuning | None:
    """The answer in a file, unless it is of another machine or no answer at all."""
    try:
        stored = json.loads(path.read_text())
        if stored.pop("machine") != _machine():
            return None
        rows = tuple(WorkerRow(**row) for row in stored.pop("rows"))
        return WorkerTuning(**{**stored, "cached": True}, rows=rows)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _check(make_loader: Any, step: Any, show: Any, seconds: Any, most: Any, factors: Any, tolerance: Any) -> None:
    check_functions(step=step, show=show)
    expect(callable(make_loader), "make_loader", make_loader, "a function that returns a DataLoader", TypeError)
    expect(is_number(seconds) and seconds > 0, "seconds", seconds, "a finite number above zero")
    expect(most is None or is_whole(most, 0), "max_workers", most, "a whole number of 0 or more, or None")
    whole = isinstance(factors, Sequence) and bool(factors) and all(is_whole(n, 1) for n in factors)
    expect(whole, "prefetch_factors", factors, "whole numbers of 1 or more, as [2, 4]")
    expect(is_number(tolerance) and tolerance >= 0, "tolerance", tolerance, "a finite number of 0 or more, as 0.05")
