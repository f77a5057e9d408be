"""3D convolutions: bfloat16 is faster on CPUs with instructions for it, and slower on others."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Volumes(LightningModule):
    """Three convolutions without biases, each with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        layers = []
        for inside, outside in ((1, 16), (16, 32), (32, 32)):
            layers += [nn.Conv3d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm3d(outside), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 2))

    def forward(self, x):
        """Return the logits."""
        return self.net(x)

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    """Train on batches in memory."""
    torch.manual_seed(0)
    batches = [(torch.randn(8, 1, 16, 16, 16), torch.arange(8) % 2) for _ in range(50)]
    loader = DataLoader(batches, batch_size=None)
    Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Volumes(), loader)


if __name__ == "__main__":
    main()
