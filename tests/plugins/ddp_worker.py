"""One rank of two, or the joint run of one process, for several ways to train; run by test_apex_amp_ddp.py."""

import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_turbo import ApexAMP, ApexGradScaler, PrefetchLoader, TurboDDPStrategy


class Joint(pl.LightningModule):
    """Called as a whole and in parts; the ranks begin with different weights, and DDP must follow the first one's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(int(os.environ.get("RANK", 0)))
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 8))
        self.head = nn.Linear(8, 3)
        self.dtypes = set()

    def forward(self, x):
        features = self.net(x)
        self.dtypes.add(f"between parts {features.dtype}")
        return self.head(features)

    def training_step(self, batch, index):
        out = self(batch) if index % 2 else self.head(self.net(batch))
        self.dtypes.add(str(out.dtype))
        return nn.functional.cross_entropy(out, batch[:, :3].argmax(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Net(pl.LightningModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def loss(self, batch):
        return self.net(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoLosses(Net):
    """Two backward passes before a step."""

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(3 * self.net(-batch).float().mean())
        optimizer.step()


class Accumulating(Net):
    """The ranks' gradients are averaged at the last of three batches."""

    def training_step(self, batch, index):
        last = index % 3 == 2
        with nullcontext() if last else self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch) / 3)
        if last:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Spiking(Accumulating):
    """An overflow of one rank in a pass that is not synchronised; the step of its window is left out."""

    def loss(self, batch):
        is_spike = self.current_epoch == 0 and self.trainer.fit_loop.batch_idx == 4
        return super().loss(batch) * (float("inf") if is_spike and self.global_rank == self.spikes_on else 1.0)

    spikes_on = 1

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if not isinstance(self.trainer.precision_plugin, ApexAMP):
            self.spikes_on = None
            step = optimizer.step
            optimizer.step = lambda *args, **kwargs: None if self.global_step == 1 else step(*args, **kwargs)
        return optimizer


class Unused(Net):
    """A part that no batch uses, one that the second rank uses in the first batch of a window alone."""

    automatic_optimization = True

    def __init__(self):
        super().__init__()
        self.never, self.rare = nn.Linear(4, 1), nn.Linear(4, 1)

    def training_step(self, batch, index):
        rare = self.rare(batch).float().mean() if self.global_rank and index % 3 == 0 else 0.0
        return self.loss(batch) + rare

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, weight_decay=0.5)


KINDS = {"joint": Joint, "two": TwoLosses, "sync": Accumulating, "spike": Spiking, "unused": Unused}


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    data = TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(1)))
    for case in sys.argv[2].split(","):
        kind, strategy, level, half, scale, window = case.split("-")
        scaler = ApexGradScaler(max_scale=1024.0) if scale == "dynamic" else None
        settings = {"dtype": half, "scaler": scaler, "loss_scale": None if scale in ("default", "dynamic") else scale}
        plugins = [] if level == "none" else [ApexAMP(level, **settings)]
        model = KINDS[kind]()
        start = {name: param.detach().clone() for name, param in model.named_parameters()}
        sampler = torch.utils.data.DistributedSampler(data, world, rank, shuffle=False)
        collate = {"collate_fn": lambda rows: torch.stack([row[0] for row in rows])}
        loader = PrefetchLoader(data, 8 if kind != "joint" else 16 // world, sampler=sampler, **collate)
        pl.Trainer(
            accelerator="cpu", devices=world, max_epochs=2, plugins=plugins, use_distributed_sampler=False,
            strategy=TurboDDPStrategy() if strategy == "turbo" else strategy if world > 1 else "auto",
            accumulate_grad_batches=int(window), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(model, loader)  # fmt: skip
        result = {"weights": {name: param.detach() for name, param in model.named_parameters()}, "start": start}
        result |= {"scale": plugins[0].loss_scale if plugins else 1.0, "dtypes": sorted(getattr(model, "dtypes", ()))}
        torch.save(result, folder / f"{case}.{world}.{rank}")


if __name__ == "__main__":
    main()
