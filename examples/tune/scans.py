"""Volumes that wait, as for a disk, and 3D convolutions: loading ahead and half precision together help most."""

import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Scans(Dataset):
    """Labeled volumes of 12 x 12 x 12 voxels. Reading one waits for 2 ms."""

    def __len__(self) -> int:
        return 1600

    def __getitem__(self, index):
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 12, 12, 12, generator=generator), index % 2


class Classifier(LightningModule):
    """Two convolutions without biases, each with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        layers = []
        for inside, outside in ((1, 16), (16, 32)):
            layers += [nn.Conv3d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm3d(outside), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    """Train for two epochs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the other cores are for loading
    loader = DataLoader(Scans(), batch_size=8, shuffle=True)
    Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier(), loader)


if __name__ == "__main__":
    main()
