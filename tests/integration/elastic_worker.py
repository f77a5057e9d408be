"""A script that torchrun starts again with the ranks that are left, and that goes on from its last checkpoint.

Each step is a line of a file: its number, the epoch, how many batches that has, and the samples. Word: the folder.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.integration.anywhere_worker import Augmented, Net
from tests.integration.noting import gives
from tests.trainers import quiet_trainer
from tests.versions import unpickling

LENGTH, BATCH, EPOCHS = 64, 4, 2


class Slow(Net):
    def __init__(self, file):
        super().__init__()
        self.file = file

    def training_step(self, batch, batch_idx):
        time.sleep(0.3)
        line = [self.global_step, self.current_epoch, self.trainer.num_training_batches, batch[:, 0].int().tolist()]
        print(json.dumps(line), file=self.file, flush=True)
        return super().training_step(batch, batch_idx)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, nodes = Path(sys.argv[1]), int(os.environ["GROUP_WORLD_SIZE"])
    name = f"{nodes}.{os.environ['RANK']}"
    trainer = quiet_trainer(
        num_nodes=nodes, strategy="ddp", max_epochs=EPOCHS, enable_checkpointing=True, num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder / "saved", every_n_train_steps=2, save_last=True)],
    )  # fmt: skip
    again = (folder / "saved/last.ckpt").exists()
    with open(folder / name, "w") as file:
        data = gives(DataLoader(Augmented(LENGTH), BATCH, shuffle=True, num_workers=1), sample_seeds=1)
        trainer.fit(Slow(file), data, ckpt_path="last" if again else None, **unpickling(True if again else None))


if __name__ == "__main__":
    main()
