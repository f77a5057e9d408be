"""Measures what a step costs while the Doctor is at work, and after it: ``python -m tests.integration.doctor_price``.

Three runs in turn, again and again: with a Doctor, without, and without once more, which shows the noise. Every run is
a fit of its own on one thread; a run's figure is the tenth percentile of its steps, which other programs on the machine
move less than the median.
"""

import contextlib
import io
import logging
import os
import statistics
import sys
import time
import warnings

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import Doctor
from tests.integration.doctor_runs import Noisy, trained

STEPS, ROUNDS = 500, 25
SETTINGS = {"warmup": 20, "timed": 20, "watched": 20}
PHASES = {"while it times": (21, 40), "while it watches": (41, 60), "afterwards": (100, STEPS)}


class Long(Noisy):
    """Enough steps for a median."""

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(4 * STEPS, 1, 6, 6), torch.zeros(4 * STEPS).long()), batch_size=4)


class Clock(Callback):
    """When each step begins."""

    def __init__(self):
        self.times = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.times.append(time.perf_counter())


def seconds(*callbacks):
    """A quick step of each phase."""
    clock = Clock()
    with contextlib.redirect_stdout(io.StringIO()):
        trained(clock, *callbacks, model=Long)
    steps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {name: statistics.quantiles(steps[first:last], n=10)[0] for name, (first, last) in PHASES.items()}


def main():
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seconds()
    runs = {"with a Doctor": lambda: seconds(Doctor(**SETTINGS)), "without": seconds, "without, again": seconds}
    rows = {name: [] for name in runs}
    for number in range(ROUNDS):
        order = list(runs) if number % 2 else list(reversed(runs))
        for name in order:
            rows[name].append(runs[name]())
    print(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, {ROUNDS} rounds of {STEPS} steps")
    for phase in PHASES:
        plain = [row[phase] for row in rows["without"]]
        print(f"{phase}: a step without a Doctor takes {statistics.median(plain) * 1e3:.3f} ms")
        for name in ("with a Doctor", "without, again"):
            ratios = [row[phase] / one for row, one in zip(rows[name], plain, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"  {name}: {middle:.4f} of that, quartiles {low:.4f} to {high:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
