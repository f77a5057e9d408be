"""One row per technique. Generic tests iterate over all rows, so they also cover new techniques."""

from collections import ChainMap
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_turbo as lt
from tests.trainers import quiet_trainer
from tests.versions import KNOWS_WEIGHTS_ONLY


@dataclass(frozen=True)
class Technique:
    """How to use a technique in a run, and whether the results stay bitwise equal.

    If several techniques have a scheduler, an optimizer or a strategy, the first one is used. A Trainer takes one
    ``Prefetch``: that of a DataModule goes before a callback.
    """

    name: str
    same_bits: bool
    plugins: Any = tuple
    callbacks: Any = tuple
    strategy: Any = None  # called with the number of devices
    datamodule: dict | None = None  # arguments of PrefetchDataModule
    scheduler: Any = None
    optimizer: Any = None


TECHNIQUES = [
    Technique("augment", False, callbacks=lambda: [lt.AugmentBatches(_augmentation())]),
    Technique("checkpoint_io", True, plugins=lambda: [lt.AtomicCheckpointIO()]),
    Technique("cyclic_lr", False, scheduler=lambda opt: lt.cyclic_lr(opt, 0.01, 0.1, step_size_up=3)),
    Technique("doctor", True, callbacks=lambda: [lt.Doctor(warmup=1, timed=1, watched=2)]),
    Technique("drop_bias", False, callbacks=lambda: [lt.DropBiasBeforeNorm(network="net")]),
    Technique("effective_batch_size", False, callbacks=lambda: [lt.EffectiveBatchSize(16, batch_size=8)]),
    Technique(
        "exact_accumulation", False, callbacks=lambda: [lt.ExactAccumulation(weight=lambda batch: len(batch[0]))]
    ),
    Technique("grad_to_none", True, callbacks=lambda: [lt.GradToNone()]),
    Technique("lamb", False, optimizer=lambda module: lt.lamb(module, 0.05)),
    Technique("lars", False, optimizer=lambda module: lt.lars(module, 0.05, trust_coefficient=0.1)),
    Technique("lean", True, strategy=lambda devices: _lean(devices)),
    Technique("memory_format", False, callbacks=lambda: [lt.MemoryFormat("channels_last")]),
    Technique("merge_param_groups", True, optimizer=lambda module: _merged(module)),
    Technique("prefetch", True, datamodule={}),
    Technique("prefetch_callback", True, callbacks=lambda: [lt.Prefetch(threads=2)]),
    Technique("prefetch_threads", True, datamodule={"threads": 2}),
    Technique("turbo", True, strategy=lambda devices: "turbo" if devices == 1 else "turbo_ddp"),
]  # fmt: skip
BY_NAME = {technique.name: technique for technique in TECHNIQUES}


def _merged(module):
    """Return the optimizer of the plain run, with one group per parameter merged into one."""
    return torch.optim.SGD(lt.merge_param_groups([{"params": [p]} for p in module.parameters()]), lr=0.05, momentum=0.9)


def _augmentation():
    """Return an augmentation weak enough that the network still learns."""
    steps = [lt.augment.RandomAffine(5, (0.95, 1.05)), lt.augment.RandomGaussianNoise((0, 0.05), p=0.5)]
    return lt.augment.BatchAugmentation(steps, seed=0)


def _lean(devices):
    """Return a turbo strategy with its lean parts, if they support this version of Lightning."""
    make = lt.TurboStrategy if devices == 1 else lt.TurboDDPStrategy
    return make(lean=KNOWS_WEIGHTS_ONLY)


def make_model(pl, scheduler=None, optimizer=None):
    """Return a small network with a bias before its batch norm, for either package of Lightning."""

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
            self.losses = []

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(float(loss.detach()))
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            made = optimizer(self) if optimizer else torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return {"optimizer": made, "lr_scheduler": scheduler(made)} if scheduler else made

    return Net()


def make_data(prefetch, indexed=False):
    """Return a loader or a prefetching datamodule of five batches, so that windows of two leave one over."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 1, 6, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    data = lt.augment.IndexedDataset(TensorDataset(x, y)) if indexed else TensorDataset(x, y)
    if prefetch is None:
        return {"train_dataloaders": DataLoader(data, batch_size=8)}

    class Data(lt.PrefetchDataModule):
        def train_dataloader(self):
            return DataLoader(data, batch_size=8)

    return {"datamodule": Data(**prefetch)}


def run(pl, level, techniques, *, epochs=2, dtype=torch.bfloat16, **kwargs):
    """Train with a level and several techniques, and return the trainer and the model."""
    scheduler = next((t.scheduler for t in techniques if t.scheduler), None)
    optimizer = next((t.optimizer for t in techniques if t.optimizer), None)
    devices = kwargs.pop("devices", 1)
    strategy = next((t.strategy(devices) for t in techniques if t.strategy), "auto")
    prefetch = [t.datamodule for t in techniques if t.datamodule is not None]
    callbacks = [c for t in techniques for c in t.callbacks()] + kwargs.pop("callbacks", [])
    if prefetch:
        callbacks = [each for each in callbacks if not isinstance(each, lt.Prefetch)]
    plugins = [lt.ApexAMP(level, dtype=dtype), *(p for t in techniques for p in t.plugins())]
    owns_accumulation = any(t.name == "effective_batch_size" for t in techniques)
    model = make_model(pl, scheduler, optimizer)
    fit = kwargs.pop("fit", {})
    settings = {"accumulate_grad_batches": 1 if owns_accumulation else 2, **kwargs}
    trainer = quiet_trainer(
        devices=devices, strategy=strategy, max_epochs=epochs, plugins=plugins, callbacks=callbacks, **settings
    )
    indexed = any(t.name == "augment" for t in techniques)
    trainer.fit(model, **make_data(dict(ChainMap(*prefetch)) if prefetch else None, indexed), **fit)
    return trainer, model
