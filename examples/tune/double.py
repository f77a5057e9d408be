"""A float64 network whose samples wait, as for a disk: loading ahead helps, and half precision is not tried."""

import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    """Labeled float64 vectors. Reading one waits for 1 ms."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index):
        time.sleep(0.001)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator, dtype=torch.float64), index % 4


class Classifier(LightningModule):
    """Three linear layers in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))
        self.double()

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return the fused SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01, fused=True)


def main() -> None:
    """Train for two epochs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the other cores are for loading
    loader = DataLoader(Slow(), batch_size=16, shuffle=True)
    Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier(), loader)


if __name__ == "__main__":
    main()
