"""The suite ``saves``: the longest step of a run that writes a checkpoint every ten steps."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from benchmarks.suite import Aim, Case, CaseTimer, Suite
from benchmarks.work import Endless, image_batches

__all__ = ["SUITE"]

EVERY = 10  # steps between two checkpoints
SKIPPED = 2 * EVERY + 1  # first steps, in which memory for copies is allocated and the queues of writers fill


def saving(timer: CaseTimer, *, io: str = "") -> dict[str, float]:
    """Train with Adam, and write a checkpoint every ``EVERY`` steps.

    Args:
        timer: Timer of the case.
        io: Checkpoint IO: ``"torch"`` or ``"async"`` of Lightning, ``"atomic"`` or ``"background"`` of this package;
            empty for no checkpoints.

    Returns:
        The loss; the longest step, the median of the longest of each ten steps, and the median step, in milliseconds;
        the size of a checkpoint in bytes.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    from benchmarks.training import QUIET, Classifier, train
    from lightning_turbo import AtomicCheckpointIO
    from lightning_turbo._lightning import Callback

    class Clock(Callback):
        """Records when each step starts, without the time between rounds.

        It also replaces the timer of the case, so that it can measure how long ``step`` waits.
        """

        def __init__(self) -> None:
            self.starts: list[float] = []
            self.waited = 0.0

        def __getattr__(self, name: str) -> Any:
            return getattr(timer, name)

        def step(self, samples: int) -> bool:
            started = time.perf_counter()
            running = timer.step(samples)
            self.waited += time.perf_counter() - started
            return running

        def on_train_batch_start(self, *args: Any, **options: Any) -> None:
            timer.synchronize()
            self.starts.append(time.perf_counter() - self.waited)

    width, depth = (64, 2) if timer.quick else (1024, 12) if timer.device.type == "cpu" else (4096, 12)
    layers = [(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    net = nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(width, 10)).to(timer.device)
    loader = Endless(image_batches(timer, (width,), 10, 128, count=2))
    clock, ios = Clock(), {
        "torch": TorchCheckpointIO, "async": AsyncCheckpointIO, "atomic": AtomicCheckpointIO,
        "background": partial(AtomicCheckpointIO, background=True),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        saves = [ModelCheckpoint(folder, every_n_train_steps=EVERY, filename="last", enable_version_counter=False)]
        options: dict[str, Any] = {"plugins": [ios[io]()], "enable_checkpointing": True} if io else {}
        numbers = train(
            cast(CaseTimer, clock), Classifier(net, partial(torch.optim.Adam, lr=1e-4)), loader, samples=128,
            callbacks=[*(saves if io else []), clock], quiet=False, **{**QUIET, **options},
        )  # fmt: skip
        size = sum(file.stat().st_size for file in Path(folder).glob("*.ckpt"))
    times = [after - before for before, after in itertools.pairwise(clock.starts)][SKIPPED:] or [0.0]
    longest = [max(times[n : n + EVERY]) for n in range(0, max(1, len(times) - EVERY + 1), EVERY)]
    return {
        **numbers,
        "longest_step_ms": 1e3 * max(times),
        "longest_of_ten_ms": 1e3 * statistics.median(longest),
        "median_step_ms": 1e3 * statistics.median(times),
        "file_bytes": size,
    }


NONE, OURS = "no checkpoints", "AtomicCheckpointIO(background=True)"
SUITE = Suite(
    name="saves",
    about=f"A perceptron trained with Adam, with a checkpoint every {EVERY} steps in the system's temporary folder.",
    cases=[
        Case(name=NONE, run=saving),
        Case(name="Lightning's TorchCheckpointIO", run=saving, config={"io": "torch"}),
        Case(name="Lightning's AsyncCheckpointIO", run=saving, config={"io": "async"}),
        Case(name="AtomicCheckpointIO", run=saving, config={"io": "atomic"}, kind="ours"),
        Case(name=OURS, run=saving, config={"io": "background"}, kind="ours"),
    ],
    aims=[
        Aim(OURS, "Lightning's TorchCheckpointIO", 0.5, "longest_of_ten_ms"),
        Aim(OURS, "Lightning's AsyncCheckpointIO", 1.0, "longest_of_ten_ms"),
    ],
    quick=(NONE, OURS),
    steps=2 * EVERY,
    rounds=5,
    quantity="longest_of_ten_ms",
)  # fmt: skip
