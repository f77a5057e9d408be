"""Training loops of other libraries, each written as its own documentation writes it."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_turbo.bench.case import SkippedError
from lightning_turbo.bench.meter import Meter
from lightning_turbo.bench.workloads import Batch, Endless, Losses

__all__ = ["train_with_accelerate", "train_with_apex", "train_with_composer"]


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


def train_with_composer(meter: Meter, net: nn.Module, loader: Endless, optimizer: Optimizer) -> dict[str, float]:
    """Train with MosaicML Composer in bfloat16.

    Args:
        meter: Of the case.
        net: On its device.
        loader: Yields images and labels on that device.
        optimizer: Of the network.

    Returns:
        The mean of the last losses.
    """
    from composer import Callback, ComposerModel, DataSpec, Trainer  # pyright: ignore[reportMissingImports]

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, batch: Batch) -> object:
            return self.net(batch[0])

        def loss(self, outputs: object, batch: Batch) -> object:
            return F.cross_entropy(outputs, batch[1])  # pyright: ignore[reportArgumentType]

    losses = Losses()

    class Pace(Callback):
        def batch_end(self, state: object, logger: object) -> None:
            losses.add(state.loss)  # pyright: ignore[reportAttributeAccessIssue]
            if not meter.step(samples=state.batch_num_samples):  # pyright: ignore[reportAttributeAccessIssue]
                state.stop_training()  # pyright: ignore[reportAttributeAccessIssue]

    trainer = Trainer(
        model=Model(),
        train_dataloader=DataSpec(loader, num_samples=None, get_num_samples_in_batch=lambda batch: len(batch[1])),
        train_subset_num_batches=10**9,
        optimizers=optimizer,
        max_duration=f"{10**9}ba",
        precision="amp_bf16",
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
