"""Each sample waits, as for a disk or a network: loading ahead in several threads or processes helps."""

import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    """Labeled vectors. Reading one waits for 1.5 ms."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index):
        time.sleep(0.0015)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator), index % 4


class Classifier(LightningModule):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    """Train for two epochs."""
    torch.manual_seed(0)
    loader = DataLoader(Slow(), batch_size=16, shuffle=True)
    Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier(), loader)


if __name__ == "__main__":
    main()
