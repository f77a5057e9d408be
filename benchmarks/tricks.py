"""The suite ``tricks``: default Lightning, then one trick at a time, then all together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.suite import Aim, Case, Meter, SkippedError, Suite
from benchmarks.work import sgd
from lightning_turbo.errors import LightningMismatchError, MissingExtraError

if TYPE_CHECKING:
    from lightning_turbo._lightning import LightningModule

__all__ = ["SUITE"]

BATCH = {"digits": 64, "mni": 32}
LEARNING_RATE = 0.05


class _Slow(Dataset[Any]):
    """A data set that waits ``wait`` seconds for each batch, as for a disk or a network."""

    def __init__(self, data: Dataset[Any], wait: float) -> None:
        self.data = data
        self.wait = wait

    def __len__(self) -> int:
        return len(self.data)  # pyright: ignore[reportArgumentType]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(self.wait)
        return [self.data[index] for index in indices]


def _data(task: str, seed: int) -> tuple[Dataset[Any], Dataset[Any]]:
    """Training and validation samples."""
    from examples.demo.data import load_digits, load_mni

    data = load_digits(seed) if task == "digits" else load_mni()
    return data.train, data.val


def _module(task: str, *, fused: bool = False, cyclic: bool = False) -> LightningModule:
    """The demo's network with a bias in each convolution, as most people write it."""
    from benchmarks.training import Classifier
    from examples.demo.model import DemoNet
    from lightning_turbo import cyclic_lr

    def optimizer(parameters: Any) -> Any:
        optimizer = sgd(parameters, fused=fused, learning_rate=LEARNING_RATE)
        if not cyclic:
            return optimizer
        schedule = cyclic_lr(optimizer, LEARNING_RATE / 5, 2 * LEARNING_RATE, step_size_up=40)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    net = (DemoNet(dims=2, classes=10) if task == "digits" else DemoNet(dims=3, classes=2)).net
    for part in net.modules():
        if isinstance(part, nn.Conv2d | nn.Conv3d) and part.bias is None:
            part.bias = nn.Parameter(torch.zeros(part.out_channels))
    return Classifier(net, optimizer, log=1)


