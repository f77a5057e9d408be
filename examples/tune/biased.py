"""A bias before every norm, and ``loss.item()`` in each step: training is faster without the biases."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Biased(LightningModule):
    """Forty narrow convolutions, each with a bias that the next batch norm cancels."""

    def __init__(self) -> None:
        super().__init__()
        layers, inside = [], 3
        for _ in range(40):
            layers += [nn.Conv2d(inside, 4, 1), nn.BatchNorm2d(4), nn.ReLU()]
            inside = 4
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
        self.total = 0.0

    def forward(self, x):
        """Return the logits."""
        return self.net(x)

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy, and add it to the total."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.total += loss.item()
        return loss

    def configure_optimizers(self):
        """Return the fused Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


def main() -> None:
    """Train on batches in memory."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the layers are too small for several threads
    batches = [(torch.randn(4, 3, 8, 8), torch.arange(4)) for _ in range(100)]
    loader = DataLoader(batches, batch_size=None)
    Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Biased(), loader)


if __name__ == "__main__":
    main()
