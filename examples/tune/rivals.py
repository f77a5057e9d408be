"""Each sample waits and then holds Python's global interpreter lock: worker processes help more than threads."""

import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Parsed(Dataset):
    """Labeled vectors. Reading one waits for 1 ms, and parsing it takes about 1 ms of Python code."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index):
        time.sleep(0.001)
        text = " ".join(str((index * 31 + n) % 997) for n in range(3000))
        values = [int(word) for word in text.split()][:64]
        return torch.tensor(values, dtype=torch.float32) / 997, index % 4


class Classifier(LightningModule):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))

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
    loader = DataLoader(Parsed(), batch_size=16, shuffle=True)
    Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier(), loader)


if __name__ == "__main__":
    main()
