"""The suite ``saves``: the longest step of a training that writes a checkpoint every ten steps."""

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

EVERY = 10  # steps
SKIPPED = 2 * EVERY + 1  # in which the memory for copies is allocated, and queues of writers settle


def saving(timer: CaseTimer, *, io: str = "") -> dict[str, float]:
    """Train with Adam, and write a checkpoint every ``EVERY`` steps.

    Args:
        timer: Of the case.
        io: A checkpoint IO of Lightning or of this package, or none; ``background`` for ours in the background.

    Returns:
        Loss; the longest step and the median of them, in seconds; the bytes of a file.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    from benchmarks.training import QUIET, Classifier, train
    from lightning_turbo import AtomicCheckpointIO
    from lightning_turbo._lightning import Callback

    class Clock(Callback):
        """Notes how long it is from the begin of a step to that of the next, without the time between rounds."""

        def __init__(self) -> None:
            self.begins: list[float] = []
            self.away = 0.0

        def __getattr__(self, name: str) -> Any:
            return getattr(timer, name)

        def step(self, samples: int) -> bool:
            began = time.perf_counter()
            running = timer.step(samples)
            self.away += time.perf_counter() - began
            return running

        def on_train_batch_start(self, *args: Any, **options: Any) -> None:
            timer.synchronize()
            self.begins.append(time.perf_counter() - self.away)

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
    spans = [after - before for before, after in itertools.pairwise(clock.begins)][SKIPPED:] or [0.0]
    longest = [max(spans[n : n + EVERY]) for n in range(0, max(1, len(spans) - EVERY + 1), EVERY)]
    return {
        **numbers,
        "longest_step_ms": 1e3 * max(spans),
        "longest_of_ten_ms": 1e3 * statistics.median(longest),
        "median_step_ms": 1e3 * statistics.median(spans),
        "file_bytes": size,
    }


NONE, OURS = "no checkpoints", "AtomicCheckpointIO(background=True)"
SUITE = Suite(
    name="saves",
    about=f"A perceptron with Adam that writes a checkpoint every {EVERY} steps, to the system's temporary folder.",
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
