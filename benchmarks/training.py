"""Cases that train through a Lightning Trainer: the callback that paces them, and a module around any network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.meter import Meter
from benchmarks.workloads import DTYPES, Batch, Losses
from lightning_turbo._lightning import Callback, LightningDataModule, LightningModule, Precision, Trainer

__all__ = ["QUIET", "Classifier", "Pace", "apex_amp", "train"]

# A Trainer without what writes or draws.
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Pace(Callback):
    """Tells the meter of every training batch, and stops the Trainer when the case is over.

    Args:
        meter: Of the case.
        samples: Samples in a batch.
    """

    def __init__(self, meter: Meter, samples: int = 0) -> None:
        self.meter = meter
        self.samples = samples
        self.losses = Losses()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        self.losses.add(outputs["loss"])
        if not self.meter.step(self.samples):
            trainer.should_stop = True


class Classifier(LightningModule):
    """An ordinary LightningModule around a network.

    Args:
        net: Gives logits.
        optimizer: Makes the optimizer from the network's parameters.
        log: How many values the training step logs.
    """

    def __init__(self, net: nn.Module, optimizer: Callable[[Any], Optimizer], log: int = 0) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.to_log = log

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        for number in range(self.to_log):
            self.log(f"loss{number}", loss, batch_size=len(labels))
        return loss

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer."""
        return self.optimizer(self.net.parameters())


def apex_amp(opt_level: str, dtype: str | None = None, **options: Any) -> Precision:
    """Build our precision plugin from plain values.

    Args:
        opt_level: ``"O0"`` to ``"O3"``.
        dtype: ``"bf16"``, ``"fp16"``, or ``None`` for the plugin's own choice.
        options: Its other arguments.
    """
    from lightning_turbo import ApexAMP

    return ApexAMP(opt_level, dtype=DTYPES[dtype] if dtype else None, **options)


def train(
    meter: Meter,
    module: LightningModule,
    loader: Iterable[Any] | LightningDataModule,
    *,
    samples: int,
    callbacks: Iterable[Callback] = (),
    **trainer: Any,
) -> dict[str, float]:
    """Fit until the meter says stop.

    Args:
        meter: Of the case.
        module: What to train.
        loader: Its training batches, repeated when they end; or a datamodule.
        samples: Samples a batch.
        callbacks: Further callbacks.
        trainer: Arguments of the Trainer; add ``QUIET`` to have none of its outputs.

    Returns:
        The mean of the last losses.
    """
    pace = Pace(meter, samples)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning|pytorch_lightning")
    options: dict[str, Any] = {
        "accelerator": "gpu" if meter.device.type == "cuda" else "cpu",
        "devices": 1,
        "max_epochs": -1,
        "callbacks": [*callbacks, pace],
        **trainer,
    }
    Trainer(**options).fit(module, loader)
    return {"loss": pace.losses.mean()}