def _step(meter: Meter, task: str) -> Callable[[Any], None]:
    """A float32 training step on a batch, as a plain loop has it, for a network of its own."""
    net: Any = _module(task).to(meter.device)
    optimizer = sgd(net.parameters())

    def step(batch: Any) -> None:
        images, labels = (each.to(meter.device) for each in batch)
        F.cross_entropy(net.net(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.synchronise()

    return step


def prepare(meter: Meter) -> dict[str, float]:
    """Measure a float32 step and the reading of a batch, so that the loader can be made to cost as much as the step."""
    waits = {}
    for task in ("mni",) if meter.quick else ("digits", "mni"):
        try:
            train, _ = _data(task, meter.seed)
        except (MissingExtraError, ModuleNotFoundError):  # its cases say so
            continue
        size, trained = BATCH[task], _step(meter, task)
        read, step = [], []
        for number in range(12 if meter.quick else 60):
            indices = [index % len(train) for index in range(number * size, (number + 1) * size)]  # pyright: ignore[reportArgumentType]
            began = time.perf_counter()
            batch = default_collate([train[index] for index in indices])
            read.append(time.perf_counter() - began)
            began = time.perf_counter()
            trained(batch)
            step.append(time.perf_counter() - began)
        waits[f"{task} step seconds"] = statistics.median(step[4:])
        waits[f"{task} wait seconds"] = max(0.0, statistics.median(step[4:]) - statistics.median(read[4:]))
    return waits


def trick(
    meter: Meter, *, task: str, prefetch: int = 0, tune: bool = False, amp: str = "", callbacks: tuple[str, ...] = (),
    fused: bool = False, cyclic: bool = False, **options: Any,
) -> dict[str, float]:  # fmt: skip
    """Train a task under a Trainer with some tricks.

    Args:
        meter: Of the case.
        task: A key of ``BATCH``.
        prefetch: Threads of a ``PrefetchDataModule`` that the data come through; 0 for none.
        tune: Whether ``tune_workers`` chooses the number of worker processes, beside a step on the CPU; they then stay
            from epoch to epoch.
        amp: Level of ``ApexAMP`` in bfloat16; ``"where it helps"`` is O1 unless the device lacks bfloat16; empty for
            none.
        callbacks: Names of callbacks of ours.
        fused: Whether the optimizer is fused.
        cyclic: Whether the learning rate follows ``cyclic_lr``.
        options: Those of ``train``.

    Returns:
        Loss, and accuracy on the validation part.
    """
    import lightning_turbo
    from benchmarks.training import train
    from lightning_turbo._lightning import LightningDataModule
    from lightning_turbo.measure import computes_in_bfloat16

    (data, val), batch = _data(task, meter.seed), BATCH[task]
    slow = _Slow(data, meter.prepared.get(f"{task} wait seconds", 0.0))

    def loader(kind: type[DataLoader[Any]] = DataLoader, **workers: Any) -> DataLoader[Any]:
        stay = workers.get("num_workers", 0) > 0
        return kind(slow, batch, shuffle=True, drop_last=True, persistent_workers=stay, **workers)

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            if not tune:
                return loader()
            make_loader = partial(loader, lightning_turbo.PrefetchLoader) if prefetch else loader
            with torch.random.fork_rng(devices=[]):  # the order of the samples stays that of the other cases
                # A step on a GPU would leave the cores to loading.
                step = _step(meter, task) if meter.device.type == "cpu" else None
            seconds = 1.0 if meter.quick else 5.0
            return loader(**lightning_turbo.tune_workers(make_loader, step=step, seconds=seconds, show=None).settings)

    class PrefetchedData(lightning_turbo.PrefetchDataModule, Data):
        pass

    torch.manual_seed(meter.seed)
    module = _module(task, fused=fused, cyclic=cyclic)
    if amp == "where it helps":
        amp = "O1" if meter.device.type == "cuda" or computes_in_bfloat16() else ""
    if amp:
        options["amp"] = {"opt_level": amp, "dtype": "bf16"}
    datamodule = PrefetchedData(threads=prefetch) if prefetch else Data()
    added = [getattr(lightning_turbo, name)() for name in callbacks]
    try:
        numbers = train(meter, module, datamodule, samples=batch, callbacks=added, **options)
    except LightningMismatchError as error:
        raise SkippedError(str(error)) from None
    return {**numbers, "accuracy": _accuracy(module, val, batch)}


@torch.no_grad()
def _accuracy(module: Any, val: Dataset[Any], batch: int) -> float:
    """The share of validation samples that the network labels rightly, in float32 on the CPU."""
    net = module.net.cpu().float().eval()
    right = [net(images).argmax(1) == labels for images, labels in DataLoader(val, batch)]
    return torch.cat(right).float().mean().item()


LEAN = {"lean_step": True, "lean_logging": True}
TRICKS: dict[str, dict[str, Any]] = {
    "PrefetchDataModule": {"prefetch": 1},
    "prefetch_threads": {"prefetch": 2},
    "tune_workers": {"tune": True},
    "ApexAMP O1": {"amp": "O1"},
    "ApexAMP O2": {"amp": "O2"},
    "MemoryFormat": {"callbacks": ("MemoryFormat",)},
    "DropBiasBeforeNorm": {"callbacks": ("DropBiasBeforeNorm",)},
    "GradToNone": {"callbacks": ("GradToNone",)},
    "cyclic_lr": {"cyclic": True},
    "fused optimizer": {"fused": True},
    "strategy turbo": {"turbo": {"lean_step": False, "lean_logging": False}},
    "strategy turbo, lean": {"turbo": LEAN},
    "huge pages": {},
}
TOGETHER: dict[str, Any] = {
    "prefetch": 2, "amp": "where it helps", "callbacks": ("DropBiasBeforeNorm",), "fused": True, "turbo": LEAN,
}  # fmt: skip
# torch then asks the kernel for large pages, so that a large tensor costs few page faults.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


def cases(task: str) -> list[Case]:
    """Return the cases of one task."""
    default, stock = f"{task}: default", f"{task}: stock bf16-mixed"
    options: dict[str, Any] = {"run": trick, "base": default}
    together = {"task": task, **TOGETHER}
    if task == "digits":  # in 2D
        together["callbacks"] += ("MemoryFormat",)
    return [
        Case(name=default, config={"task": task}, **options),
        Case(name=stock, config={"task": task, "precision": "bf16-mixed"}, **options),
        *(
            Case(
                name=f"{task}: {name}", config={"task": task, **config}, **options,
                kind="torch" if name in ("fused optimizer", "huge pages") else "ours",
                environment=HUGE_PAGES if name == "huge pages" else {},
            )
            for name, config in TRICKS.items()
        ),
        Case(
            name=f"{task}: all together", config=together, **options, kind="ours", environment=HUGE_PAGES,
            against=(stock,),
        ),
    ]  # fmt: skip


SUITE = Suite(
    name="tricks",
    about="Ablation: default Lightning, one trick at a time, all together; digits and mni wait for data as long as a "
    "step.",
    cases=[case for task in BATCH for case in cases(task)],
    aims=[
        *(
            Aim(f"{task}: {name}", f"{task}: default", 1.02, fact="bfloat16_instructions" if "amp" in config else "")
            for task in BATCH
            for name, config in TRICKS.items()
        ),
        Aim("mni: all together", "mni: default", 0.5),
    ],
    quick=("mni: default", "mni: all together"),
    warmup=4,
    lead=2,
    seconds=420,
    prepare=prepare,
)
