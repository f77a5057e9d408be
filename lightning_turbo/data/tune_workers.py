"""``tune_workers``, the settings of a loader found by measurement."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from lightning_turbo._checks import check_functions, is_number, is_whole
from lightning_turbo._random import set_shared_state, shared_state
from lightning_turbo.data.loader import PrefetchLoader
from lightning_turbo.data.position import generators_of
from lightning_turbo.data.prefetcher import BackgroundIterator

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
        Starts and ends worker processes; none is left. The process-wide random generators, and those of torch that the
        loader and its samplers hold, are put back; those of a dataset are not. The time of a setting begins with its
        first batch. A batch that is not there in time is not waited for; at ``num_workers=0`` a thread then ends by
        itself as soon as it is. A ``step`` runs in the calling thread and to its end, and an error of it is raised.

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
    before = shared_state()
    clock = _Clock(seconds)
    try:
        rows = _search(make_loader, step, clock, _counts(max_workers), list(prefetch_factors), tolerance)
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


class _Clock:
    """The time that is left; a tenth is kept back for ending worker processes."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + 0.9 * seconds

    def share(self, parts: int) -> float:
        return max(0.0, self.end - time.monotonic()) / max(1, parts)


def _search(
    make_loader: Any, step: Any, clock: _Clock, counts: list[int], factors: list[int], tolerance: float
) -> list[WorkerRow]:
    pins = [False, True] if torch.cuda.is_available() else [False]
    later = len(factors) - 1 + len(pins) - 1
    rows = []
    # One worker first: should a batch take too long, its process can be ended, and 0 workers need not be tried. (Where
    # processes do not begin as copies of this one, their start may be what took too long.)
    for done, count in enumerate(sorted(counts, key=lambda n: (n != 1, n))):
        if not count and rows and rows[0].note == _LATE:
            rows.append(WorkerRow(num_workers=0, prefetch_factor=None, pin_memory=False, note="not tried"))
            continue
        settings = {"num_workers": count, "prefetch_factor": factors[0] if count else None, "pin_memory": False}
        rows.append(_measure(make_loader, step, clock, len(counts) - done + later, settings))
    rows.sort(key=lambda row: row.num_workers)
    for kind, values in (("prefetch_factor", factors[1:]), ("pin_memory", pins[1:])):
        best = _choose(rows, tolerance)
        if best is None or (kind == "prefetch_factor" and not best.num_workers):
            continue
        for number, value in enumerate(values):
            parts = len(values) - number + (len(pins) - 1) * (kind == "prefetch_factor")
            rows.append(_measure(make_loader, step, clock, parts, {**_settings(best), kind: value}))
    return rows


_LATE = "too late"


def _measure(make_loader: Any, step: Any, clock: _Clock, parts: int, settings: dict[str, Any]) -> WorkerRow:
    """Time one setting for its share, one of so many ``parts``, of the time that is left when its first batch comes."""
    share = clock.share(parts)
    if share < 0.01:
        return WorkerRow(**settings, note="no time")
    loader = make_loader(**settings)
    own = generators_of(getattr(loader, "generator", None), loader.batch_sampler or loader.sampler)
    states = [generator.get_state() for generator in own]
    times: list[float] = []
    error, over, loading = None, False, None
    try:
        try:
            loading = _Loading(loader, time.monotonic() + max(share, clock.share(1) - share), ahead=step is not None)
            loading.start()
        except Exception as broken:  # workers that cannot be started
            error = broken
        else:
            warm_up = settings["num_workers"] * (settings["prefetch_factor"] or 0) + 1
            error = _take(loading, step, warm_up, lambda: clock.share(parts), times)
            over = time.monotonic() >= loading.deadline - 0.05  # an error then is the waiting that was cut short
    finally:
        if loading is not None:
            loading.stop(kill=over and not times)
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)
    return _row(settings, times, None if over else error, loader)


def _row(settings: dict[str, Any], times: list[float], error: BaseException | None, loader: Any) -> WorkerRow:
    if error is not None:
        return WorkerRow(**settings, note=f"{type(error).__name__}: {error}".splitlines()[0])
    if not times:
        return WorkerRow(**settings, note=_LATE if _forks(loader) else "too late to start")
    return WorkerRow(**settings, batches=len(times), seconds=sum(times) / len(times))


def _forks(loader: Any) -> bool:
    """Whether worker processes begin as copies of this one, in no time."""
    return (getattr(loader, "multiprocessing_context", None) or multiprocessing).get_start_method() == "fork"


