"""The suites ``prefetch`` (the main cells) and ``grid`` (all cells): how well loading overlaps with computing.

A cell is a kind of step combined with a kind of load. Its bound is the longer of the two alone: the time of a loader
divided by the bound is 1 if loading and computing overlap completely.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from prefetch_generator import BackgroundGenerator
from torch.utils.data import DataLoader, Dataset

from benchmarks.peers import monai_loader
from benchmarks.suite import Aim, Case, CaseTimer, Suite
from lightning_turbo.data.loading.loader import PrefetchLoader

__all__ = ["GRID", "SUITE", "Cell", "grid"]

STEP = 0.010  # duration of a step in seconds
SAMPLES = 8  # per batch
SLICES = 5  # how often a launch-bound step alternates between Python and waiting


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A kind of step combined with a kind of load.

    Attributes:
        step: ``"free"`` sleeps, like a step that waits for the device. ``"launch"`` runs Python for half of its time,
            like a step that is bound by kernel launches.
        load: ``"io"`` sleeps, ``"compute"`` hashes without the GIL, ``"python"`` holds the GIL.
        ratio: Time of a load divided by the time of a step.
        uneven: Whether every eighth batch takes nine times as long as the others, with the same mean.
        workers: Number of worker processes.
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
    """The widely used recipe with ``prefetch_generator``."""

    def __iter__(self) -> Any:
        return BackgroundGenerator(super().__iter__())


_BUFFER = bytes(1 << 22)
_CLOSE = 2e-5  # seconds of work that are too short for another piece


def _python(count: int) -> None:
    total = 0
    for n in range(count):
        total += n


def _hash(count: int) -> None:
    hashlib.sha256(memoryview(_BUFFER)[:count])  # releases the GIL


_rates: dict[Any, float] = {}  # kind of work -> amount per second of processor time, measured last


def _rate(work: Any, count: int = 20_000) -> float:
    """Return the amount of ``work`` per second, measured by doing ``count`` of it."""
    started = time.thread_time()
    work(count)
    rate = _rates[work] = count / max(time.thread_time() - started, 1e-9)
    return rate


def _spend(kind: str, seconds: float) -> None:
    """Sleep, or work for ``seconds`` of processor time of this thread.

    The time of waiting for the GIL or for a core is added. The work is split into pieces: the first takes half of the
    time by the last known rate, and measures the rate for the next, so that a changing frequency of the processor does
    not matter.
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


def _run_step(cell: Cell) -> None:
    """Run one step of the kind of the cell."""
    if cell.step == "free":
        time.sleep(STEP)
        return
    for _ in range(SLICES):
        _spend("python", STEP / SLICES / 2)
        time.sleep(STEP / SLICES / 2)


