"""Training loops and loaders of other libraries, each written as in the documentation of the library."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from benchmarks.suite import CaseTimer, SkippedError
from benchmarks.work import Endless, Losses, plain_loop

__all__ = [
    "monai_loader", "timm_loader", "torchdata_loader", "train_with_accelerate", "train_with_apex",
    "train_with_composer",
]  # fmt: skip


def train_with_accelerate(timer: CaseTimer, net: nn.Module, loader: Endless, optimizer: Optimizer) -> dict[str, float]:
    """Train with Hugging Face Accelerate in bfloat16, with batches that are on the device already."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=timer.device.type == "cpu")
    net, optimizer = accelerator.prepare(net, optimizer)
    return plain_loop(timer, net, loader, optimizer, backward=accelerator.backward)


def train_with_composer(
    timer: CaseTimer, net: nn.Module, loader: Endless, optimizer: Optimizer, precision: str
) -> dict[str, float]:
    """Train with MosaicML Composer at a precision of ``"fp32"`` or ``"amp_bf16"``."""
    if precision != "fp32" and timer.device.type == "cpu":
        raise SkippedError("Composer has no mixed precision on a CPU")
    from composer import Callback, ComposerModel, Trainer

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, batch: Any) -> object:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any) -> object:
            return F.cross_entropy(outputs, batch[1])

    losses, batch = Losses(), len(loader.batches[0][1])

    class StepTimer(Callback):
        def batch_end(self, state: Any, logger: object) -> None:
            losses.add(state.loss)
            if not timer.step(samples=batch):
                state.stop_training()

    Trainer(
        model=Model(),
        train_dataloader=loader,
        train_subset_num_batches=10**9,
        device_train_microbatch_size=batch,  # required unless the loader is a DataLoader
        optimizers=optimizer,
        max_duration=f"{10**9}ba",
        precision=precision,
        device="gpu" if timer.device.type == "cuda" else "cpu",
        callbacks=[StepTimer()],
        progress_bar=False,
    ).fit()
    return {"loss": losses.mean()}


def train_with_apex(
    timer: CaseTimer, net: nn.Module, loader: Endless, optimizer: Optimizer, level: str
) -> dict[str, float]:
    """Train with ``apex.amp`` in float16, at level ``"O1"`` or ``"O2"``.

    Raises:
        SkippedError: On a CPU, or if apex is not installed or has no ``amp``, as newer versions.
    """
    if timer.device.type == "cpu":
        raise SkippedError("apex needs a GPU")
    try:
        from apex import amp
    except ImportError as error:
        raise SkippedError(f"apex.amp cannot be imported ({error})") from None
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0)

    def backward(loss: Tensor) -> None:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    return plain_loop(timer, net, loader, optimizer, backward=backward)


def timm_loader(
    dataset: Dataset[Any], sampler: Sampler[int], batch: int, workers: int, device: torch.device,
    mean: list[float], std: list[float],
) -> Iterable[Any]:  # fmt: skip
    """Build the loader of ``timm.data.create_loader``: uint8 from the workers, normalized to float32 on the device.

    The dataset returns a uint8 NumPy array of shape ``(3, height, width)`` and a label. ``mean`` and ``std`` of the
    three channels are for pixel values from 0 to 1.
    """
    from timm.data.loader import PrefetchLoader, fast_collate

    loader = DataLoader(
        dataset, batch, sampler=sampler, num_workers=workers, collate_fn=fast_collate, drop_last=True,
        pin_memory=device.type == "cuda", persistent_workers=workers > 0,
    )  # fmt: skip
    return PrefetchLoader(loader, mean=tuple(mean), std=tuple(std), channels=3, device=device)


def _collated(dataset: Dataset[Any], indices: list[int]) -> Any:
    return default_collate([dataset[index] for index in indices])


def torchdata_loader(
    dataset: Dataset[Any], sampler: Sampler[int], batch: int, workers: int, method: str
) -> Iterable[Any]:
    """Build torchdata's nodes as in its migration guide from DataLoader, with ``"thread"`` or ``"process"`` workers.

    Each epoch starts new workers.
    """
    import torchdata.nodes as tn

    node = tn.Batcher(tn.SamplerWrapper(sampler), batch, drop_last=True)
    node = tn.ParallelMapper(node, partial(_collated, dataset), num_workers=workers, method=method)
    return tn.Loader(tn.Prefetcher(node, prefetch_factor=2 * workers))


def monai_loader(dataset: Dataset[Any], sampler: Sampler[int] | None, batch: int, workers: int) -> Iterable[Any]:
    """Build MONAI's ``ThreadDataLoader``: a thread loads batches ahead, with workers that are threads too."""
    from monai.data import ThreadDataLoader

    options: dict[str, Any] = {"sampler": sampler, "num_workers": workers, "use_thread_workers": workers > 0}
    return ThreadDataLoader(dataset, batch_size=batch, **options)
