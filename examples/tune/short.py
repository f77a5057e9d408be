"""Short epochs, each of which starts worker processes again: ``persistent_workers`` helps."""

import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Opened(Dataset):
    """Eighty small samples of a source that each process opens for itself, which takes a fifth of a second."""

    opened = False

    def __len__(self) -> int:
        """Return the number of samples."""
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a sample, and open the source before the first one."""
        if not self.opened:
            time.sleep(0.2)
            self.opened = True
        time.sleep(0.001)
        return torch.full((8,), float(index))


class Small(LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        """Return the mean squared error."""
        return F.mse_loss(self.net(batch)[:, 0], batch[:, 0])

    def configure_optimizers(self):
        """Return the fused SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-6, fused=True)


def main() -> None:
    """Train for four epochs, with one worker process."""
    torch.manual_seed(0)
    loader = DataLoader(Opened(), batch_size=8, shuffle=True, num_workers=1)
    Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Small(), loader)


if __name__ == "__main__":
    main()
