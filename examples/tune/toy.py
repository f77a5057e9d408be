"""A network so small that Lightning's training loop takes longer than its step: ``lean`` helps."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Toy(LightningModule):
    """Three linear layers and one logged value."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        """Log and return the cross-entropy."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, batch_size=len(batch[1]))
        return loss

    def configure_optimizers(self):
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def main() -> None:
    """Train on batches in memory."""
    torch.manual_seed(0)
    batches = [(torch.randn(16, 32), torch.randint(10, (16,))) for _ in range(200)]
    loader = DataLoader(batches, batch_size=None)
    Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Toy(), loader)


if __name__ == "__main__":
    main()
