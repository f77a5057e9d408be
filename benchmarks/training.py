"""What cases with Lightning share: a LightningModule around any network, and a Trainer.

The functions of the cases import this module, because it imports Lightning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from benchmarks.suite import CaseTimer
from benchmarks.work import DTYPES, Batch, Losses
from lightning_turbo._lightning import Callback, LightningDataModule, LightningModule, Precision, Trainer

__all__ = ["QUIET", "Classifier", "apex_amp", "train"]

# Arguments of a Trainer that writes nothing and shows nothing.
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Classifier(LightningModule):
    """A LightningModule that trains a network to classify.

    Args:
        net: A network that returns logits.
        optimizer: Called with the parameters of the network; returns what ``configure_optimizers`` may return.
        log: Number of values that the training step logs.
        metrics: Number of metrics of torchmetrics that it updates and logs.
    """

    def __init__(self, net: nn.Module, optimizer: Callable[[Any], Any], log: int = 0, metrics: int = 0) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.to_log = log
        self.metrics = nn.ModuleDict({f"metric{number}": MeanMetric() for number in range(metrics)})

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        for number in range(self.to_log):
            self.log(f"loss{number}", loss, batch_size=len(labels))
        if self.metrics:
            metrics: Any = dict(self.metrics)
            for metric in metrics.values():
                metric.update(loss.detach())
            self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(labels))
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return self.optimizer(self.net.parameters())


class _StepTimer(Callback):
    """Calls ``timer.step`` after each training batch, and stops the Trainer when it returns ``False``."""

    def __init__(self, timer: CaseTimer, samples: int) -> None:
        self.timer = timer
        self.samples = samples
        self.losses = Losses()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss and report the step."""
        self.losses.add(outputs["loss"])
        if not self.timer.step(self.samples):
            trainer.should_stop = True


def apex_amp(opt_level: Any, dtype: str | None = None, **options: Any) -> Precision:
    """Build ``ApexAMP`` with a ``dtype`` of ``"bf16"``, ``"fp16"``, or ``None`` for its default."""
    from lightning_turbo import ApexAMP

    return ApexAMP(opt_level, dtype=DTYPES[dtype] if dtype else None, **options)


def train(
    timer: CaseTimer,
    module: LightningModule,
    loader: Iterable[Any] | LightningDataModule,
    *,
    samples: int,
    callbacks: Iterable[Callback] = (),
    amp: dict[str, Any] | None = None,
    turbo: dict[str, Any] | None = None,
    quiet: bool = True,
    **trainer: Any,
) -> dict[str, float]:
    """Fit with a Trainer until ``timer.step`` returns ``False``.

    Args:
        timer: Timer of the case.
        module: The module to train.
        loader: Training batches, epoch after epoch; or a datamodule.
        samples: Number of samples per batch.
        callbacks: Further callbacks.
        amp: Arguments of ``apex_amp``, or ``None`` for no plugin.
        turbo: Arguments of ``TurboStrategy``, or ``None`` for Lightning's strategy.
        quiet: Whether to turn off logger, checkpoints, progress bar and model summary.
        trainer: Further arguments of the Trainer.

    Returns:
        The mean loss, as in ``Losses``.
    """
    from lightning_turbo import TurboStrategy

    step_timer = _StepTimer(timer, samples)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning|pytorch_lightning")
    if amp is not None:
        trainer["plugins"] = [apex_amp(**amp)]
    if turbo is not None:
        trainer["strategy"] = TurboStrategy(**turbo)
    device = {"accelerator": "gpu" if timer.device.type == "cuda" else "cpu", "devices": 1}
    options: dict[str, Any] = {**device, "max_epochs": -1, **(QUIET if quiet else {}), **trainer}
    Trainer(**options, callbacks=[*callbacks, step_timer]).fit(module, loader)
    return {"loss": step_timer.losses.mean()}
