"""A run in which all tensors of a step hold its number, saved in the background at every step; it is killed.

``python saving_worker.py FOLDER``
"""

import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_turbo import AtomicCheckpointIO, ExactResume
from tests.trainers import quiet_trainer


class Counting(torch.optim.SGD):
    def step(self, closure):
        loss = super().step(closure)
        for weight in self.param_groups[0]["params"]:
            self.state[weight].setdefault("steps", torch.zeros(2**16)).add_(1)
        return loss


class Counts(pl.LightningModule):
    """Every weight and buffer, and all of the optimizer's state, grows by 1 a step."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(2**18) for _ in range(4))
        self.register_buffer("seen", torch.zeros(2**18))

    def training_step(self, batch, index):
        self.seen += 1
        return -sum(weight.sum() for weight in self.weights)

    def configure_optimizers(self):
        return Counting(self.parameters(), lr=1.0)


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    saves = ModelCheckpoint(Path(sys.argv[1]), filename="{step}", every_n_train_steps=1, enable_version_counter=False)
    quiet_trainer(
        enable_checkpointing=True, callbacks=[saves, ExactResume()], plugins=[AtomicCheckpointIO(background=True)],
        max_epochs=1,
    ).fit(Counts(), torch.utils.data.DataLoader(range(100_000)))  # fmt: skip


if __name__ == "__main__":
    main()
