"""One life of runs that go on with other ranks, workers and batch sizes; each rank leaves what its steps saw.

Words: the folder, the number of the life, and the names of cases as ``case_of`` reads them.
"""

import os
import random
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_turbo import Prefetch, SeededSampler
from tests.trainers import quiet_trainer
from tests.versions import unpickling

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SEED, EPOCHS = 5, 2
BATCHES = 4, 8, 3  # samples of a rank's batch in each life


class Case(NamedTuple):
    name: str
    length: int
    seeded: bool  # with a SeededSampler, else with the samplers that Lightning takes for shuffle=True
    drop_last: bool
    workers: tuple[int, ...]
    stops: tuple[int, ...]  # steps of a life


def case_of(name):
    """The case of a number: its random lengths, workers and stops."""
    rng = random.Random(name)
    length = 2 * rng.randint(12, 32)
    workers = tuple(rng.sample((0, 1, 2), 3))
    first = rng.randint(1, length // 8)  # the first two lives take 8 samples a step
    stops = first, rng.randint(1, length // 8 * 2 - first - 1)
    return Case(name, length, rng.random() < 0.5, rng.random() < 0.3, workers, stops)


class Augmented(Dataset):
    """A row is the index, and what was drawn from each generator."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


class Net(pl.LightningModule):
    """Notes the epoch, the number of the batch, how many the epoch has, and the rows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.steps = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, self.trainer.num_training_batches, batch))
        self.steps.append(self.global_step)
        return self.weight.square()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(pl.Callback):
    """Saves after so many steps, and ends the run there."""

    def __init__(self, path, steps):
        self.path, self.left = path, steps

    def on_train_batch_end(self, trainer, *_):
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def live(case, folder, life):
    data = Augmented(case.length)
    order = {"sampler": SeededSampler(data, SEED)} if case.seeded else {"shuffle": True}
    workers = case.workers[life]
    loader = DataLoader(data, BATCHES[life], num_workers=workers, drop_last=case.drop_last, **order)
    before, after = (folder / f"{case.name}-{number}.ckpt" for number in (life - 1, life))
    stops = [Stop(after, case.stops[life])] if life < len(case.stops) else []
    model = Net()
    trainer = quiet_trainer(
        devices=RANKS, strategy="ddp" if RANKS > 1 else "auto", max_epochs=EPOCHS, num_sanity_val_steps=0,
        callbacks=[Prefetch(sample_seeds=SEED), *stops],
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=before if life else None, **unpickling(True if life else None))
    torch.save({"seen": model.seen, "steps": model.steps}, folder / f"{case.name}-{life}.{RANK}")


def main(folder, life, *names):
    warnings.simplefilter("ignore")
    for name in names:
        live(case_of(name), Path(folder), int(life))


if __name__ == "__main__":
    main(*sys.argv[1:])
