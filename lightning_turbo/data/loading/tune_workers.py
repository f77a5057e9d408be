"""``tune_workers``: the number of worker processes, found by measurement."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, Dataset

from lightning_turbo._checks import check_functions, expect, is_number, is_whole
from lightning_turbo._machine import count_cores
from lightning_turbo._random import attributes_of, generators_in, is_a, same_random_numbers
from lightning_turbo.data.loading.loader import PrefetchLoader
from lightning_turbo.data.loading.order import samplers_in
from lightning_turbo.data.loading.subclass import copy_loader
from lightning_turbo.data.loading.torch_side import end_workers, is_timeout, start_method

__all__ = ["WorkerTuning", "tune_workers"]

LATE = "too late"


@dataclass(frozen=True, kw_only=True)
class WorkerTuning:
    """The number of workers that ``tune_workers`` chose, and what it measured.

    Attributes:
        num_workers: Worker processes, 0 or more.
        rows: For every number that was tried the mean time of a batch in seconds, or why there is none.
    """

    num_workers: int
    rows: dict[int, float | str] = field(repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments for a ``DataLoader``."""
        return {"num_workers": self.num_workers}

    def __str__(self) -> str:
        """Return the table of measurements with the choice marked."""
        lines = ["workers  ms a batch"]
        for number, found in sorted(self.rows.items()):
            shown = found if isinstance(found, str) else f"{found * 1e3:.3f}"
            lines.append(f"{number:7}  {shown:>10}{' <-' if number == self.num_workers else ''}")
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
        step: Called on each batch, for example a training step, so that loading is measured together with it:
            alternately or, if ``make_loader`` returns a ``PrefetchLoader``, at the same time. Called once more, not
            timed, on the first batch. Without it, loading alone is measured.
        seconds: Time for everything together, finite and above zero.
        max_workers: The most workers to try, 0 or more. Default: the number of CPU cores that this process may use.
        tolerance: How much slower than the best a smaller number may be, 0 or more; 0.05 is 5 %.
        show: Called with the finished table; ``None`` to show nothing.

    Returns:
        The choice; its ``settings`` are keyword arguments for a ``DataLoader``.

    Raises:
        TypeError: If ``make_loader``, ``step`` or ``show`` cannot be called, or a sampler cannot be copied.
        ValueError: If a number is out of range.
        RuntimeError: If nothing gave a batch; its message lists the error for each number.

    Note:
        Starts and ends worker processes; none is left. The global RNGs, and those that the loader and its dataset hold,
        are restored, and copies of the samplers are iterated. Worker processes that give no batch in time are ended,
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
    expect(callable(make_loader), "make_loader", make_loader, "a function that returns a DataLoader", TypeError)
    expect(is_number(seconds) and seconds > 0, "seconds", seconds, "a finite number above zero")
    expect(is_number(tolerance) and tolerance >= 0, "tolerance", tolerance, "a finite number of 0 or more, as 0.05")
    whole = max_workers is None or is_whole(max_workers, 0)
    expect(whole, "max_workers", max_workers, "an integer of 0 or more, or None")
    numbers = _list_numbers(count_cores() if max_workers is None else int(max_workers))
    rows: dict[int, float | str] = {}
    end = time.monotonic() + 0.9 * seconds  # a tenth is for ending worker processes
    with same_random_numbers():
        for position, number in enumerate(numbers):
            rows[number] = _measure(make_loader, step or _nothing, end, len(numbers) - position, number)
            if rows[number] == LATE:
                break
    tuning = WorkerTuning(num_workers=_choose(rows, tolerance), rows=rows)
    if show is not None:
        show(str(tuning))
    return tuning


def _list_numbers(top: int) -> list[int]:
    """Return 0, 1, 2, 4, ... up to ``top``, in the order in which they are tried."""
    numbers = [0, *(1 << power for power in range(top.bit_length()))]
    # One worker first: its process can be ended if a batch never comes. Where each process imports torch, their start
    # may be what takes too long, and 0 workers come first.
    if top and start_method() == "fork":
        numbers[:2] = 1, 0  # in place of 0, 1
    return numbers


def _choose(rows: dict[int, float | str], tolerance: float) -> int:
    """Return the smallest number of workers within ``tolerance`` of the fastest."""
    times = {number: found for number, found in rows.items() if not isinstance(found, str)}
    if not times:
        results = "; ".join(f"num_workers={number}: {found}" for number, found in rows.items())
        raise RuntimeError(f"tune_workers got no batch ({results}). Give it more seconds, or repair the loader.")
    fastest = min(times.values())
    return min(number for number, seconds in times.items() if seconds <= fastest * (1 + tolerance))


def _measure(make_loader: Any, step: Callable[[Any], Any], end: float, parts: int, num_workers: int) -> float | str:
    """Return the mean time of a batch in seconds, or why there is none.

    It is measured for one of ``parts`` of the time that is left at the first batch.
    """
    left = end - time.monotonic()
    if left / parts < 0.01:
        return "no time"
    loader = make_loader(num_workers=num_workers)
    what = "a function that returns a DataLoader; where something wraps it, the one inside, without the wrapper"
    expect(isinstance(loader, DataLoader), "make_loader", type(loader).__name__, what, TypeError)
    loader = copy_loader(loader)  # it may be one that others iterate
    if num_workers:
        loader.timeout = left
    times: list[float] = []
    until = float("inf")
    _copy_samplers(loader)
    held = [] if loader.generator is None else [loader.generator]
    held += generators_in(loader.dataset)
    with same_random_numbers(held), contextlib.closing(_repeat(loader)) as batches:
        while not times or time.monotonic() < until:
            began = time.monotonic()
            try:
                batch = next(batches)
            except Exception as error:  # whatever a dataset raises
                return LATE if is_timeout(error) else f"{type(error).__name__}: {error}".splitlines()[0]
            loaded = time.monotonic() - began
            if not times:
                step(batch)  # memory that was shared at the fork of the workers is copied at the first writing
                until = time.monotonic() + max(0.0, end - time.monotonic()) / parts
            began = time.monotonic()
            step(batch)
            times.append(loaded + time.monotonic() - began)
    warm_up = num_workers * (loader.prefetch_factor or 0) + 1  # these hold the start of the workers
    times = times[min(warm_up, len(times) // 2) :]
    return sum(times) / len(times)


def _nothing(batch: Any) -> None:
    """Do nothing with a batch."""


def _copy_samplers(loader: Any) -> None:
    """Give a loader samplers of its own, so that those which it shares with others stay where they are."""
    found = samplers_in(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    attributes = [value for each in found for value in attributes_of(each).values()]
    data = [loader.dataset, loader.generator, *(each for each in attributes if is_a(each, Dataset))]
    shared = {id(each): each for each in data}
    try:
        copies = {name: copy.deepcopy(getattr(loader, name), shared) for name in ("sampler", "batch_sampler")}
    except Exception as error:  # whatever a sampler raises
        raise TypeError(
            f"make_loader: expected a loader whose sampler can be copied, because measuring would move it; "
            f"copy.deepcopy raised {type(error).__name__}: {error}. Leave out of it what cannot be copied, as an open "
            "file, or set num_workers yourself."
        ) from error
    # By their names, as DataLoader lets nobody set them once it is made.
    vars(loader).update(copies)


def _repeat(loader: Any) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after another, and end the worker processes."""
    iterator: Any = None
    try:
        while True:
            iterator = iter(loader)
            try:
                yield next(iterator)
            except StopIteration:
                raise ValueError("the loader is empty") from None
            yield from iterator
    finally:
        loader.close() if isinstance(loader, PrefetchLoader) else end_workers(iterator)
