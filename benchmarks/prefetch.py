"""The suites ``prefetch`` and ``grid``: how much of loading and computing overlaps, in the main cells or in all.

A cell is a kind of step beside a kind of load. Its bound is the longer of the two alone, so that the time of a loader
divided by the bound is 1 where everything overlaps.
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


def _run_step(cell: Cell) -> None:
    """One step of the cell's kind."""
    if cell.step == "free":
        time.sleep(STEP)
        return
    for _ in range(SLICES):
        _spend("python", STEP / SLICES / 2)
        time.sleep(STEP / SLICES / 2)


class Loads(Dataset[int]):
    """Samples that take the cell's time to load."""

    def __init__(self, cell: Cell, batches: int = 100_000) -> None:
        self.cell = cell
        self.batches = batches

    def __len__(self) -> int:
        return self.batches * SAMPLES

    def __getitem__(self, index: int) -> int:
        share = (4.5 if index // SAMPLES % 8 == 7 else 0.5) if self.cell.uneven else 1.0
        _spend(self.cell.load, share * self.cell.ratio * STEP / SAMPLES)
        return index


def _seconds(things: Iterable[Any], skip: int) -> float:
    """Mean time of each of some things, without the first ``skip``."""
    ends = [time.perf_counter() for _ in things]
    return (ends[-1] - ends[skip - 1]) / (len(ends) - skip)


def bound_case(timer: CaseTimer, **cell: Any) -> dict[str, float]:
    """The longer of load and step, alone."""
    here = Cell(**cell)
    loads = _seconds(DataLoader(Loads(here, 24), SAMPLES), 8)
    batches, steps = iter(DataLoader(Loads(here), SAMPLES)), _seconds((_run_step(here) for _ in range(16)), 2)
    while True:
        next(batches) if loads > steps else _run_step(here)
        if not timer.step(samples=SAMPLES):
            return {}


def build(name: str, cell: Cell) -> Iterable[Any]:
    """The cell's loader of one kind."""
    data, options = Loads(cell), {"batch_size": SAMPLES, "num_workers": cell.workers}
    if name == MONAI:
        return monai_loader(data, None, SAMPLES, cell.workers)
    kind, _, threads = name.partition(", ")
    if threads:
        return PrefetchLoader(data, threads=int(threads.split()[0]), **options)
    return {"DataLoader": DataLoader, "BackgroundGenerator": Published, OURS: PrefetchLoader}[kind](data, **options)


def loader_case(timer: CaseTimer, *, loader: str, **cell: Any) -> dict[str, float]:
    """Load and step with one kind of loader."""
    here = Cell(**cell)
    batches: Any = iter(build(loader, here))
    for _ in batches:
        _run_step(here)
        if not timer.step(samples=SAMPLES):
            break
    if hasattr(batches, "close"):
        batches.close()
    return {}


MONAI, OURS = "MONAI's ThreadDataLoader", "PrefetchLoader"
LOADERS = ("DataLoader", "BackgroundGenerator", MONAI, OURS)
TWO, FOUR = f"{OURS}, 2 threads", f"{OURS}, 4 threads"


def grid(ratios: tuple[float, ...] = (0.5, 1.0, 2.0), workers: tuple[int, ...] = (0, 1, 2)) -> list[Cell]:
    """The cells of some ratios and numbers of workers, the uneven ones with a ratio of 1."""
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


# The largest time of a step over the bound, in cells that the thread is made for.
LIMITS = {("free", "io"): 1 / 0.95, ("free", "compute"): 1 / 0.95, ("launch", "io"): 1 / 0.88,
          ("launch", "compute"): 1 / 0.88}  # fmt: skip
MAIN = [cell for cell in grid((1.0,), (0,)) if not (cell.uneven and cell.step == "launch")]
# For several threads, where the bound is the load in one; and threads in a worker process, beside the GIL's step.
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
    about="Loading beside computing: a load takes as long as a step (10 ms), or twice as long for several threads. The "
    "aims are meant for two cores on which nothing else runs.",
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
    about="Loading beside computing in every cell: kinds of step and load, their ratio, and worker processes.",
    cases=[case for cell in grid() for case in _cases(cell, LOADERS)],
    quick=tuple(f"{MAIN[0]}: {name}" for name in ("bound", OURS)),
    **TIMES,
)
