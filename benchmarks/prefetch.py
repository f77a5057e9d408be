"""The suite ``prefetch``: how much of loading and computing overlaps, and the grid behind the documentation's table.

``python -m benchmarks.prefetch`` measures the whole grid in one process, every cell interleaved with its
bound, and writes a Markdown table; ``--quick`` takes the cells with ratio 1 and no workers. Efficiency is
``max(t_load, t_step) / achieved time of a step``, with both times measured alone in the same minute.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from prefetch_generator import BackgroundGenerator
from torch.utils.data import DataLoader, Dataset

from benchmarks.meter import Meter
from benchmarks.suite import Aim, Suite
from lightning_turbo.data.loader import PrefetchLoader

__all__ = ["LOADERS", "SUITE", "Cell", "grid", "measure_cell"]

STEP = 0.010  # seconds of a step
SAMPLES = 8  # in a batch
SLICES = 5  # how often a launch-bound step changes between Python and waiting


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One place of the grid.

    Attributes:
        step: ``"free"`` sleeps, as a step that waits for the device; ``"launch"`` runs Python half of its time, as
            one that is bound by launching kernels.
        load: ``"io"`` sleeps, ``"compute"`` hashes with the GIL released, ``"python"`` holds the GIL.
        ratio: Time of a load divided by that of a step.
        uneven: Whether one batch in 8 takes nine times as long as the others, with the same mean.
        workers: Worker processes.
    """

    step: str
    load: str
    ratio: float = 1.0
    uneven: bool = False
    workers: int = 0

    def __str__(self) -> str:
        shape = "uneven" if self.uneven else "even"
        return f"{self.step} step, {shape} {self.load} load x{self.ratio:g}, {self.workers} workers"


class Published(DataLoader[Any]):
    """The usual recipe with prefetch_generator."""

    def __iter__(self) -> Any:
        return BackgroundGenerator(super().__iter__())


LOADERS: dict[str, type[DataLoader[Any]]] = {
    "DataLoader": DataLoader,
    "BackgroundGenerator": Published,
    "PrefetchLoader": PrefetchLoader,
}
THREADS = {f"PrefetchLoader, {count} threads": functools.partial(PrefetchLoader, threads=count) for count in (2, 4)}

_BUFFER = bytes(1 << 22)
_CLOSE = 2e-5  # seconds of work that are not worth another piece


def _python(count: int) -> None:
    total = 0
    for n in range(count):
        total += n


def _hash(count: int) -> None:
    hashlib.sha256(memoryview(_BUFFER)[:count])  # without the GIL


_rates: dict[Any, float] = {}  # how much of each kind of work was done in a second of processor time, lately


def _rate(work: Any, count: int = 20_000) -> float:
    """How much of ``work`` is done in a second, by doing some."""
    started = time.thread_time()
    work(count)
    rate = _rates[work] = count / max(time.thread_time() - started, 1e-9)
    return rate


def _spend(kind: str, seconds: float) -> None:
    """Sleep, or work for so many seconds of this thread's own processor time.

    Waiting for the GIL or for a core is not work: alone it takes ``seconds``, with others in the way longer. The clock
    decides, and half of the time goes by before the pace of just now is relied on, so that a processor that changes
    its frequency changes nothing.
    """
    if kind == "io":
        time.sleep(seconds)
        return
    work = _hash if kind == "compute" else _python
    end = time.thread_time() + seconds
    share, rate = 0.5, _rates.get(work) or _rate(work)
    while (left := end - time.thread_time()) > _CLOSE:
        rate = _rate(work, max(1, int(rate * left * share)))
        share = 0.9


def run_step(cell: Cell) -> None:
    """One step of the cell's kind."""
    if cell.step == "free":
        time.sleep(STEP)
        return
    for _ in range(SLICES):
        _spend("python", STEP / SLICES / 2)
        time.sleep(STEP / SLICES / 2)


