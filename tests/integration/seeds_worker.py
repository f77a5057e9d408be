"""A dataset that draws as torchvision, MONAI and NumPy augmentation does, loaded in many ways; also a rank's script.

As a script it loads on its rank in all ways that its words name, and leaves the rows as files.
"""

import json
import random
import sys
import warnings

import monai.data
import numpy as np
import torch
from monai.transforms import Compose, RandFlip, RandGaussianNoise
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.orders.seeded_sampler import SeededSampler
from lightning_turbo.data.sample_seeds import seed_samples
from lightning_turbo.errors import NoEffectWarning
from tests.data.samples import Rows

SEED, EPOCHS = 11, 2


class Augmented(Rows):
    """Crops by torch, scales by NumPy, shifts by Python, and has noise from MONAI; a row begins with the index."""

    def __init__(self, length):
        super().__init__(length)
        self.transform = Compose([RandFlip(0.5, spatial_axis=0), RandGaussianNoise(0.5)])

    def __getitem__(self, index):
        image = torch.arange(16.0).reshape(1, 4, 4) + index
        top, left = torch.randint(0, 2, (2,)).tolist()
        image = image[:, top : top + 3, left : left + 3]
        image = image.flip(-1) if torch.rand(()) < 0.5 else image
        image = image * np.random.uniform(0.9, 1.1) + random.random()
        return torch.cat([torch.tensor([float(index)]), self.transform(image).as_tensor().flatten()])


def make_loader(length, kind="plain", num_workers=0, persistent=False, context=None, batch_size=16):
    """Return a seeded loader of one kind."""
    data, settings = Augmented(length), {"num_workers": num_workers}
    if num_workers:
        settings.update(persistent_workers=persistent, multiprocessing_context=context)
    settings.update(batch_size=batch_size, sampler=SeededSampler(data, SEED))
    if kind in ("prefetch", "threads"):
        return PrefetchLoader(data, sample_seeds=SEED, threads=4 if kind == "threads" else 1, **settings)
    if kind == "of":
        return PrefetchLoader.of(seed_samples(DataLoader(data, **settings), SEED))
    if kind == "shuffled":
        settings.update(sampler=None, shuffle=True)
    if kind == "subset":
        data = Subset(data, range(length))
    if kind == "batch sampler":
        settings.update(batch_size=1, sampler=None, batch_sampler=BatchSampler(RandomSampler(data), 7, False))
    if kind == "single":
        settings.update(batch_size=None)
    classes = {"stateful": StatefulDataLoader, "monai": monai.data.DataLoader}
    return seed_samples(classes.get(kind, DataLoader)(data, **settings), SEED)


def load(length, epochs=EPOCHS, **settings):
    """Return the rows of all epochs, in the order in which they were loaded."""
    loader, rows = make_loader(length, **settings), []
    for epoch in range(epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        batches = [torch.as_tensor(batch) for batch in loader]
        rows.append(torch.stack(batches) if batches[0].ndim == 1 else torch.cat(batches))
    if hasattr(loader, "close"):
        loader.close()
    return torch.stack(rows)


def main(folder, length, *words):
    warnings.simplefilter("ignore", NoEffectWarning)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for number, settings in enumerate(map(json.loads, words)):
        torch.save(load(int(length), **settings), f"{folder}/{number}_{rank}.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
