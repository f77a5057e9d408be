"""Two ranks under DDP with and without the lean parts; run by test_lean.py."""

import os
import signal
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_turbo import TurboDDPStrategy


class Net(pl.LightningModule):
    def __init__(self, ends_in=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.ends_in, self.batches = ends_in, 0

    def training_step(self, batch, index):
        self.batches += 1
        if self.batches == self.ends_in and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(96, 6, generator=generator), torch.randint(0, 3, (96,), generator=generator))
    lean = {"lean_step": True, "lean_logging": True, "sigterm_every": 4}
    for name, settings, ends_in in (("stock", {}, None), ("lean", lean, None), ("killed", lean, 2)):
        model = Net(ends_in)
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=TurboDDPStrategy(**settings), max_epochs=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        ended = False
        try:
            trainer.fit(model, DataLoader(data, batch_size=4))
        except SystemExit:
            ended = True
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        state = {"module": model.state_dict(), "metrics": metrics, "batches": model.batches, "ended": ended}
        torch.save(state, folder / f"{name}.{rank}")
    torch.save(uneven(rank), folder / f"uneven.{rank}")


class Alone(Net):
    """Ranks that do not wait for each other in a batch."""

    automatic_optimization = False

    def training_step(self, batch, index):
        self.batches += 1


class Uneven(IterableDataset):
    """Two batches on the first rank and three on the second; none of them knows."""

    def __init__(self, rank):
        self.batches = 2 + rank

    def __iter__(self):
        return iter(torch.ones(self.batches, 6))


def uneven(rank):
    """Return what a rank is told whose epoch is longer or shorter than the other's."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=TurboDDPStrategy(lean_step=True, sigterm_every=3), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(Alone(), DataLoader(Uneven(rank), batch_size=1))
    except RuntimeError as error:
        return str(error)


if __name__ == "__main__":
    main()