class Loads(Dataset[int]):
    """Samples that take as long to load as the cell says."""

    def __init__(self, cell: Cell, batches: int = 100_000) -> None:
        self.cell = cell
        self.batches = batches

    def __len__(self) -> int:
        return self.batches * SAMPLES

    def __getitem__(self, index: int) -> int:
        factor = (4.5 if index // SAMPLES % 8 == 7 else 0.5) if self.cell.uneven else 1.0
        _spend(self.cell.load, factor * self.cell.ratio * STEP / SAMPLES)
        return index


def _seconds(items: Iterable[Any], skip: int) -> float:
    """Return the mean time per item, without the first ``skip`` items."""
    ends = [time.perf_counter() for _ in items]
    return (ends[-1] - ends[skip - 1]) / (len(ends) - skip)


def bound_case(timer: CaseTimer, **settings: Any) -> dict[str, float]:
    """Run the longer of load and step alone."""
    cell = Cell(**settings)
    loads = _seconds(DataLoader(Loads(cell, 24), SAMPLES), 8)
    batches, steps = iter(DataLoader(Loads(cell), SAMPLES)), _seconds((_run_step(cell) for _ in range(16)), 2)
    while True:
        next(batches) if loads > steps else _run_step(cell)
        if not timer.step(samples=SAMPLES):
            return {}


def build(name: str, cell: Cell) -> Iterable[Any]:
    """Build the loader with this name for a cell."""
    data, options = Loads(cell), {"batch_size": SAMPLES, "num_workers": cell.workers}
    if name == MONAI:
        return monai_loader(data, None, SAMPLES, cell.workers)
    kind, _, threads = name.partition(", ")
    if threads:
        return PrefetchLoader(data, threads=int(threads.split()[0]), **options)
    return {"DataLoader": DataLoader, "BackgroundGenerator": Published, OURS: PrefetchLoader}[kind](data, **options)


def loader_case(timer: CaseTimer, *, loader: str, **settings: Any) -> dict[str, float]:
    """Run the step of a cell on batches of one loader."""
    cell = Cell(**settings)
    batches: Any = iter(build(loader, cell))
    for _ in batches:
        _run_step(cell)
        if not timer.step(samples=SAMPLES):
            break
    if hasattr(batches, "close"):
        batches.close()
    return {}


MONAI, OURS = "MONAI's ThreadDataLoader", "PrefetchLoader"
LOADERS = ("DataLoader", "BackgroundGenerator", MONAI, OURS)
TWO, FOUR = f"{OURS}, 2 threads", f"{OURS}, 4 threads"


def grid(ratios: tuple[float, ...] = (0.5, 1.0, 2.0), workers: tuple[int, ...] = (0, 1, 2)) -> list[Cell]:
    """Return the cells with these ratios and numbers of workers; uneven ones have a ratio of 1."""
    pairs = list(itertools.product(("free", "launch"), ("io", "compute", "python")))
    shapes = [(False, ratio) for ratio in ratios], [(True, 1.0)]
    return [
        Cell(step=step, load=load, ratio=ratio, uneven=uneven, workers=count)
        for group in shapes
        for (step, load), (uneven, ratio), count in itertools.product(pairs, group, workers)
    ]


def _cases(cell: Cell, loaders: Iterable[str]) -> Iterator[Case]:
    bound = f"{cell}: bound"
    yield Case(name=bound, run=bound_case, base=bound, config=asdict(cell))
    for name in loaders:
        kind = {"DataLoader": "torch", "BackgroundGenerator": "peer", MONAI: "peer"}.get(name, "ours")
        needs = ("monai",) if name == MONAI else ()
        config = {**asdict(cell), "loader": name}
        yield Case(name=f"{cell}: {name}", run=loader_case, config=config, base=bound, kind=kind, needs=needs)


# Largest ratio of time to bound, in the cells that the background thread is meant for.
LIMITS = {("free", "io"): 1 / 0.95, ("free", "compute"): 1 / 0.95, ("launch", "io"): 1 / 0.88,
          ("launch", "compute"): 1 / 0.88}  # fmt: skip
MAIN = [cell for cell in grid((1.0,), (0,)) if not (cell.uneven and cell.step == "launch")]
# SLOW is for several threads: its bound is the load in one thread. WORKER has threads in a worker process.
SLOW = [Cell(step="free", load=load, ratio=2.0) for load in ("io", "compute")]
WORKER = [Cell(step="launch", load=load, workers=1) for load in ("io", "compute")]
CELLS = [
    *((cell, LOADERS) for cell in MAIN),
    *((cell, ("DataLoader", OURS, TWO, FOUR)) for cell in SLOW),
    *((cell, ("DataLoader", FOUR)) for cell in WORKER),
]
TIMES: dict[str, Any] = {"steps": 32, "rounds": 9, "warmup": 20, "lead": 16}
SUITE = Suite(
    name="prefetch",
    about="Loading while computing: a load takes as long as a step (10 ms), or twice as long for several threads. The "
    "aims are for two cores on which nothing else runs.",
    cases=[case for cell, loaders in CELLS for case in _cases(cell, loaders)],
    aims=[
        *(Aim(f"{cell}: {n}", f"{cell}: DataLoader", 1.02) for cell, names in CELLS for n in names if OURS in n),
        *(
            Aim(f"{cell}: {OURS}", f"{cell}: bound", LIMITS[cell.step, cell.load])
            for cell in MAIN
            if (cell.step, cell.load) in LIMITS
        ),
        *(Aim(f"{cell}: {TWO}", f"{cell}: bound", 0.5 / 0.95) for cell in SLOW),
        *(Aim(f"{cell}: {FOUR}", f"{cell}: bound", 1 / 0.95) for cell in WORKER),
    ],
    quick=tuple(f"{MAIN[0]}: {name}" for name in ("bound", "DataLoader", "BackgroundGenerator", OURS)),
    **TIMES,
)
GRID = Suite(
    name="grid",
    about="Loading while computing in every cell: kinds of step and load, their ratio, and worker processes.",
    cases=[case for cell in grid() for case in _cases(cell, LOADERS)],
    quick=tuple(f"{MAIN[0]}: {name}" for name in ("bound", OURS)),
    **TIMES,
)
