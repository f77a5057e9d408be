"""Processes, threads and ranks load the same samples with the same augmentation."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading.loader import seed_samples
from lightning_turbo.data.orders.seeded_sampler import SeededSampler
from tests.data.samples import Rows
from tests.ranks import run_ranks

monai_data = pytest.importorskip("monai.data")
transforms = pytest.importorskip("monai.transforms")

LENGTH, SEED, EPOCHS = 1000, 11, 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*set_vital", "ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:Loading a batch draws", "ignore:threads=4 has no effect"),
]


class Augmented(Rows):
    """Crops by torch, scales by NumPy, shifts by Python, and has noise from MONAI; a row begins with the index."""

    def __init__(self, length):
        super().__init__(length)
        self.transform = transforms.Compose(
            [transforms.RandFlip(0.5, spatial_axis=0), transforms.RandGaussianNoise(0.5)]
        )

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
    classes = {"stateful": StatefulDataLoader, "monai": monai_data.DataLoader}
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


def load_on_rank(folder, settings):
    """Load on a rank with each of the settings, and save the rows."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for number, each in enumerate(settings):
        torch.save(load(LENGTH, **each), folder / f"{number}_{rank}.pt")


def settings_of_one_process():
    forms = itertools.product(("plain", "prefetch", "threads"), (1, 2, 4), (False, True))
    for kind in ("plain", "prefetch", "threads"):
        yield {"kind": kind}
    for kind, num_workers, persistent in forms:
        yield {"kind": kind, "num_workers": num_workers, "persistent": persistent, "context": "fork"}
    for kind, num_workers, context in itertools.product(("plain", "prefetch"), (1, 2), ("forkserver", "spawn")):
        yield {"kind": kind, "num_workers": num_workers, "persistent": num_workers > 1, "context": context}
    for kind in ("shuffled", "subset", "batch sampler", "single", "stateful", "monai", "of"):
        yield {"kind": kind, "num_workers": 1, "batch_size": 5}


def settings_of_two_ranks():
    for kind in ("plain", "prefetch"):
        yield {"kind": kind}
        for num_workers, persistent in itertools.product((1, 2, 4), (False, True)):
            yield {"kind": kind, "num_workers": num_workers, "persistent": persistent}


def by_index(rows):
    return torch.stack([epoch[epoch[:, 0].argsort()] for epoch in rows])


@pytest.fixture(scope="module")
def expected():
    torch.set_num_threads(1)
    return load(LENGTH, batch_size=50)


@pytest.mark.parametrize("settings", list(settings_of_one_process()), ids=lambda s: "-".join(map(str, s.values())))
def test_sample_seeds_in_one_process(expected, settings):
    rows = load(LENGTH, **settings)
    assert torch.equal(by_index(rows), by_index(expected))
    if settings["kind"] not in ("shuffled", "batch sampler"):
        assert torch.equal(rows, expected)


@pytest.mark.distributed
def test_sample_seeds_on_two_ranks(expected, tmp_path):
    every = list(settings_of_two_ranks())
    run_ranks(load_on_rank, tmp_path, every, timeout=600)
    for number, settings in enumerate(every):
        first, second = (torch.load(tmp_path / f"{number}_{rank}.pt") for rank in (0, 1))
        dealt = torch.stack([first, second], 2).flatten(1, 2)
        assert torch.equal(dealt, expected), settings
