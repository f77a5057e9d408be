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
    """Tells volumes of two classes apart.

    Args:
        depth: Layers of the ResNet: 10, 18, 34, 50, 101, 152 or 200.
        widen: Factor of all channel counts; 1 is the published network.
        stem_stride: Stride of the first convolution; 1 suits 28 voxels a side, 2 is MedicalNet's.
        max_pool: Whether the stem halves the sides once more. Without it cubes of 28 voxels are 4 a side in the last
            layers and not 2, for some eight times the arithmetic.
        learning_rate: Of AdamW; with ``schedule="cyclic"`` the highest one.
        weight_decay: Of AdamW.
        schedule: ``"plateau"`` divides the rate by 2 where ``val/loss`` stays, ``"cyclic"`` cycles it step by step
            between a tenth and all of it, ``None`` leaves it. Lightning saves a checkpoint before it lets the plateau
            see that epoch, so a run that goes on has counted one epoch less; the others go on exactly.
        epochs_up: Epochs of the cyclic rate's rise, and of its fall; fractions allowed.
        pos_weight: Weight of positive samples in the loss; ``None`` takes the data's, negatives for each positive.
        weights: A file of pretrained weights, such as MedicalNet's; what fits is loaded, and the rest reported.

    Raises:
        ValueError: If there is no such depth, or the weights match nothing.
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
            raise ValueError(f"depth={depth!r}; expected {', '.join(map(str, depths))}. Choose one of these.")
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
            rank_zero_info(f"weights of {weights}\n{load_weights(self.net, weights)}")

    def setup(self, stage: str) -> None:
        """Weigh positive samples as the data asks."""
        if stage == "fit" and self.pos_weight is None:
            weight = self.trainer.datamodule.pos_weight
            self.loss.pos_weight = torch.full_like(self.loss.pos_weight, weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits ``(batch,)`` of volumes ``(batch, 1, x, y, z)``."""
        return self.net(images).flatten()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        loss, _ = self._loss(batch)
        self.log("train/loss_step", loss, batch_size=len(batch[1]))  # this rank's, so that no step waits for the others
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Log loss, AUC and accuracy; return the probabilities."""
        return self._score("val", self.val_scores, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Log loss, AUC and accuracy; return the probabilities."""
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
