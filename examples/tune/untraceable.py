"""A forward pass that branches on values, which cannot be traced, and many small weights: a fused optimizer helps."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Branching(LightningModule):
    """Thirty narrow residual convolutions. The sign of each residual depends on the sum of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(30))

    def forward(self, x):
        """Return the logits."""
        for layer in self.layers:
            y = layer(x)
            x = x + y if y.sum() > 0 else x - y
        return x.mean((2, 3))

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return Adam, which updates one tensor at a time."""
        return torch.optim.Adam(self.parameters(), lr=1e-3, foreach=False)


def main() -> None:
    """Train on batches in memory."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for several threads
    batches = [(torch.randn(4, 4, 4, 4), torch.arange(4)) for _ in range(200)]
    loader = DataLoader(batches, batch_size=None)
    Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Branching(), loader)


if __name__ == "__main__":
    main()
