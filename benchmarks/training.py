"""What cases share with Lightning, imported inside their functions: a module around any network, and a Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.suite import CaseTimer
from benchmarks.work import DTYPES, Batch, Losses
from lightning_turbo._lightning import Callback, LightningDataModule, LightningModule, Precision, Trainer

__all__ = ["QUIET", "Classifier", "apex_amp", "train"]

# A Trainer without what writes or draws.
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Classifier(LightningModule):
    """An ordinary LightningModule around a network.

    Args:
        net: Gives logits.
        optimizer: Makes the optimizer from the network's parameters.
        log: How many values the training step logs.
    """

    def __init__(self, net: nn.Module, optimizer: Callable[[Any], Any], log: int = 0) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.to_log = log

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        for number in range(self.to_log):
            self.log(f"loss{number}", loss, batch_size=len(labels))
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return self.optimizer(self.net.parameters())


class _Pace(Callback):
    """Tells the timer of every training batch, and stops the Trainer when the case is over."""

    def __init__(self, timer: CaseTimer, samples: int) -> None:
        self.timer = timer
        self.samples = samples
        self.losses = Losses()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch."""
        self.losses.add(outputs["loss"])
        if not self.timer.step(self.samples):
            trainer.should_stop = True


def apex_amp(opt_level: Any, dtype: str | None = None, **options: Any) -> Precision:
    """Build our precision plugin, with a ``dtype`` of ``"bf16"``, ``"fp16"``, or ``None`` for the plugin's choice."""
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
    """Fit through a Trainer until the timer says stop.

    Args:
        timer: Of the case.
        module: What to train.
        loader: Its training batches, repeated when they end; or a datamodule.
        samples: Samples a batch.
        callbacks: Further callbacks.
        amp: Arguments of ``ApexAMP``, or ``None`` for none.
        turbo: Arguments of ``TurboStrategy``, or ``None`` for Lightning's own strategy.
        quiet: Whether logger, checkpoints, bar and summary are off.
        trainer: Arguments of the Trainer.

    Returns:
        The mean loss of ``Losses``.
    """
    from lightning_turbo import TurboStrategy

    pace = _Pace(timer, samples)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning|pytorch_lightning")
    if amp is not None:
        trainer["plugins"] = [apex_amp(**amp)]
    if turbo is not None:
        trainer["strategy"] = TurboStrategy(**turbo)
    device = {"accelerator": "gpu" if timer.device.type == "cuda" else "cpu", "devices": 1}
    options: dict[str, Any] = {**device, "max_epochs": -1, **(QUIET if quiet else {}), **trainer}
    Trainer(**options, callbacks=[*callbacks, pace]).fit(module, loader)
    return {"loss": pace.losses.mean()}
