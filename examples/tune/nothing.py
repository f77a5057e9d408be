"""Large float64 matrix products, which mixed precision does not cast: nothing in this package makes them faster."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Square(LightningModule):
    """Three products with large float64 matrices.

    Args:
        width: Rows and columns of each matrix.
    """

    def __init__(self, width: int = 600) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.randn(width, width, dtype=torch.float64) / width**0.5 for _ in range(3)
        )

    def training_step(self, batch, batch_idx):
        """Return the mean square of the products."""
        for weight in self.weights:
            batch = batch @ weight
        return F.mse_loss(batch, torch.zeros_like(batch))

    def configure_optimizers(self):
        """Return the fused SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, fused=True)


def main() -> None:
    """Train on one batch in memory."""
    torch.manual_seed(0)
    batches = [torch.randn(600, 600, dtype=torch.float64)] * 64
    loader = DataLoader(batches, batch_size=None)
    Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Square(), loader)


if __name__ == "__main__":
    main()
