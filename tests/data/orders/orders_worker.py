"""One rank of a Trainer over the orders: which samples it was given, to FOLDER/RANK.json."""

import json
import os
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_turbo import LengthBatchSampler, Prefetch, SeededSampler, WeightedSampler

CASES = (
    ("ddp", "by length", "outside"),
    ("ddp", "by length", "hook"),
    ("turbo_ddp", "by length", "datamodule"),
    ("turbo_ddp", "by length", "outside"),
    ("ddp", "by weight", "hook"),
    ("turbo_ddp", "by weight", "outside"),
)
LENGTHS = [1 + i * 7 % 23 for i in range(42)]


def make_loader(order):
    if order == "by length":
        return DataLoader(range(42), batch_sampler=LengthBatchSampler(LENGTHS, max_cost=60, seed=1))
    return DataLoader(range(42), batch_size=4, sampler=WeightedSampler([1.0, 2.0] * 21, 40, seed=1))


class OwnBatches(BatchSampler):
    """A batch sampler of a user's."""


def warns_of_own_batches():
    """What ``Prefetch`` says where Lightning makes a user's batch sampler again."""

    class Own(Net):
        def train_dataloader(self):
            return DataLoader(range(8), batch_sampler=OwnBatches(SequentialSampler(range(8)), 2, drop_last=False))

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, barebones=True, callbacks=[Prefetch()],
        limit_val_batches=0,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(Own("", None))
    return [str(each.message) for each in said if "OwnBatches" in str(each.message)]


class Net(LightningModule):
    def __init__(self, order, made):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = {"fit": [], "validate": [], "predict": []}
        self.order, self.made = order, made

    def step(self, batch, stage):
        self.seen[stage].append([self.current_epoch, batch.tolist()])
        return self.layer(batch[:, None].float()).mean()

    def training_step(self, batch, index):
        return self.step(batch, "fit")

    def validation_step(self, batch, index):
        self.step(batch, "validate")

    def predict_step(self, batch, index):
        return self.step(batch, "predict")

    def train_dataloader(self):
        return self.made or make_loader(self.order)

    val_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Data(LightningDataModule):
    def __init__(self, order):
        super().__init__()
        self.order = order

    def train_dataloader(self):
        return make_loader(self.order)

    val_dataloader = predict_dataloader = train_dataloader


def main(folder):
    found = {}
    for strategy, order, where in CASES:
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False, barebones=True,
            num_sanity_val_steps=0,
        )  # fmt: skip
        model = Net(order, make_loader(order) if where == "outside" else None)
        data = Data(order) if where == "datamodule" else None
        trainer.fit(model, datamodule=data)
        trainer.predict(model, datamodule=data, return_predictions=False)
        found[f"{strategy}, {order}, {where}"] = model.seen
    found["own"] = warns_of_own_batches()
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


class Parallel(LightningModule):
    """Its layer is whole on each tensor-parallel peer. ``tells``: its loader gives the sampler the mesh's own ranks."""

    def __init__(self, order, tells):
        super().__init__()
        self.order, self.tells, self.seen = order, tells, []

    def configure_model(self):
        self.layer = torch.nn.Linear(1, 1)

    def train_dataloader(self):
        mesh = self.device_mesh["data_parallel"]
        ranks = {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()} if self.tells else {}
        if self.order == "stock":
            return DataLoader(range(16), batch_size=2, shuffle=True)
        if self.order == "by length":
            return DataLoader(range(16), batch_sampler=LengthBatchSampler([1, 2] * 8, batch_size=2, seed=1, **ranks))
        if self.order == "seeded":
            return DataLoader(range(16), batch_size=2, sampler=SeededSampler(range(16), 1, **ranks))
        return DataLoader(range(16), batch_size=2, sampler=WeightedSampler([1] * 16, seed=1, **ranks))

    def training_step(self, batch, index):
        self.seen += batch.tolist()
        return self.layer(batch[:, None].float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def tensor_parallel_peers(folder, size):
    """Two peers and ``size`` data-parallel ranks."""
    found = {}
    for order in ("stock", "seeded", "by weight", "by length"):
        for tells in (False, True):
            strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=2)
            trainer = Trainer(accelerator="cpu", devices=2 * size, strategy=strategy, max_epochs=1, barebones=True)
            model = Parallel(order, tells)
            trainer.fit(model)
            found[f"{order}, {tells}"] = model.seen
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
