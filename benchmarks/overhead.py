"""The suite ``overhead``: microseconds that Lightning, and each part of ours, adds to a step that does little."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.meter import Meter
from benchmarks.suite import Aim, Suite
from benchmarks.workloads import Endless, image_batches, plain_loop, sgd

if TYPE_CHECKING:
    from lightning_turbo._lightning import Callback, LightningDataModule

__all__ = ["SUITE", "TIMES", "lightning", "plain"]

TIMES: dict[str, Any] = {
    "steps": 400, "quick_steps": 150, "rounds": 25, "warmup": 100, "lead": 20, "seconds": 180, "quick_seconds": 4,
}  # fmt: skip
SUITE = Suite("overhead", "A step of a toy network (batch 16, 32-64-64-10): what everything around it costs.", **TIMES)
BATCH = 16
WINDOW = 4  # batches a step, where gradients are accumulated
EPOCH = 40  # batches, where epochs end


def _toy(meter: Meter, demo: str = "") -> tuple[nn.Module, Endless]:
    """The network and its batches, on the meter's device; or those of a task of the demo."""
    if demo:
        from examples.demo.model import DemoNet

        dims, batch, size = {"digits": (2, 32, 8), "volumes": (3, 16, 28)}[demo]
        batches = image_batches(meter, (1, *[size] * dims), 2, batch)
        return DemoNet(dims=dims, classes=2).net.to(meter.device), Endless(batches)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    generator = torch.Generator().manual_seed(meter.seed)
    batches = [
        (torch.randn(BATCH, 32, generator=generator), torch.randint(10, (BATCH,), generator=generator))
        for _ in range(8)
    ]
    return net.to(meter.device), Endless([(x.to(meter.device), y.to(meter.device)) for x, y in batches])


def plain(
    meter: Meter, *, autocast: bool = False, fused: bool = False, demo: str = "", compiled: bool = False
) -> dict[str, float]:
    """The loop that every other case is measured against."""
    net, loader = _toy(meter, demo)
    optimizer = sgd(list(net.parameters()), fused=fused)
    if compiled:
        net = cast(nn.Module, torch.compile(net))  # net.compile() compiles nothing of an nn.Sequential
    if autocast:
        return plain_loop(
            meter, net, loader, optimizer, forward=lambda: torch.autocast(meter.device.type, torch.bfloat16)
        )
    return plain_loop(meter, net, loader, optimizer)


def lightning(
    meter: Meter,
    *,
    log: int = 0,
    quiet: bool = True,
    fused: bool = False,
    amp: dict[str, Any] | None = None,
    callback: str = "",
    turbo: dict[str, Any] | None = None,
    schedule: str = "",
    data: str = "",
    epochs: bool = False,
    demo: str = "",
    **trainer: Any,
) -> dict[str, float]:
    """The same step under a Trainer.

    Args:
        meter: Of the case.
        log: Values logged in each step.
        quiet: Whether logger, checkpoints, bar and summary are off.
        fused: Whether the optimizer is fused.
        amp: Arguments of ``ApexAMP``, or ``None`` for none.
        callback: Name of one of our callbacks to add; after a comma, in which way.
        turbo: Arguments of ``TurboStrategy``, or ``None`` for Lightning's own strategy.
        schedule: ``"torch"`` or ``"ours"`` cycles the learning rate step by step.
        data: ``"datamodule"`` takes a ``DataLoader`` through a ``LightningDataModule``, ``"prefetch"`` through a
            ``PrefetchDataModule``.
        demo: A task of the demo, ``"digits"`` or ``"volumes"``, in place of the toy network.
        epochs: Whether these data end after ``EPOCH`` batches, and begin again.
        trainer: Arguments of the Trainer.
    """
    from benchmarks.training import QUIET, Classifier, apex_amp, train

    net, loader = _toy(meter, demo)
    if amp is not None:
        trainer["plugins"] = [apex_amp(**amp)]
    callbacks = [_callback(callback)] if callback else []
    if turbo is not None:
        from lightning_turbo import TurboStrategy

        trainer["strategy"] = TurboStrategy(**turbo)

    def optimizer(parameters: Iterable[Any]) -> Any:
        made = sgd(list(parameters), fused=fused)
        return _scheduled(made, schedule) if schedule else made

    module = Classifier(net, optimizer, log)
    options = {**QUIET, **trainer} if quiet else trainer
    source = _datamodule(loader, data, epochs) if data else loader
    return train(meter, module, source, samples=len(loader.batches[0][0]), callbacks=callbacks, **options)


def _scheduled(optimizer: Any, schedule: str) -> dict[str, Any]:
    """The optimizer with a rate that cycles, as the user of Lightning writes it or with ours."""
    from lightning_turbo import cyclic_lr

    if schedule == "ours":
        config = cyclic_lr(optimizer, 0.01, 0.03, step_size_up=500)
    else:
        config = {
            "scheduler": torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.03, 500, cycle_momentum=False),
            "interval": "step",
        }
    return {"optimizer": optimizer, "lr_scheduler": config}


