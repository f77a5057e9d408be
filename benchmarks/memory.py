"""The suite ``memory``: what weights, gradients and optimizer state take at each level, and the peak of a step."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.meter import Meter
from benchmarks.suite import Aim, Suite
from benchmarks.workloads import Batch, Endless, conv_net, image_batches
from lightning_turbo.measure import current_bytes, peak_bytes

__all__ = ["SUITE", "training_bytes"]

SUITE = Suite(
    "memory",
    "Peak of a training step above the memory before the network was built, with Adam.",
    steps=1,
    quick_steps=1,
    rounds=3,
    quick_seconds=6,
    warmup=3,
    lead=1,
    quantity="step_peak_bytes",
    # Tensors of 64 KiB and more go back to the system as soon as they are released, so that the peak is theirs.
    environment={"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
)


def _held_by(module: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Every weight, buffer, gradient, master and state tensor of a training."""
    parameters = [*module.parameters(), *(p for o in optimizers for group in o.param_groups for p in group["params"])]
    for parameter in parameters:
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def reset_peak(device: torch.device) -> None:
    """Let the peak start again from the bytes in use now.

    Linux without permission to write ``/proc/self/clear_refs`` keeps the old peak.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def training_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of weights, gradients, masters and optimizer state, shared storage counted once.

    Args:
        module: The network.
        optimizers: Its optimizers.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _held_by(module, optimizers)}
    return sum(storages.values())


def _task(meter: Meter, kind: str) -> tuple[nn.Module, Endless, int]:
    """A network and its batches.

    Args:
        meter: Of the case.
        kind: ``"activations"``, ``"weights"`` or ``"even"``: which of the two takes the memory.
    """
    larger = 4 if meter.device.type == "cuda" else 1
    if kind == "activations":
        batch = 128 * larger
        net = conv_net(10)
        return net.to(meter.device), Endless(image_batches(meter, (3, 32, 32), 10, batch, count=2)), batch
    width, depth = (1536 * larger, 4) if kind == "weights" else (1024 * larger, 6)
    batch = 16 if kind == "weights" else width
    layers = [(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    net = nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(width, 10))
    return net.to(meter.device), Endless(image_batches(meter, (width,), 10, batch, count=2)), batch


def memory(
    meter: Meter, *, kind: str, amp: dict[str, Any] | None = None, release: bool = False, **trainer: Any
) -> dict[str, float]:
    """Train under a Trainer and watch the memory of each step.

    Args:
        meter: Of the case.
        kind: As in ``_task``.
        amp: Arguments of ``ApexAMP``, or ``None`` for none.
        release: Whether ``GradToNone`` is added.
        trainer: Arguments of the Trainer.

    Returns:
        Loss; bytes of weights, gradients and state before an optimizer step; peaks of the forward pass and of the
        whole step, above what the process took before the network was built.
    """
    from benchmarks.training import QUIET, Classifier, apex_amp, train
    from lightning_turbo._lightning import Callback

    class Watch(Callback):
        """Reads the peaks of the steps after the second; in the first two, optimizer and libraries still grow."""

        def __init__(self) -> None:
            self.seen: dict[str, list[int]] = {}
            self.steps = 0

        def note(self, name: str, value: int | None) -> None:
            if self.steps > 2 and value is not None:
                self.seen.setdefault(name, []).append(value)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Batch, batch_idx: int) -> None:
            self.steps += 1
            reset_peak(meter.device)

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            self.note("forward_peak_bytes", peak_bytes(meter.device))

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
            self.note("state_bytes", training_bytes(pl_module, trainer.optimizers))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.note("step_peak_bytes", peak_bytes(meter.device))

    def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.Adam(parameters, lr=1e-4)

    if amp is not None:
        trainer["plugins"] = [apex_amp(**amp)]
    _rehearse(meter, adam)
    before = current_bytes(meter.device)
    net, loader, batch = _task(meter, kind)
    watch = Watch()
    callbacks: list[Callback] = [watch]
    if release:
        from lightning_turbo import GradToNone

        callbacks.append(GradToNone())
    numbers = train(meter, Classifier(net, adam), loader, samples=batch, callbacks=callbacks, **QUIET, **trainer)
    middles = {name: statistics.median(values) for name, values in watch.seen.items()}
    if before is not None:
        middles.update({name: value - before for name, value in middles.items() if name.endswith("peak_bytes")})
    return {**numbers, **middles}


def _rehearse(meter: Meter, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]) -> None:
    """Train something tiny for two steps, so that what the libraries load on first use is loaded."""
    from benchmarks.training import QUIET, Classifier
    from lightning_turbo._lightning import Trainer

    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
    loader = Endless(image_batches(meter, (3, 8, 8), 2, 2, count=1))
    accelerator = "gpu" if meter.device.type == "cuda" else "cpu"
    Trainer(max_steps=2, accelerator=accelerator, devices=1, **QUIET).fit(Classifier(net, optimizer), loader)
    gc.collect()


def register(suite: Suite) -> None:
    """Add the cases and their aims."""
    even = "even: Lightning 32-true"
    suite.add(even, memory, config={"kind": "even"}, base=even, baseline=True)
    suite.add("even: GradToNone", memory, config={"kind": "even", "release": True}, base=even, ours=True)
    for kind in ("activations", "weights"):
        base = f"{kind}: Lightning 32-true"
        suite.add(base, memory, config={"kind": kind}, base=base, quick=False)
        suite.add(
            f"{kind}: Lightning bf16-mixed",
            memory,
            config={"kind": kind, "precision": "bf16-mixed"},
            base=base,
            quick=False,
        )
        for level in ("O0", "O1", "O2", "O3"):
            suite.add(
                f"{kind}: {level}",
                memory,
                config={"kind": kind, "amp": {"opt_level": level, "dtype": None if level == "O0" else "bf16"}},
                base=base,
                quick=False,
                ours=True,
            )
    suite.aims += [
        Aim("activations: O2", "activations: Lightning 32-true", 0.6, "step_peak_bytes"),
        Aim("weights: O2", "weights: Lightning 32-true", 1.13, "state_bytes"),
        Aim("weights: O3", "weights: Lightning 32-true", 0.51, "state_bytes"),
        Aim("even: GradToNone", even, 0.9, "forward_peak_bytes"),
    ]


register(SUITE)