class Loads(Dataset[int]):
    """Samples that take the cell's time to load."""

    def __init__(self, cell: Cell, batches: int) -> None:
        self.cell = cell
        self.batches = batches

    def __len__(self) -> int:
        return self.batches * SAMPLES

    def __getitem__(self, index: int) -> int:
        share = (4.5 if index // SAMPLES % 8 == 7 else 0.5) if self.cell.uneven else 1.0
        _spend(self.cell.load, share * self.cell.ratio * STEP / SAMPLES)
        return index


def build(name: str, cell: Cell, batches: int) -> DataLoader[Any]:
    """The cell's loader of one kind."""
    return {**LOADERS, **THREADS}[name](Loads(cell, batches), batch_size=SAMPLES, num_workers=cell.workers)


def _seconds(batches: Iterable[Any], cell: Cell | None, skip: int) -> float:
    """Mean time of a batch with its step, without the first ``skip``."""
    count, started = 0, time.perf_counter()
    for number, _ in enumerate(batches):
        if cell is not None:
            run_step(cell)
        if number == skip - 1:
            started = time.perf_counter()
        count += number >= skip
    return (time.perf_counter() - started) / count


def measure_cell(cell: Cell, *, rounds: int = 3, steps: int = 32) -> dict[str, float]:
    """Measure one cell in this process: its bound and every loader in turn, ``rounds`` times.

    Args:
        cell: What to measure.
        rounds: How often, 1 or more; the medians are taken.
        steps: Steps of a round, 8 or more; 16 further ones go before, in which queues settle.

    Returns:
        The efficiency of each loader, and under ``"seconds"`` the bound, in seconds.
    """
    skip = 16
    times: dict[str, list[float]] = {"bound": [], **{name: [] for name in LOADERS}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of more workers than cores
        for _ in range(rounds):
            alone = DataLoader(Loads(cell, steps + 8), batch_size=SAMPLES)
            load = _seconds(alone, None, 8)
            step = _seconds(range(steps // 2), cell, 2)
            times["bound"].append(max(load, step))
            for name in LOADERS:
                loader = build(name, cell, steps + skip)
                times[name].append(_seconds(loader, cell, skip))
                del loader
                gc.collect()
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {"seconds": middle["bound"], **{name: middle["bound"] / middle[name] for name in LOADERS}}


def grid(quick: bool = False) -> list[Cell]:
    """The cells of the documentation's table."""
    steps, loads = ("free", "launch"), ("io", "compute", "python")
    ratios, workers = ((1.0,), (0,)) if quick else ((0.5, 1.0, 2.0), (0, 1, 2))
    even = [
        Cell(step=step, load=load, ratio=ratio, workers=count)
        for step, load, ratio, count in itertools.product(steps, loads, ratios, workers)
    ]
    uneven = [
        Cell(step=step, load=load, uneven=True, workers=count)
        for step, load, count in itertools.product(steps, loads, workers)
    ]
    return even + uneven


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


SUITE = Suite(
    "prefetch",
    "Loading beside computing: a load takes as long as a step (10 ms), or twice as long for several threads.",
    steps=32,
    quick_steps=16,
    quick_seconds=5,
    rounds=9,
    warmup=20,
    lead=16,
)


def bound_case(meter: Meter, **cell: Any) -> dict[str, float]:
    """The longer of load and step, alone."""
    here = Cell(**cell)
    loads = _seconds(DataLoader(Loads(here, 24), batch_size=SAMPLES), None, 8)
    steps = _seconds(range(16), here, 2)
    batches = endless(DataLoader(Loads(here, 1000), batch_size=SAMPLES))
    while True:
        next(batches) if loads > steps else run_step(here)
        if not meter.step(samples=SAMPLES):
            return {}


def loader_case(meter: Meter, *, loader: str, **cell: Any) -> dict[str, float]:
    """Load and step with one kind of loader."""
    here = Cell(**cell)
    batches = iter(build(loader, here, 100_000))
    for _ in batches:
        run_step(here)
        if not meter.step(samples=SAMPLES):
            break
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    return {}


# The aims of the cells that the thread is made for: (step, load, uneven) -> largest time of a step over the bound.
_AIMS = {
    ("free", "io", False): 1 / 0.95,
    ("free", "compute", False): 1 / 0.95,
    ("launch", "io", False): 1 / 0.88,
    ("launch", "compute", False): 1 / 0.88,
    ("free", "io", True): 1 / 0.95,
    ("free", "compute", True): 1 / 0.95,
}


def _register() -> None:
    for cell in grid(quick=True):
        if cell.uneven and cell.step == "launch":
            continue
        _add(cell, list(LOADERS))
        limit = _AIMS.get((cell.step, cell.load, cell.uneven))
        if limit is not None:
            _aim(f"{cell}: PrefetchLoader", f"{cell}: bound", limit)
    for load in ("io", "compute"):  # for several threads; the bound is then the load in one
        cell = Cell(step="free", load=load, ratio=2.0)
        _add(cell, ["DataLoader", "PrefetchLoader", *THREADS])
        _aim(f"{cell}: PrefetchLoader, 2 threads", f"{cell}: bound", 0.5 / 0.95)
    for load in ("io", "compute"):  # threads in a worker process, beside a step that holds the GIL half of its time
        cell = Cell(step="launch", load=load, workers=1)
        _add(cell, ["DataLoader", "PrefetchLoader, 4 threads"])
        _aim(f"{cell}: PrefetchLoader, 4 threads", f"{cell}: bound", 1 / 0.95)


def _add(cell: Cell, loaders: list[str]) -> None:
    """Add the cases of one cell, none of ours slower than the plain loader."""
    bound = f"{cell}: bound"
    first = SUITE.baseline is None  # the one cell of --quick: each case costs the start of a process
    SUITE.add(bound, bound_case, base=bound, baseline=first, quick=first, config=asdict(cell))
    for name in loaders:
        ours = name not in ("DataLoader", "BackgroundGenerator")
        SUITE.add(
            f"{cell}: {name}",
            loader_case,
            config={**asdict(cell), "loader": name},
            base=bound,
            peer=name == "BackgroundGenerator",
            ours=ours,
            quick=first,
        )
        if ours:
            SUITE.aims.append(Aim(f"{cell}: {name}", f"{cell}: DataLoader", at_most=1.02))


def _aim(case: str, bound: str, limit: float) -> None:
    SUITE.aims.append(Aim(case, bound, at_most=limit, condition="two cores, nothing else running"))


_register()


def main(arguments: list[str] | None = None) -> None:
    """Measure the grid and write its table to the standard output, row by row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefetch", description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="only ratio 1 without workers")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a cell (default 3)")
    parser.add_argument("--only", default="", help="only cells whose name holds this text")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    write = sys.stdout.write
    write(f"| cell | {' | '.join(LOADERS)} |\n|---|{'---|' * len(LOADERS)}\n")
    for cell in grid(chosen.quick):
        if chosen.only in str(cell):
            found = measure_cell(cell, rounds=chosen.rounds)
            write(f"| {cell} | {' | '.join(f'{found[name]:.2f}' for name in LOADERS)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
