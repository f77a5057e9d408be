"""The suites ``overhead``, ``compiled`` and ``versions``: what Lightning, and each part of ours, adds to a step."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.suite import Aim, Case, CaseTimer, SkippedError, Suite
from benchmarks.work import Endless, image_batches, plain_loop, sgd, toy_net

if TYPE_CHECKING:
    from lightning_turbo._lightning import Callback, LightningDataModule

__all__ = ["COMPILED", "SUITE", "VERSIONS"]

BATCH = 16
WINDOW = 4  # batches a step, where gradients are accumulated
EPOCH = 40  # batches, where epochs end
LIGHTNINGS = ("2.5.6", "2.6.1", "2.6.6")  # each in a folder of its own
FOLDER = Path("runs", "lightning")


def _task(timer: CaseTimer, demo: str) -> tuple[nn.Module, Endless]:
    """A toy network and its batches, on the timer's device; or those of a task of the demo."""
    if demo:
        from examples.demo.model import DemoNet

        dims, batch, size = {"digits": (2, 32, 8), "volumes": (3, 16, 28)}[demo]
        batches = image_batches(timer, (1, *[size] * dims), 2, batch)
        return DemoNet(dims=dims, classes=2).net.to(timer.device), Endless(batches)
    generator = torch.Generator().manual_seed(timer.seed)
    batches = [
        (torch.randn(BATCH, 32, generator=generator), torch.randint(10, (BATCH,), generator=generator))
        for _ in range(8)
    ]
    return toy_net().to(timer.device), Endless([(x.to(timer.device), y.to(timer.device)) for x, y in batches])


def plain(
    timer: CaseTimer, *, autocast: bool = False, fused: bool = False, demo: str = "", compiled: bool = False
) -> dict[str, float]:
    """The loop that every other case is measured against."""
    net, loader = _task(timer, demo)
    optimizer = sgd(net.parameters(), fused=fused)
    if compiled:
        net = cast(nn.Module, torch.compile(net))  # net.compile() compiles nothing of an nn.Sequential
    forward: Any = partial(torch.autocast, timer.device.type, torch.bfloat16)
    return plain_loop(timer, net, loader, optimizer, forward=forward if autocast else nullcontext)


def lightning(
    timer: CaseTimer, *, log: int = 0, callback: str = "", schedule: str = "", data: str = "", epochs: bool = False,
    demo: str = "", **options: Any,
) -> dict[str, float]:  # fmt: skip
    """The same step under a Trainer.

    Args:
        timer: Of the case.
        log: Values logged in each step.
        callback: Name of one of our callbacks to add; after a comma, in which way.
        schedule: ``"torch"`` or ``"ours"`` cycles the learning rate step by step.
        data: ``"datamodule"`` takes a ``DataLoader`` through a ``LightningDataModule``, ``"prefetch"`` through a
            ``PrefetchDataModule``.
        epochs: Whether these data end after ``EPOCH`` batches, and begin again.
        demo: A task of the demo, ``"digits"`` or ``"volumes"``, in place of the toy network.
        options: Those of ``train``.
    """
    from benchmarks.training import Classifier, train

    net, loader = _task(timer, demo)
    module = Classifier(net, partial(_optimizer, schedule=schedule), log)
    callbacks = [_callback(callback)] if callback else []
    source = _datamodule(loader, data, epochs) if data else loader
    return train(timer, module, source, samples=len(loader.batches[0][0]), callbacks=callbacks, **options)


def other_lightning(timer: CaseTimer, *, version: str, **options: Any) -> dict[str, float]:
    """The step of ``lightning`` under a version of Lightning that stands in a folder of its own.

    Raises:
        SkippedError: If the folder is missing.
        RuntimeError: If this process has another version.
    """
    folder = FOLDER / version
    path = Path(__file__).resolve().parent.parent / folder
    if not path.exists():
        raise SkippedError(f"needs `pip install --no-deps --target {folder} lightning=={version}`")
    sys.path.insert(0, str(path))
    from lightning import __version__

    if __version__ != version:
        raise RuntimeError(f"{folder}: expected Lightning {version}, got {__version__}")
    return lightning(timer, **options)


def _optimizer(parameters: Iterable[Any], schedule: str) -> Any:
    """The optimizer; with a schedule, as the user of Lightning writes it or with ours."""
    from lightning_turbo import cyclic_lr

    optimizer = sgd(parameters)
    if schedule == "ours":
        return {"optimizer": optimizer, "lr_scheduler": cyclic_lr(optimizer, 0.01, 0.03, step_size_up=500)}
    if schedule:
        cyclic = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.03, 500, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cyclic, "interval": "step"}}
    return optimizer


class _Stream(IterableDataset[Any]):
    """Batches without end for a ``DataLoader``."""

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

    class Prefetched(PrefetchDataModule, Data):  # pyright: ignore[reportIncompatibleVariableOverride]
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


