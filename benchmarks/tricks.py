"""The suite ``tricks``: default Lightning, then one trick at a time, then all together."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.meter import Meter
from benchmarks.suite import Aim, SkippedError, Suite
from benchmarks.workloads import Endless, image_batches, plain_loop, resnet50, sgd
from lightning_turbo.errors import LightningMismatchError, MissingExtraError

if TYPE_CHECKING:
    from lightning_turbo._lightning import Callback, LightningModule

__all__ = ["SUITE"]

BATCH = {"digits": 64, "mni": 32, "resnet50": 128, "resnet50 3D": 64}
LEARNING_RATE = 0.05


class _Slow(Dataset[Any]):
    """A data set that waits for each batch, as for a disk or a network.

    Args:
        data: What to read.
        wait: Seconds a batch.
    """

    def __init__(self, data: Dataset[Any], wait: float) -> None:
        self.data = data
        self.wait = wait

    def __len__(self) -> int:
        return len(self.data)  # pyright: ignore[reportArgumentType]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(self.wait)
        return [self.data[index] for index in indices]


class _Synthetic(Dataset[Any]):
    """Labelled noise in main memory, the same few samples over and over.

    Args:
        shape: Of one sample.
        classes: Number of labels.
        length: Samples an epoch.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, length: int = 20000) -> None:
        self.images = torch.randn(64, *shape)
        self.labels = torch.randint(classes, (64,))
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index % 64], self.labels[index % 64]


def _data(task: str, seed: int) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """Training samples, and validation samples where accuracy means something."""
    if task == "resnet50":
        return _Synthetic((3, 224, 224), 1000), None
    if task == "resnet50 3D":
        return _Synthetic((1, 28, 28, 28), 11), None
    from examples.demo.data import load_digits, load_mni

    data = load_digits(seed) if task == "digits" else load_mni()
    return data.train, data.val


def _module(task: str, *, fused: bool = False, cyclic: bool = False) -> LightningModule:
    """The demo's network with a bias in each convolution, as most people write it; or a ResNet-50."""
    from examples.demo.model import DemoNet
    from lightning_turbo import cyclic_lr

    class Net(DemoNet):
        def configure_optimizers(self) -> Any:
            optimizer = sgd(list(self.parameters()), fused=fused, learning_rate=LEARNING_RATE)
            if not cyclic:
                return optimizer
            schedule = cyclic_lr(optimizer, LEARNING_RATE / 5, 2 * LEARNING_RATE, step_size_up=40)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    dims, classes = {"digits": (2, 10), "mni": (3, 2), "resnet50": (2, 1000), "resnet50 3D": (3, 11)}[task]
    module = Net(dims=dims, classes=classes)
    if task.startswith("resnet50"):
        module.net = resnet50(dims, classes)  # pyright: ignore[reportAttributeAccessIssue]
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Conv3d)) and part.bias is None and not task.startswith("resnet50"):
            part.bias = nn.Parameter(torch.zeros(part.out_channels))
    return module