def _take(
    loading: _Loading, step: Any, warm_up: int, share: Callable[[], float], times: list[float]
) -> BaseException | None:
    """Take batches until the deadline, and call ``step`` on each, in this thread, where a training step would run.

    Args:
        loading: Where they come from; its deadline is that of the first batch, and then that of this setting.
        step: Called on each batch, or ``None``.
        warm_up: How many batches are not timed, as they hold the start of the workers.
        share: Tells how long to take batches, in seconds, once the first one is there.
        times: Gets the seconds of each batch, with its step if there is one.

    Returns:
        The error of the loading that ended it, if one did.
    """
    seen, first = 0, 0.0
    while (began := time.monotonic()) < loading.deadline:
        loading.ask()
        try:
            batch, seconds, error = loading.ready.get(timeout=loading.deadline - began)
        except queue.Empty:
            break
        if error is not None:
            return error
        if not seen:
            loading.deadline = time.monotonic() + share()
        if step is not None:
            if not seen:  # memory that was shared at the fork of the workers is copied at the first writing
                start = time.monotonic()
                step(batch)
                began += time.monotonic() - start
            step(batch)
            seconds = time.monotonic() - began
        seen += 1
        if seen == 1:
            first = seconds
        # A loader too slow or short for more than the warm-up counts anyway.
        elif seen > warm_up or (time.monotonic() - began) * 3 > loading.deadline - time.monotonic():
            times.append(seconds)
    if seen and not times:
        times.append(first)
    return None


class _Loading(threading.Thread):
    """Loads a batch whenever it is asked to, in a thread because the batch may never come.

    Args:
        loader: The loader. Without the thread of a ``PrefetchLoader``, in whose place this one stands, unless it has
            several.
        deadline: Until when to wait for worker processes, by the monotonic clock.
        ahead: Whether a ``PrefetchLoader`` may be ahead by as many batches as it would be by itself.
    """

    def __init__(self, loader: Any, deadline: float, ahead: bool) -> None:
        super().__init__(daemon=True, name="lightning_turbo-tune")
        own = isinstance(loader, PrefetchLoader) and (loader.threads == 1)
        self.loader: Any = super(PrefetchLoader, loader) if own else loader
        self.deadline = deadline
        self.asked = threading.Semaphore(loader.prefetch_batches if own and ahead else 0)
        self.ready: queue.SimpleQueue[tuple[Any, float, BaseException | None]] = queue.SimpleQueue()
        self.stopping = False
        self.iterator: Any = self.loader.__iter__()  # starts the workers, from the caller's thread

    def ask(self) -> None:
        """Have one more batch loaded."""
        self.asked.release()

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.ready.put((None, 0.0, error))
        finally:
            if isinstance(self.iterator, BackgroundIterator):
                self.iterator.close()

    def _run(self) -> None:
        empty = True
        while self.asked.acquire() and not self.stopping:
            began = time.monotonic()
            while True:
                if getattr(self.iterator, "_workers", ()):  # else waiting for them would go on in steps of 5 s
                    self.iterator._timeout = max(0.01, self.deadline - time.monotonic())
                try:
                    batch = next(self.iterator)
                    break
                except StopIteration:
                    if empty:
                        raise ValueError("the loader is empty") from None
                    self.iterator, empty, began = self.loader.__iter__(), True, time.monotonic()
            empty = False
            self.ready.put((batch, time.monotonic() - began, None))
            del batch

    def stop(self, kill: bool) -> None:
        """End the worker processes, with force if they gave nothing, and the thread."""
        self.stopping = True
        self.ask()
        self.join(0.2)
        iterator = self.iterator
        if kill or self.is_alive():
            if getattr(iterator, "_worker_pids_set", False):
                iterator._worker_pids_set = False
                _remove_worker_pids(id(iterator))  # else torch would raise in this process if one is still starting
            for worker in getattr(iterator, "_workers", []):
                worker.terminate()
        end = getattr(iterator, "_shutdown_workers", None)
        if end is not None:
            end()
        self.iterator = self.loader = None


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
    if not callable(make_loader):
        raise TypeError(f"make_loader={make_loader!r} cannot be called; pass a function.")
    if not is_number(seconds) or seconds <= 0:
        raise ValueError(f"seconds={seconds!r}: pass the time to spend, a finite number above zero.")
    if most is not None and not is_whole(most, 0):
        raise ValueError(f"max_workers={most!r}: pass a whole number, 0 or more, or None.")
    if not isinstance(factors, Sequence) or not factors or not all(is_whole(n, 1) for n in factors):
        raise ValueError(f"prefetch_factors={factors!r} must hold whole numbers of 1 or more.")
    if not is_number(tolerance) or tolerance < 0:
        raise ValueError(f"tolerance={tolerance!r}: pass a finite number, 0 or more, for example 0.05.")