class _Stream(IterableDataset[Any]):
    """Batches without end for a ``DataLoader``.

    Args:
        loader: Gives them.
    """

    def __init__(self, loader: Endless) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def _datamodule(loader: Endless, data: str, epochs: bool) -> LightningDataModule:
    """The batches through a ``DataLoader`` of a ``LightningDataModule``, ours or Lightning's."""
    from lightning_turbo import PrefetchDataModule
    from lightning_turbo._lightning import LightningDataModule

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            batches: Any = loader.batches * (EPOCH // len(loader.batches)) if epochs else _Stream(loader)
            return DataLoader(batches, batch_size=None)

    class Prefetched(PrefetchDataModule, Data):
        pass

    return Prefetched() if data == "prefetch" else Data()


def _callback(name: str) -> Callback:
    """One of our callbacks, with arguments under which it works.

    The Doctor takes itself out during the warm-up: its row shows that it leaves nothing behind.
    """
    import lightning_turbo

    weights = itertools.cycle((BATCH, BATCH // 2))  # unequal, so that every window's gradients are corrected
    arguments: dict[str, dict[str, Any]] = {
        "ExactAccumulation, uneven batches": {"weight": lambda batch: next(weights)},
        "EffectiveBatchSize": {"target": WINDOW * BATCH, "batch_size": BATCH},
    }
    return getattr(lightning_turbo, name.partition(",")[0])(**arguments.get(name, {}))


def register(suite: Suite) -> None:
    """Add the cases and their aims."""
    stock, quick = "Lightning", ("plain loop", "Lightning", "strategy turbo, lean")
    accumulating, epochs = f"Lightning, {WINDOW} batches a step", f"PrefetchDataModule, epochs of {EPOCH} batches"
    lean = {"lean_step": True, "lean_logging": True}

    def add(name: str, config: dict[str, Any], *against: str, **options: Any) -> None:
        run = plain if name.startswith("plain") else lightning
        suite.add(name, run, config=config, against=against, quick=name in quick, **options)

    add("plain loop", {}, baseline=True)
    add("plain loop, fused", {"fused": True})
    add("plain loop, autocast bf16", {"autocast": True})
    add("Lightning, barebones", {"quiet": False, "barebones": True})
    add(stock, {})
    add("Lightning, logger and bar", {"quiet": False}, stock)
    add("Lightning, one self.log", {"log": 1}, stock)
    add("Lightning, bf16-mixed", {"precision": "bf16-mixed"}, stock)
    add("ApexAMP O0", {"amp": {"opt_level": "O0"}}, stock, ours=True)
    for level in ("O1", "O2"):
        amp = {"opt_level": level, "dtype": "bf16"}
        add(f"ApexAMP {level}", {"amp": amp}, stock, "Lightning, bf16-mixed", ours=True)
    for name in ("GradToNone", "Doctor"):
        add(name, {"callback": name}, stock, ours=True)
    window = {"accumulate_grad_batches": WINDOW}
    add(accumulating, window, base=accumulating)
    exact = "ExactAccumulation", "ExactAccumulation, uneven batches"
    for name in exact:
        add(name, {"callback": name, **window}, base=accumulating, ours=True)
    add("EffectiveBatchSize", {"callback": "EffectiveBatchSize"}, base=accumulating, ours=True)
    add("Lightning, CyclicLR", {"schedule": "torch"}, stock)
    add("cyclic_lr", {"schedule": "ours"}, "Lightning, CyclicLR", ours=True)
    add("LightningDataModule", {"data": "datamodule"}, stock)
    add("PrefetchDataModule", {"data": "prefetch"}, "LightningDataModule", ours=True)
    ending = {"data": "prefetch", "epochs": True}
    add(epochs, ending, base=epochs, ours=True)
    add("strategy turbo", {"turbo": dict.fromkeys(lean, False)}, stock, ours=True)
    logging = {"": {}, ", one self.log": {"log": 1}, ", logger and bar": {"quiet": False}}
    for suffix, config in logging.items():
        add(f"strategy turbo, lean{suffix}", {"turbo": lean, **config}, f"{stock}{suffix}", ours=True)
    add("ApexAMP O1, lean", {"turbo": lean, "amp": {"opt_level": "O1", "dtype": "bf16"}}, "ApexAMP O1", ours=True)
    suite.aims += [
        Aim("ApexAMP O0", stock, 1.05),
        Aim("ApexAMP O1", "Lightning, bf16-mixed", 1.05),
        *(Aim(name, stock, 1.05) for name in ("GradToNone", "Doctor", "strategy turbo")),
        *(Aim(name, accumulating, 1.05) for name in (*exact, "EffectiveBatchSize")),
        Aim("cyclic_lr", "Lightning, CyclicLR", 1.05),
        Aim("PrefetchDataModule", "LightningDataModule", 1.05),
        *(Aim(f"strategy turbo, lean{suffix}", "plain loop", 1.8) for suffix in logging),
    ]


register(SUITE)
