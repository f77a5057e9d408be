"""A callback that shows volumes and their predictions in TensorBoard."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["SliceImages", "slice_image"]

RIGHT, WRONG = (0.0, 0.62, 0.45), (0.84, 0.37, 0.0)  # a green and a red that are distinguishable with color blindness


def slice_image(volumes: Tensor, labels: Tensor, probabilities: Tensor) -> Tensor:
    """Draw the three middle slices of each volume as a row, with a frame that shows whether the prediction is right.

    Args:
        volumes: Shape ``(n, 1, x, y, z)``, any range of values.
        labels: Shape ``(n,)``, 0 or 1.
        probabilities: Probabilities of label 1, shape ``(n,)``.

    Returns:
        An RGB image ``(3, height, width)`` with values from 0 to 1. The frame is green if the prediction is right, red
        if it is wrong, and brighter the more certain the prediction is.
    """
    rows = []
    side = max(volumes.shape[2:])
    for volume, label, probability in zip(volumes[:, 0].float().cpu(), labels.cpu(), probabilities.cpu(), strict=True):
        low, high = volume.min(), volume.max()
        gray = (volume - low) / (high - low).clamp(min=1e-6)
        middles = [gray.select(axis, gray.shape[axis] // 2) for axis in range(3)]
        square = [pad(m, (0, side - m.shape[1], 0, side - m.shape[0])) for m in middles]
        row = pad(torch.cat(square, dim=1).expand(3, -1, -1), (2, 2, 2, 2))
        color = RIGHT if bool(probability > 0.5) == bool(label) else WRONG
        frame = torch.ones_like(row[0], dtype=torch.bool)
        frame[2:-2, 2:-2] = False
        certainty = 2 * abs(float(probability) - 0.5)
        rows.append(torch.where(frame, torch.tensor(color)[:, None, None] * (0.3 + 0.7 * certainty), row))
    return torch.cat(rows, dim=1)


class SliceImages(Callback):
    """Logs the middle slices of the first validation volumes to TensorBoard in every validation.

    Args:
        volumes: Number of volumes, at most one batch.
    """

    def __init__(self, volumes: int = 8) -> None:
        if volumes < 1:
            raise ValueError(
                f"SliceImages: expected volumes of 1 or more, got {volumes!r}. Remove the callback to log no images."
            )
        self.volumes = volumes

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draw the first batch."""
        if batch_idx or trainer.sanity_checking or not trainer.is_global_zero:
            return
        images, labels = (part[: self.volumes] for part in batch)
        image = slice_image(images, labels, outputs[: self.volumes])
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("val/slices", image, trainer.global_step)
