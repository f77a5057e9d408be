"""The suites ``overhead``, ``compiled`` and ``versions``: the time that Lightning and this package add to a step."""

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
WINDOW = 4  # batches per optimizer step, with accumulation
EPOCH = 40  # batches per epoch, if epochs end
LIGHTNINGS = ("2.5.6", "2.6.1", "2.6.6")  # each in its own folder
FOLDER = Path("runs", "lightning")


def _task(timer: CaseTimer, demo: str) -> tuple[nn.Module, Endless]:
    """Return a toy network, or that of a task of the demo, and its batches on the device."""
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
    """Run a plain PyTorch loop, the baseline of all other cases."""
    net, loader = _task(timer, demo)
    optimizer = sgd(net.parameters(), fused=fused)
    if compiled:
        net = cast(nn.Module, torch.compile(net))  # net.compile() would compile nothing of an nn.Sequential
    forward: Any = partial(torch.autocast, timer.device.type, torch.bfloat16)
    return plain_loop(timer, net, loader, optimizer, forward=forward if autocast else nullcontext)


def lightning(
    timer: CaseTimer, *, log: int = 0, metrics: int = 0, callback: str = "", schedule: str = "", data: str = "",
    epochs: bool = False, demo: str = "", **options: Any,
) -> dict[str, float]:  # fmt: skip
    """Run the same step in a Trainer.

    Args:
        timer: Timer of the case.
        log: Number of values to log in each step.
        metrics: Number of metrics of torchmetrics to update and log in each step.
        callback: Name of a callback of this package to add; text after a comma selects its arguments.
        schedule: ``"torch"`` or ``"ours"`` for a learning rate that cycles in each step; empty for a constant one.
        data: ``"datamodule"`` for a ``LightningDataModule`` with a ``DataLoader``, ``"prefetch"`` for a
            ``PrefetchDataModule`` with the same loader; empty for batches in memory.
        epochs: Whether an epoch of these data ends after ``EPOCH`` batches.
        demo: Task of the demo to train, ``"digits"`` or ``"volumes"``; empty for the toy network.
        options: Arguments of ``train``.
    """
    from benchmarks.training import Classifier, train

    net, loader = _task(timer, demo)
    module = Classifier(net, partial(_optimizer, schedule=schedule), log, metrics)
    callbacks = [_callback(callback)] if callback else []
    source = _datamodule(loader, data, epochs) if data else loader
    return train(timer, module, source, samples=len(loader.batches[0][0]), callbacks=callbacks, **options)