def _step(meter: Meter, task: str) -> Callable[[Any], None]:
    """A float32 training step on a batch, as a plain loop has it, for a network of its own."""
    net = _module(task).to(meter.device)
    optimizer = sgd(list(net.parameters()))

    def step(batch: Any) -> None:
        images, labels = (each.to(meter.device) for each in batch)
        F.cross_entropy(net(images), labels).backward()
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
        except MissingExtraError:  # its cases say so
            continue
        trained = _step(meter, task)
        read, step = [], []
        for number in range(12 if meter.quick else 60):
            indices = [index % len(train) for index in range(number * BATCH[task], (number + 1) * BATCH[task])]  # pyright: ignore[reportArgumentType]
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
    meter: Meter,
    *,
    task: str,
    prefetch: int = 0,
    tune: bool = False,
    amp: str = "",
    callbacks: tuple[str, ...] = (),
    fused: bool = False,
    cyclic: bool = False,
    turbo: dict[str, Any] | None = None,
    **trainer: Any,
) -> dict[str, float]:
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
        turbo: Arguments of a ``TurboStrategy``; ``None`` for Lightning's own strategy.
        trainer: Arguments of the Trainer.

    Returns:
        Loss, and accuracy on the validation part where there is one.
    """
    import lightning_turbo
    from benchmarks.training import QUIET, apex_amp, train
    from lightning_turbo._lightning import LightningDataModule
    from lightning_turbo.measure import computes_in_bfloat16

    data, val = _data(task, meter.seed)
    wait = meter.prepared.get(f"{task} wait seconds", 0.0)
    batch = BATCH[task]

    def loader(kind: type[DataLoader[Any]] = DataLoader, **workers: Any) -> DataLoader[Any]:
        stay = workers.get("num_workers", 0) > 0
        return kind(_Slow(data, wait), batch, shuffle=True, drop_last=True, persistent_workers=stay, **workers)

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            if not tune:
                return loader()
            make_loader = functools.partial(loader, lightning_turbo.PrefetchLoader) if prefetch else loader
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
        trainer["plugins"] = [apex_amp(amp, "bf16")]
    if turbo is not None:
        try:
            trainer["strategy"] = lightning_turbo.TurboStrategy(**turbo)
        except LightningMismatchError as error:
            raise SkippedError(str(error)) from None
    added: list[Callback] = [getattr(lightning_turbo, name)() for name in callbacks]
    datamodule = PrefetchedData(threads=prefetch) if prefetch else Data()
    numbers = train(meter, module, datamodule, samples=batch, callbacks=added, **QUIET, **trainer)
    return numbers if val is None else {**numbers, "accuracy": _accuracy(module, val, batch)}


@torch.no_grad()
def _accuracy(module: LightningModule, val: Dataset[Any], batch: int) -> float:
    """The share of validation samples that the network labels rightly, in float32 on the CPU."""
    net = module.cpu().float().eval()
    right = [net(images).argmax(1) == labels for images, labels in DataLoader(val, batch)]
    return torch.cat(right).float().mean().item()


def plain_best(meter: Meter, *, task: str) -> dict[str, float]:
    """A plain loop on a GPU as well as it can be written: autocast, channels last, fused, data on the device."""
    dims, classes = (2, 1000) if task == "resnet50" else (3, 11)
    shape = (3, 224, 224) if dims == 2 else (1, 28, 28, 28)
    torch.backends.cudnn.benchmark = True
    memory_format = torch.channels_last if dims == 2 else torch.contiguous_format
    net = resnet50(dims, classes).to(meter.device, memory_format=memory_format)  # pyright: ignore[reportCallIssue]
    batches = [
        (images.to(memory_format=memory_format), labels)
        for images, labels in image_batches(meter, shape, classes, BATCH[task])
    ]
    optimizer = sgd(list(net.parameters()), fused=True, learning_rate=LEARNING_RATE)
    return plain_loop(
        meter, net, Endless(batches), optimizer, forward=lambda: torch.autocast(meter.device.type, torch.bfloat16)
    )


SUITE = Suite(
    "tricks",
    "Ablation: default Lightning, one trick at a time, all together; digits and mni wait for data as long as a step.",
    steps=10,
    quick_steps=4,
    rounds=15,
    warmup=4,
    lead=2,
    seconds=420,
    quick_seconds=6,
    prepare=prepare,
)

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
    "amp": "where it helps",
    "callbacks": ("DropBiasBeforeNorm",),
    "fused": True,
    "turbo": LEAN,
}
# torch then asks the kernel for large pages, so that a large tensor costs few page faults.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


def register(suite: Suite, task: str) -> None:
    """Add the cases of one task and their aims.

    Args:
        suite: Where to.
        task: A key of ``BATCH``.
    """
    large = task.startswith("resnet50")
    devices = ("cuda",) if large else ("cpu", "cuda")
    default, together = f"{task}: default", f"{task}: all together"
    pages = f"{task}: huge pages"
    stock, best = f"{task}: stock bf16-mixed", f"{task}: plain PyTorch at its best"

    def add(name: str, config: dict[str, Any], **options: Any) -> None:
        quick = task == "mni" and name in (default, together)
        run = plain_best if name == best else trick
        options["environment"] = HUGE_PAGES if name in (pages, together) else {}
        suite.add(name, run, config={"task": task, **config}, base=default, devices=devices, quick=quick, **options)

    add(default, {}, baseline=task == "digits")
    add(stock, {"precision": "bf16-mixed"})
    for name, config in TRICKS.items():
        add(f"{task}: {name}", config, ours=name not in ("fused optimizer", "huge pages"))
        fact = "bfloat16_instructions" if "amp" in config else ""
        suite.aims.append(Aim(f"{task}: {name}", default, 1.02, devices=devices, fact=fact))
    if large:
        add(best, {})
        suite.aims += [
            Aim(together, default, 0.25, devices=devices),
            Aim(together, stock, 1 / 1.2, devices=devices),
            Aim(together, best, 1.03, devices=devices),
        ]
    elif task == "mni":
        suite.aims.append(Aim(together, default, 0.5))
    # Processes for loading that computes, threads for loading that waits.
    loading: dict[str, Any] = {"prefetch": 1, "tune": True} if large else {"prefetch": 2}
    if task in ("digits", "resnet50"):  # in 2D, as plain_best has it
        loading["callbacks"] = (*TOGETHER["callbacks"], "MemoryFormat")
    add(together, {**TOGETHER, **loading}, ours=True, against=(stock, best) if large else (stock,))


for name in BATCH:
    register(SUITE, name)
