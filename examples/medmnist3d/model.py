"""The classifier: MONAI's 3D ResNet with a weighted binary loss, AUC and accuracy."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from monai.networks.nets import resnet
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from examples.medmnist3d.weights import load_weights
from lightning_turbo import cyclic_lr

__all__ = ["VolumeClassifier"]


class VolumeClassifier(LightningModule):
    """Classifies volumes into two classes.

    Args:
        depth: Number of layers of the ResNet: 10, 18, 34, 50, 101, 152 or 200.
        widen: Factor of all channel counts; 1 is the published network.
        stem_stride: Stride of the first convolution: 1 for 28 x 28 x 28 voxels, 2 for MedicalNet's weights.
        max_pool: Whether the stem has a max pool. Without it, volumes of 28 x 28 x 28 voxels have 4 x 4 x 4 instead of
            2 x 2 x 2 voxels in the last layers, which takes about eight times as many operations.
        learning_rate: Learning rate of AdamW; the highest one with ``schedule="cyclic"``.
        weight_decay: Weight decay of AdamW.
        schedule: ``"plateau"`` halves the learning rate if ``val/loss`` does not improve, ``"cyclic"`` varies it
            between a tenth of it and all of it in each step, ``None`` keeps it constant. A run that is resumed with
            ``"plateau"`` has counted one epoch less, because Lightning saves the checkpoint before it updates the
            schedule; the others resume exactly.
        epochs_up: Epochs in which the cyclic learning rate rises, and then falls; may be fractional.
        pos_weight: Weight of positive samples in the loss. ``None`` uses the ratio of negative to positive samples.
        weights: File with pretrained weights, for example MedicalNet's. Matching weights are loaded, others reported.

    Raises:
        ValueError: If there is no such depth, or if no weights match.
    """

    def __init__(
        self,
        depth: int = 18,
        widen: float = 1.0,
        stem_stride: int = 1,
        max_pool: bool = True,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
        schedule: Literal["plateau", "cyclic"] | None = "plateau",
        epochs_up: float = 2.0,
        pos_weight: float | None = None,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        depths = sorted(int(name[6:]) for name in resnet.__all__ if name[6:].isdigit() and name.startswith("resnet"))
        if depth not in depths:
            raise ValueError(f"depth: expected one of {', '.join(map(str, depths))}, got {depth!r}.")
        self.save_hyperparameters(ignore="weights")
        self.net: nn.Module = getattr(resnet, f"resnet{depth}")(
            spatial_dims=3,
            n_input_channels=1,
            num_classes=1,
            widen_factor=widen,
            conv1_t_stride=stem_stride,
            no_max_pool=not max_pool,
        )
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.schedule, self.epochs_up = schedule, epochs_up
        self.pos_weight = pos_weight
        self.loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(1.0 if pos_weight is None else float(pos_weight)))
        scores = MetricCollection({"auc": BinaryAUROC(), "accuracy": BinaryAccuracy()})
        self.val_scores, self.test_scores = scores.clone(prefix="val/"), scores.clone(prefix="test/")
        if weights is not None:
            rank_zero_info(f"weights from {weights}\n{load_weights(self.net, weights)}")

    def setup(self, stage: str) -> None:
        """Set the weight of positive samples from the data."""
        if stage == "fit" and self.pos_weight is None:
            weight = self.trainer.datamodule.pos_weight
            self.loss.pos_weight = torch.full_like(self.loss.pos_weight, weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits ``(batch,)`` of volumes ``(batch, 1, x, y, z)``."""
        return self.net(images).flatten()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        loss, _ = self._loss(batch)
        self.log(
            "train/loss_step", loss, batch_size=len(batch[1])
        )  # of this rank only, so that no step waits for other ranks
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Log the loss, the AUC and the accuracy; return the probabilities."""
        return self._score("val", self.val_scores, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Log the loss, the AUC and the accuracy; return the probabilities."""
        return self._score("test", self.test_scores, batch)

    def _score(self, stage: str, scores: MetricCollection, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss, logits = self._loss(batch)
        scores.update(logits.sigmoid(), batch[1])
        self.log(f"{stage}/loss", loss, batch_size=len(batch[1]), sync_dist=True)
        self.log_dict(scores, batch_size=len(batch[1]))
        return logits.sigmoid()

    def _loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits = self(images).float()
        return self.loss(logits, labels.float()), logits

    def configure_optimizers(self) -> Any:
        """Return AdamW and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        if self.schedule is None:
            return optimizer
        if self.schedule == "cyclic":
            rate = self.learning_rate
            schedule = cyclic_lr(optimizer, rate / 10, rate, epochs_up=self.epochs_up, trainer=self.trainer)
        else:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
            schedule = {"scheduler": plateau, "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}
