"""The suite ``memory``: memory of weights, gradients and optimizer state at each level, and peak memory of a step."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import statistics
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.suite import Aim, Case, CaseTimer, Suite
from benchmarks.work import Endless, conv_net, image_batches
from lightning_turbo.measure import peak_bytes

__all__ = ["SUITE"]


def _current_bytes(device: torch.device) -> int | None:
    """Return the bytes in use: allocated by torch on CUDA, resident on the CPU; ``None`` without ``/proc``."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    counts = Path("/proc/self/statm")
    return int(counts.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if counts.exists() else None


def _reset_peak(device: torch.device) -> None:
    """Set the peak to the bytes in use.

    On the CPU this needs permission to write to ``/proc/self/clear_refs``; otherwise the old peak remains.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def training_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of weights, buffers, gradients, masters and optimizer state; shared storage counts once."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [*module.parameters(), *(parameter for group in groups for parameter in group["params"])]
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    held = [*parameters, *(p.grad for p in parameters), *module.buffers(), *states]
    storages = [tensor.untyped_storage() for tensor in held if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _task(timer: CaseTimer, kind: str) -> tuple[nn.Module, Endless]:
    """Return a network and its batches; ``"activations"``, ``"weights"`` or both (``"even"``) fill the memory."""
    larger = 4 if timer.device.type == "cuda" else 1
    if kind == "activations":
        return conv_net(10), Endless(image_batches(timer, (3, 32, 32), 10, 128 * larger, count=2))
    width, depth, batch = (1536, 4, 16) if kind == "weights" else (1024, 6, 1024 * larger)
    layers = [(nn.Linear(width * larger, width * larger), nn.ReLU()) for _ in range(depth)]
    net = nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(width * larger, 10))
    return net, Endless(image_batches(timer, (width * larger,), 10, batch, count=2))


def memory(timer: CaseTimer, *, kind: str, release: bool = False, **options: Any) -> dict[str, float]:
    """Train with a Trainer and measure the memory of each step.

    Args:
        timer: Timer of the case.
        kind: As in ``_task``.
        release: Whether to add ``GradToNone``.
        options: Arguments of ``train``.

    Returns:
        The loss; the bytes of weights, gradients and state before an optimizer step; the peaks of the forward pass and
        of the whole step, minus the memory in use before the network was built.
    """
    from benchmarks.training import QUIET, Classifier, train
    from lightning_turbo import GradToNone
    from lightning_turbo._lightning import Callback, Trainer

    class PeakMemory(Callback):
        """Records the peaks from the third step on: in the first two, optimizer state and libraries still grow."""

        def __init__(self) -> None:
            self.values: dict[str, list[int]] = {}
            self.steps = 0

        def record(self, name: str, value: int | None) -> None:
            if self.steps > 2 and value is not None:
                self.values.setdefault(name, []).append(value)

        def on_train_batch_start(self, *args: Any, **options: Any) -> None:
            self.steps += 1
            _reset_peak(timer.device)

        def on_before_backward(self, *args: Any, **options: Any) -> None:
            self.record("forward_peak_bytes", peak_bytes(timer.device))

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
            self.record("state_bytes", training_bytes(pl_module, trainer.optimizers))

        def on_train_batch_end(self, *args: Any, **options: Any) -> None:
            self.record("step_peak_bytes", peak_bytes(timer.device))

    adam: Any = partial(torch.optim.Adam, lr=1e-4)
    # A tiny network trains first, so that what libraries load on first use is in memory before the measurement.
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
    accelerator = "gpu" if timer.device.type == "cuda" else "cpu"
    tiny = Endless(image_batches(timer, (3, 8, 8), 2, 2, count=1))
    Trainer(max_steps=2, accelerator=accelerator, devices=1, **QUIET).fit(Classifier(net, adam), tiny)
    gc.collect()

    before = _current_bytes(timer.device)
    net, loader = _task(timer, kind)
    peaks = PeakMemory()
    callbacks: list[Callback] = [peaks, *([GradToNone()] if release else [])]
    module = Classifier(net.to(timer.device), adam)
    numbers = train(timer, module, loader, samples=len(loader.batches[0][1]), callbacks=callbacks, **options)
    medians = {name: statistics.median(values) for name, values in peaks.values.items()}
    if before is not None:
        medians.update({name: value - before for name, value in medians.items() if name.endswith("peak_bytes")})
    return {**numbers, **medians}


EVEN = "even: Lightning 32-true"
LEVELS: dict[str, dict[str, Any]] = {
    "Lightning 32-true": {},
    "Lightning bf16-mixed": {"precision": "bf16-mixed"},
    "O0": {"amp": {"opt_level": "O0", "dtype": None}},
    **{level: {"amp": {"opt_level": level, "dtype": "bf16"}} for level in ("O1", "O2", "O3")},
}
SUITE = Suite(
    name="memory",
    about="Peak memory of a training step with Adam, minus the memory in use before the network was built.",
    cases=[
        Case(name=EVEN, run=memory, config={"kind": "even"}),
        Case(name="even: GradToNone", run=memory, config={"kind": "even", "release": True}, kind="ours"),
        *(
            Case(
                name=f"{kind}: {level}", run=memory, config={"kind": kind, **options},
                base=f"{kind}: Lightning 32-true", kind="ours" if "amp" in options else "torch",
            )
            for kind in ("activations", "weights")
            for level, options in LEVELS.items()
        ),
    ],
    aims=[
        Aim("activations: O2", "activations: Lightning 32-true", 0.6, "step_peak_bytes"),
        Aim("weights: O2", "weights: Lightning 32-true", 1.13, "state_bytes"),
        Aim("weights: O3", "weights: Lightning 32-true", 0.51, "state_bytes"),
        Aim("even: GradToNone", EVEN, 0.9, "forward_peak_bytes"),
    ],
    quick=(EVEN, "even: GradToNone"),
    steps=1,
    rounds=3,
    warmup=3,
    quantity="step_peak_bytes",
    # glibc returns tensors of 64 KiB and more to the system at once, so that the peak is that of the tensors.
    environment={"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
)  # fmt: skip
