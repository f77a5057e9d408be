"""Training loops and loaders of other libraries, each written as its own documentation writes it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from benchmarks.meter import Meter
from benchmarks.suite import SkippedError
from benchmarks.workloads import Batch, Endless, Losses

__all__ = ["timm_loader", "torchdata_loader", "train_with_accelerate", "train_with_apex", "train_with_composer"]


def train_with_accelerate(meter: Meter, net: nn.Module, loader: Endless, optimizer: Optimizer) -> dict[str, float]:
    """Train with Hugging Face Accelerate in bfloat16, batches already being on the device.

    Args:
        meter: Of the case.
        net: On its device.
        loader: Yields images and labels on that device.
        optimizer: Of the network.

    Returns:
        The mean of the last losses.
    """
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(mixed_precision="bf16", cpu=meter.device.type == "cpu")
    net, optimizer = accelerator.prepare(net, optimizer)
    losses = Losses()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        losses.add(loss)
        if not meter.step(samples=len(labels)):
            break
    return {"loss": losses.mean()}


def train_with_composer(
    meter: Meter, net: nn.Module, loader: Endless, optimizer: Optimizer, precision: str
) -> dict[str, float]:
    """Train with MosaicML Composer.

    Args:
        meter: Of the case.
        net: On its device.
        loader: Yields images and labels on that device.
        optimizer: Of the network.
        precision: ``"fp32"``, the only one that Composer accepts on a CPU, or ``"amp_bf16"``.

    Returns:
        The mean of the last losses.
    """
    from composer import Callback, ComposerModel, Trainer  # pyright: ignore[reportMissingImports]

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, batch: Batch) -> object:
            return self.net(batch[0])

        def loss(self, outputs: object, batch: Batch) -> object:
            return F.cross_entropy(outputs, batch[1])  # pyright: ignore[reportArgumentType]

    losses = Losses()
    batch = len(loader.batches[0][1])

    class Pace(Callback):
        def batch_end(self, state: object, logger: object) -> None:
            losses.add(state.loss)  # pyright: ignore[reportAttributeAccessIssue]
            if not meter.step(samples=batch):
                state.stop_training()  # pyright: ignore[reportAttributeAccessIssue]

    trainer = Trainer(
        model=Model(),
        train_dataloader=loader,
        train_subset_num_batches=10**9,
        device_train_microbatch_size=batch,  # read from a DataLoader, asked for with any other
        optimizers=optimizer,
        max_duration=f"{10**9}ba",
        precision=precision,
        device="gpu" if meter.device.type == "cuda" else "cpu",
        callbacks=[Pace()],
        progress_bar=False,
    )
    trainer.fit()
    return {"loss": losses.mean()}


def train_with_apex(
    meter: Meter, net: nn.Module, loader: Endless, optimizer: Optimizer, level: str
) -> dict[str, float]:
    """Train with an apex that still has ``apex.amp``, in float16.

    Args:
        meter: Of the case.
        net: On its device.
        loader: Yields images and labels on that device.
        optimizer: Of the network.
        level: ``"O1"`` or ``"O2"``.

    Returns:
        The mean of the last losses.

    Raises:
        SkippedError: If the installed apex has no ``amp``.
    """
    try:
        from apex import amp  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SkippedError(f"this apex has no amp ({error})") from None
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    losses = Losses()
    for images, labels in loader:
        loss = F.cross_entropy(net(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.add(loss)
        if not meter.step(samples=len(labels)):
            break
    return {"loss": losses.mean()}


def timm_loader(
    dataset: Dataset[Any],
    sampler: Sampler[int],
    batch: int,
    workers: int,
    device: torch.device,
    mean: list[float],
    std: list[float],
) -> Iterable[Any]:
    """Build what ``timm.data.create_loader`` builds: uint8 from the workers, float32 and normalised on the device.

    Args:
        dataset: Gives a numpy array of uint8, ``(3, height, width)``, and its label.
        sampler: Of the data set.
        batch: Samples a batch.
        workers: Worker processes.
        device: Where the batches go.
        mean: Of the three channels, in units of the largest pixel value.
        std: Likewise.

    Returns:
        A loader of images and labels on the device.
    """
    from timm.data.loader import PrefetchLoader, fast_collate  # pyright: ignore[reportMissingImports]

    loader = DataLoader(
        dataset,
        batch,
        sampler=sampler,
        num_workers=workers,
        collate_fn=fast_collate,
        pin_memory=device.type == "cuda",
        drop_last=True,
        persistent_workers=workers > 0,
    )
    return PrefetchLoader(loader, mean=tuple(mean), std=tuple(std), channels=3, device=device)


def _collated(dataset: Dataset[Any], indices: list[int]) -> Any:
    return default_collate([dataset[index] for index in indices])


def torchdata_loader(
    dataset: Dataset[Any], sampler: Sampler[int], batch: int, workers: int, method: str
) -> Iterable[Any]:
    """Build torchdata's nodes as its guide for those who come from DataLoader does.

    Args:
        dataset: Gives samples.
        sampler: Of the data set; every epoch starts new workers.
        batch: Samples a batch.
        workers: How many threads or processes.
        method: ``"thread"`` or ``"process"``.

    Returns:
        A loader of batches.
    """
    import torchdata.nodes as tn

    node = tn.Batcher(tn.SamplerWrapper(sampler), batch, drop_last=True)
    node = tn.ParallelMapper(node, partial(_collated, dataset), num_workers=workers, method=method)  # pyright: ignore[reportArgumentType]
    return tn.Loader(tn.Prefetcher(node, prefetch_factor=2 * workers))