def other_lightning(timer: CaseTimer, *, version: str, **options: Any) -> dict[str, float]:
    """Run the step of ``lightning`` with a version of Lightning that is installed in its own folder.

    Raises:
        SkippedError: If the folder does not exist.
        RuntimeError: If another version is imported.
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
    """Return the optimizer, with a schedule of torch, of this package, or without one."""
    from lightning_turbo import cyclic_lr

    optimizer = sgd(parameters)
    if schedule == "ours":
        return {"optimizer": optimizer, "lr_scheduler": cyclic_lr(optimizer, 0.01, 0.03, step_size_up=500)}
    if schedule:
        cyclic = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.03, 500, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cyclic, "interval": "step"}}
    return optimizer


class _Stream(IterableDataset[Any]):
    """The endless batches of ``Endless`` as a dataset for a ``DataLoader``."""

    def __init__(self, loader: Endless) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def _datamodule(loader: Endless, data: str, epochs: bool) -> LightningDataModule:
    """Return a datamodule of Lightning or of this package whose ``DataLoader`` loads the batches."""
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
    """Return a callback of this package, with arguments that give it work to do.

    With ``minutes=0`` the Doctor removes itself during the warm-up, so that its row shows whether it leaves anything
    behind; otherwise it looks at the steps all the while.
    """
    import lightning_turbo

    weights = itertools.cycle((BATCH, BATCH // 2))  # unequal, so that the gradients of each window are corrected
    arguments: dict[str, dict[str, Any]] = {
        "ExactAccumulation, uneven batches": {"weight": lambda batch: next(weights)},
        "Doctor": {"minutes": 0},
        "EffectiveBatchSize": {"target": WINDOW * BATCH, "batch_size": BATCH},
    }
    return getattr(lightning_turbo, name.partition(",")[0])(**arguments.get(name, {}))


STOCK, WINDOWED = "Lightning", f"Lightning, {WINDOW} batches a step"
EPOCHS = f"PrefetchDataModule, epochs of {EPOCH} batches"
LEAN, WINDOWS = {"lean": True}, {"accumulate_grad_batches": WINDOW}
O1 = {"opt_level": "O1", "dtype": "bf16"}
LOGGING: dict[str, dict[str, Any]] = {"": {}, ", one self.log": {"log": 1}, ", logger and bar": {"quiet": False}}
FOUR: dict[str, dict[str, Any]] = {", four values": {"log": 4}, ", four metrics": {"metrics": 4}}
# Name, arguments, and the cases to divide by in addition to the plain loop.
STOCK_ROWS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("plain loop", {}, ()),
    ("plain loop, fused", {"fused": True}, ()),
    ("plain loop, autocast bf16", {"autocast": True}, ()),
    ("Lightning, barebones", {"quiet": False, "barebones": True}, ()),
    (STOCK, {}, ()),
    ("Lightning, logger and bar", {"quiet": False}, (STOCK,)),
    ("Lightning, one self.log", {"log": 1}, (STOCK,)),
    *((f"{STOCK}{suffix}", config, (STOCK,)) for suffix, config in FOUR.items()),
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
    ("Doctor, while it looks", {"callback": "Doctor, while it looks"}, (STOCK,)),
    ("ExactAccumulation", {"callback": "ExactAccumulation", **WINDOWS}, ()),
    ("ExactAccumulation, uneven batches", {"callback": "ExactAccumulation, uneven batches", **WINDOWS}, ()),
    ("EffectiveBatchSize", {"callback": "EffectiveBatchSize"}, ()),
    ("cyclic_lr", {"schedule": "ours"}, ("Lightning, CyclicLR",)),
    ("PrefetchDataModule", {"data": "prefetch"}, ("LightningDataModule",)),
    (EPOCHS, {"data": "prefetch", "epochs": True}, ()),
    ("strategy turbo", {"turbo": dict.fromkeys(LEAN, False)}, (STOCK,)),
    *(
        (f"strategy turbo, lean{suffix}", {"turbo": LEAN, **config}, (f"{STOCK}{suffix}",))
        for suffix, config in (LOGGING | FOUR).items()
    ),
    ("ApexAMP O1, lean", {"turbo": LEAN, "amp": O1}, ("ApexAMP O1",)),
]
ACCUMULATING = ("ExactAccumulation", "ExactAccumulation, uneven batches", "EffectiveBatchSize")
OTHER_BASE = dict.fromkeys((*ACCUMULATING, WINDOWED), WINDOWED) | {EPOCHS: EPOCHS}

TIMES: dict[str, Any] = {"steps": 400, "rounds": 25, "warmup": 100, "lead": 20, "seconds": 180}
SUITE = Suite(
    name="overhead",
    about="A step of a toy network (batch size 16, layers 32-64-64-10), which shows the cost of everything around it.",
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
        *(Aim(f"strategy turbo, lean{suffix}", f"{STOCK}{suffix}", 0.5) for suffix in FOUR),
    ],
    quick=("plain loop", STOCK, "strategy turbo, lean"),
    **TIMES,
)  # fmt: skip

TASKS: dict[str, dict[str, Any]] = {"toy": {}, "digits": {"demo": "digits"}, "volumes": {"demo": "volumes"}}
COMPILED = Suite(
    name="compiled",
    about="A step of compiled networks: the toy network of the suite overhead, and those of the demo for digits and "
    "volumes.",
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
    about="A step of the toy network of the suite overhead, with different versions of Lightning.",
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
