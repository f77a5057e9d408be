"""What is read off the Trainer: whether ranks share the data, and how long the run is."""

import math
import random
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo import DALILoader, PrefetchLoader
from lightning_turbo.data.sample_seeds import seed_samples
from lightning_turbo.doctor import collect
from lightning_turbo.doctor.source import Sources, kind_of
from tests.trainers import quiet_trainer

DATA = torch.arange(8)
SPLIT = DistributedSampler(DATA, num_replicas=2, rank=0)


class Own(Sampler):
    """May split the data or not."""

    def __iter__(self):
        return iter(range(8))


class OwnBatches(BatchSampler):
    """May split the data or not."""


class Wrapper:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def facts(loader):
    source = SimpleNamespace(instance=loader)
    trainer = SimpleNamespace(train_dataloader=loader, fit_loop=SimpleNamespace(_data_source=source))
    return collect.loader_facts(trainer, Sources([]))


@pytest.mark.parametrize(("loader", "sharded"), [
    (DataLoader(DATA), False),
    (PrefetchLoader(DATA), False),
    (Wrapper(DataLoader(DATA)), False),
    (DataLoader(DATA, sampler=SPLIT), True),
    (DataLoader(DATA, batch_sampler=OwnBatches(SPLIT, 2, False)), True),
    (Wrapper(DataLoader(DATA, sampler=SPLIT)), True),
    (DataLoader(DATA, sampler=Own()), None),
    (DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, False)), None),
    (DALILoader.__new__(DALILoader), None),  # DALI deals by itself; nothing is built to ask it
    (Wrapper(range(8)), None),
])  # fmt: skip
def test_only_torchs_own_samplers_tell_whether_ranks_share_the_data(loader, sharded):
    assert facts(loader).sharded is sharded
    assert facts(Wrapper(DataLoader(Stream()))).iterable_dataset


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_the_tensors_of_a_batch_are_weighed_and_other_kinds_passed_over():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    batch = {"image": [torch.ones(2, 2), torch.ones(3, dtype=torch.float64)], "words": nested, "name": "x"}
    assert collect.batch_facts(batch) == {"batch": 16 + 24, "wide": ("batch['image'][1]",)}


@dataclass
class Sample:
    image: torch.Tensor
    name: str = ""


def test_batches_of_a_mapping_or_a_dataclass_are_weighed_as_lightning_moves_them():
    batch = UserDict(first=torch.ones(2, 2), rest=[Sample(torch.ones(3, dtype=torch.float64)), Sample])
    assert collect.batch_facts(batch) == {"batch": 16 + 24, "wide": ("batch['rest'][0].image",)}


@pytest.mark.parametrize(("max_steps", "told"), [(-1, True), (50, False), (51, True)])
def test_whether_a_run_comes_to_the_end_of_an_epoch(max_steps, told):
    runs = quiet_trainer(max_steps=max_steps, max_epochs=-1, accumulate_grad_batches=2, limit_train_batches=0)
    runs.strategy.connect(BoringModel())
    for batches, ends in ((101, told), (math.inf, max_steps < 0)):
        runs.fit_loop.max_batches = batches
        assert collect.run_facts(runs).ends_epoch is ends


@pytest.mark.parametrize(("module", "told"), [
    (torch.nn.Conv2d(1, 2, 3), True), (torch.nn.Conv3d(2, 2, 3), True), (torch.nn.Linear(2, 2), False),
    (torch.nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), False),
])  # fmt: skip
def test_convolutions_in_the_default_format_are_told(module, told):
    assert collect.has_contiguous_convolutions(module) == told


@pytest.mark.parametrize("file", ["/a/lib/python3.11/site-packages/{}/x.py", "/usr/lib/python3/dist-packages/{}/x.py"])
def test_packages_of_another_environment_on_the_path_are_not_the_users(file):
    assert kind_of(file.format("torchmetrics")) == "library"
    assert kind_of(file.format("lightning")) == "machinery"
    assert kind_of(file.format("x").replace("-packages", "")) == "own"


@pytest.mark.parametrize(("max_epochs", "max_steps", "batches", "epochs"), [
    (5, -1, 10, 5),
    (-1, 9, 10, 2),
    (5, 9, 10, 2),
    (1, 9, 10, 1),
    (None, 9, math.inf, math.inf),
    (-1, -1, 10, math.inf),
])  # fmt: skip
def test_the_end_of_a_run_in_epochs(max_epochs, max_steps, batches, epochs):
    trainer = SimpleNamespace(
        max_epochs=max_epochs, max_steps=max_steps, accumulate_grad_batches=2, num_training_batches=batches
    )
    assert collect.count_epochs(trainer) == epochs


class Data(torch.utils.data.Dataset):
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 8


NOISE = Data(transform=SimpleNamespace(R=np.random.RandomState(0)))
OWN = Data(rng=np.random.default_rng(0), g=torch.Generator(), p=random.Random(0), name="x")


@pytest.mark.parametrize(("dataset", "settings", "copied"), [
    (OWN, {}, ("dataset.rng", "dataset.g", "dataset.p")),
    (Subset(NOISE, [3, 4]), {}, ("dataset.transform.R",)),
    (OWN, {"num_workers": 1}, ()),
    (OWN, {"worker_init_fn": print}, ()),
    (DATA, {}, ()),
])  # fmt: skip
def test_generators_that_workers_copy_are_told(dataset, settings, copied):
    assert facts(DataLoader(dataset, **{"num_workers": 2, **settings})).copied_generators == copied
    assert facts(seed_samples(DataLoader(OWN, num_workers=2), 1)).copied_generators == ()
