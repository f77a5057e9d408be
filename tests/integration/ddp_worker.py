"""One rank of a two-rank run, or the joint run of one process; run by test_apex_amp_ddp.py."""

import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import ApexAMP


class Net(pl.LightningModule):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8))
        self.head = nn.Linear(8, 3)
        self.dtypes = set()

    def forward(self, x):
        features = self.net(x)
        self.dtypes.add(f"between parts {features.dtype}")
        return self.head(features)

    def training_step(self, batch, index):
        x, y = batch
        out = self(x) if index % 2 else self.head(self.net(x))
        self.dtypes.add(str(out.dtype))
        return nn.functional.cross_entropy(out, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Keep(pl.Callback):
    def on_train_end(self, trainer, module):
        self.updated = [p.detach().clone() for g in trainer.optimizers[0].param_groups for p in g["params"]]


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder, cases = Path(sys.argv[1]), sys.argv[2].split(",")
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 1, 6, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator))
    for case in cases:
        level, half, window, *compressed = case.split("-")
        size = 8 // world
        sampler = torch.utils.data.DistributedSampler(data, world, rank, shuffle=False) if world > 1 else None
        keep = Keep()
        # Ranks start from different weights: DDP, and the masters, must follow rank 0.
        model = Net(seed=rank)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        trainer = pl.Trainer(
            accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", max_epochs=2,
            accumulate_grad_batches=int(window), callbacks=[keep], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            plugins=[ApexAMP(level, dtype=getattr(torch, half), compress_gradients=bool(compressed))],
        )  # fmt: skip
        trainer.fit(model, DataLoader(data, batch_size=size, sampler=sampler))
        torch.save(
            {"updated": keep.updated, "module": model.state_dict(), "dtypes": sorted(model.dtypes), "start": start},
            folder / f"{case}.{world}.{rank}",
        )


if __name__ == "__main__":
    main()
