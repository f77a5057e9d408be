"""An ordinary Trainer script with the changes that speed it up. Each changed line ends with ``# +``.

Run it with ``python examples/add_apex_amp.py``. It trains on the digits dataset that scikit-learn includes.
"""

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_turbo import ApexAMP, ExactAccumulation, GradToNone, PrefetchDataModule, cyclic_lr  # +


class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        accuracy = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        cycle = cyclic_lr(optimizer, base_lr=0.005, max_lr=0.05, epochs_up=2, trainer=self.trainer)  # +
        return {"optimizer": optimizer, "lr_scheduler": cycle}  # +


class DigitsData(LightningDataModule):
    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        seeded = torch.Generator().manual_seed(0)
        self.parts = random_split(TensorDataset(images, torch.tensor(labels)), [0.75, 0.25], seeded)

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], batch_size=64)


class FastDigitsData(PrefetchDataModule, DigitsData):  # +
    """The same data, with the next batches loaded in the background."""  # +


if __name__ == "__main__":
    trainer = Trainer(
        max_epochs=4,
        accumulate_grad_batches=2,
        plugins=[ApexAMP("O1")],  # +
        callbacks=[ExactAccumulation(), GradToNone()],  # +
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Digits(), datamodule=FastDigitsData())  # +
    print(f"validation accuracy {trainer.callback_metrics['accuracy']:.3f}")
