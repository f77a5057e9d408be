"""The network of the demo: an ordinary LightningModule written for float32."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR


class DemoNet(LightningModule):
    """Three convolutions with batch norm, global average pooling, one linear layer.

    No code depends on the precision: all levels train with the same hyperparameters. The learning rate rises in the
    first tenth of the steps and then follows a cosine. The updates of SGD are larger than the spacing of bfloat16
    values, so the network also trains without float32 master weights.

    Args:
        dims: Spatial dimensions of the input, 2 or 3. Each convolution halves the size of volumes.
        classes: Number of classes, 2 or more.
        width: Channels of the first convolution. The second one has twice as many, the third one four times as many.
        learning_rate: Highest learning rate of the schedule.
    """

    def __init__(self, *, dims: int, classes: int, width: int = 16, learning_rate: float = 0.1) -> None:
        super().__init__()
        conv, norm, pool = {
            2: (nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d),
            3: (nn.Conv3d, nn.BatchNorm3d, nn.AdaptiveAvgPool3d),
        }[dims]
        layers: list[nn.Module] = []
        channels = 1
        for index, out in enumerate((width, 2 * width, 4 * width)):
            stride = 2 if dims == 3 or index == 2 else 1
            layers += [conv(channels, out, 3, stride=stride, padding=1, bias=False), norm(out), nn.ReLU()]
            channels = out
        self.net = nn.Sequential(*layers, pool(1), nn.Flatten(), nn.Linear(channels, classes))
        self.learning_rate = learning_rate

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of ``(batch, classes)`` for images of ``(batch, 1, *size)``."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of one batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy of one batch."""
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        scores = {"val_loss": F.cross_entropy(logits, labels), "val_accuracy": accuracy}
        self.log_dict(scores, batch_size=len(labels))

    def configure_optimizers(self) -> Any:
        """Return SGD with Nesterov momentum, and its schedule, which advances every optimizer step."""
        optimizer = SGD(self.parameters(), lr=self.learning_rate, momentum=0.9, nesterov=True)
        total = int(self.trainer.estimated_stepping_batches)
        warm_up = max(1, total // 10)

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / warm_up) * 0.5 * (1.0 + math.cos(math.pi * min(step, total) / total))

        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }
