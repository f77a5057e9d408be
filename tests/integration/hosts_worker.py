"""One of four ranks on two hosts, or one process on the joint batch; run by test_hosts.py."""

import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_turbo import ApexAMP, AtomicCheckpointIO
from lightning_turbo.data.loading import thread_policy
from tests.integration.noting import gives
from tests.trainers import quiet_trainer

LEVELS = ("O0", "O2")
EPOCHS, SAMPLES, JOINT = 2, 64, 8


def samples(ranks):
    """Samples in an order of chance that depends on the epoch alone; Lightning gives each rank its share."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    data = TensorDataset(x, y, torch.arange(SAMPLES))
    order = {"shuffle": True} if ranks > 1 else {"sampler": DistributedSampler(data, 1, 0, seed=0)}
    return gives(DataLoader(data, JOINT // ranks, **order), prefetch_batches=2)


class Net(pl.LightningModule):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
        self.seen = []

    def training_step(self, batch, index):
        x, y, numbers = batch
        self.seen += [(self.current_epoch, number) for number in numbers.tolist()]
        loss = nn.functional.cross_entropy(self.net(x).float(), y)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(y))
        self.log("samples", float(len(y)), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Telling(AtomicCheckpointIO):
    """Counts the files that this rank writes."""

    written = 0

    def save_checkpoint(self, *args, **kwargs):
        super().save_checkpoint(*args, **kwargs)
        self.written += 1


def run(folder):
    """Train at every level and save what this rank has seen and ended with."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    for level in LEVELS:
        model, io = Net(seed=rank), Telling()  # ranks begin with different weights: DDP has to make them rank 0's
        saves = ModelCheckpoint(folder / f"{level}.{ranks}", every_n_train_steps=4, save_top_k=-1, filename="{step}")
        trainer = quiet_trainer(
            devices=ranks // nodes, num_nodes=nodes, strategy="turbo_ddp" if ranks > 1 else "auto", max_epochs=EPOCHS,
            callbacks=[saves], plugins=[ApexAMP(level, dtype=torch.bfloat16), io], enable_checkpointing=True,
        )  # fmt: skip
        trainer.fit(model, samples(ranks))
        end = {
            "module": {name: value.clone() for name, value in model.state_dict().items()},
            "seen": model.seen,
            "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "written": io.written,
            "host": os.environ.get("GROUP_RANK"),
        }
        torch.save(end, folder / f"{level}.{ranks}.{rank}.end")


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run(Path(sys.argv[1]))


if __name__ == "__main__":
    # These samples load fast, and are to be loaded in the background all the same.
    thread_policy.MIN_BATCH_SECONDS = 0.0
    main()