STOCK, WINDOWED = "Lightning", f"Lightning, {WINDOW} batches a step"
EPOCHS = f"PrefetchDataModule, epochs of {EPOCH} batches"
LEAN, WINDOWS = {"lean": True}, {"accumulate_grad_batches": WINDOW}
O1 = {"opt_level": "O1", "dtype": "bf16"}
LOGGING: dict[str, dict[str, Any]] = {"": {}, ", one self.log": {"log": 1}, ", logger and bar": {"quiet": False}}
# Name, arguments, and what it is divided by besides the plain loop.
STOCK_ROWS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("plain loop", {}, ()),
    ("plain loop, fused", {"fused": True}, ()),
    ("plain loop, autocast bf16", {"autocast": True}, ()),
    ("Lightning, barebones", {"quiet": False, "barebones": True}, ()),
    (STOCK, {}, ()),
    ("Lightning, logger and bar", {"quiet": False}, (STOCK,)),
    ("Lightning, one self.log", {"log": 1}, (STOCK,)),
    ("Lightning, bf16-mixed", {"precision": "bf16-mixed"}, (STOCK,)),
    ("Lightning, CyclicLR", {"schedule": "torch"}, (STOCK,)),
    ("LightningDataModule", {"data": "datamodule"}, (STOCK,)),
    (WINDOWED, WINDOWS, ()),
]
OUR_ROWS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("ApexAMP O0", {"amp": {"opt_level": "O0"}}, (STOCK,)),
    ("ApexAMP O1", {"amp": O1}, (STOCK, "Lightning, bf16-mixed")),
    ("ApexAMP O2", {"amp": {**O1, "opt_level": "O2"}}, (STOCK, "Lightning, bf16-mixed")),
    ("GradToNone", {"callback": "GradToNone"}, (STOCK,)),
    ("Doctor", {"callback": "Doctor"}, (STOCK,)),
    ("ExactAccumulation", {"callback": "ExactAccumulation", **WINDOWS}, ()),
    ("ExactAccumulation, uneven batches", {"callback": "ExactAccumulation, uneven batches", **WINDOWS}, ()),
    ("EffectiveBatchSize", {"callback": "EffectiveBatchSize"}, ()),
    ("cyclic_lr", {"schedule": "ours"}, ("Lightning, CyclicLR",)),
    ("PrefetchDataModule", {"data": "prefetch"}, ("LightningDataModule",)),
    (EPOCHS, {"data": "prefetch", "epochs": True}, ()),
    ("strategy turbo", {"turbo": dict.fromkeys(LEAN, False)}, (STOCK,)),
    *((f"strategy turbo, lean{suffix}", {"turbo": LEAN, **c}, (f"{STOCK}{suffix}",)) for suffix, c in LOGGING.items()),
    ("ApexAMP O1, lean", {"turbo": LEAN, "amp": O1}, ("ApexAMP O1",)),
]
ACCUMULATING = ("ExactAccumulation", "ExactAccumulation, uneven batches", "EffectiveBatchSize")
OTHER_BASE = dict.fromkeys((*ACCUMULATING, WINDOWED), WINDOWED) | {EPOCHS: EPOCHS}

TIMES: dict[str, Any] = {"steps": 400, "rounds": 25, "warmup": 100, "lead": 20, "seconds": 180}
SUITE = Suite(
    name="overhead",
    about="A step of a toy network (batch 16, 32-64-64-10): what everything around it costs.",
    cases=[
        Case(
            name=name, run=plain if name.startswith("plain") else lightning, config=config,
            base=OTHER_BASE.get(name, ""), against=against, kind=kind,
        )
        for rows, kind in ((STOCK_ROWS, "torch"), (OUR_ROWS, "ours"))
        for name, config, against in rows
    ],
    aims=[
        *(Aim(name, STOCK, 1.05) for name in ("ApexAMP O0", "GradToNone", "Doctor", "strategy turbo")),
        Aim("ApexAMP O1", "Lightning, bf16-mixed", 1.05),
        *(Aim(name, WINDOWED, 1.05) for name in ACCUMULATING),
        Aim("cyclic_lr", "Lightning, CyclicLR", 1.05),
        Aim("PrefetchDataModule", "LightningDataModule", 1.05),
        *(Aim(f"strategy turbo, lean{suffix}", "plain loop", 1.8) for suffix in LOGGING),
    ],
    quick=("plain loop", STOCK, "strategy turbo, lean"),
    **TIMES,
)  # fmt: skip

TASKS: dict[str, dict[str, Any]] = {"toy": {}, "digits": {"demo": "digits"}, "volumes": {"demo": "volumes"}}
COMPILED = Suite(
    name="compiled",
    about="A step of compiled networks: the toy network of the suite overhead, and the demo's for digits and volumes.",
    cases=[
        case
        for task, demo in TASKS.items()
        for case in (
            Case(name=f"plain loop, {task}", run=plain, config={"compiled": True, **demo}, base=f"plain loop, {task}"),
            Case(name=f"strategy turbo, {task}", run=lightning, config={"turbo": {"compile": "network"}, **demo},
                 base=f"plain loop, {task}", kind="ours"),
        )
    ],
    aims=[Aim(f"strategy turbo, {task}", f"plain loop, {task}", 1.05) for task in TASKS],
    quick=("plain loop, toy", "strategy turbo, toy"),
    **TIMES,
)  # fmt: skip

VERSIONS = Suite(
    name="versions",
    about="A step of the toy network of the suite overhead, under versions of Lightning.",
    cases=[
        Case(name="plain loop", run=plain),
        *(
            Case(
                name=f"{STOCK} {version}{suffix}", run=other_lightning, config={"version": version, **config},
                against=() if version == LIGHTNINGS[0] else (f"{STOCK} {LIGHTNINGS[0]}{suffix}",),
            )
            for suffix, config in LOGGING.items()
            for version in LIGHTNINGS
        ),
    ],
    quick=("plain loop", *(f"{STOCK} {version}" for version in LIGHTNINGS)),
    **TIMES,
)  # fmt: skip
