"""What is read off the Trainer: whether ranks share the data, and how long the run and its schedules are."""

from types import SimpleNamespace

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, StepLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo import DALILoader, PrefetchLoader
from lightning_turbo.data.dali import ImageFolder
from lightning_turbo.doctor import collect
from lightning_turbo.doctor.source import Sources
from tests.dali_samples import make_photos

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


class Uncut(torch.Tensor):
    """Refuses to be cut, as MONAI's does where the metadata of a batch's samples differ."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            raise ValueError("not to be cut")
        return super().__torch_function__(func, types, args, kwargs or {})


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def facts(loader):
    trainer = SimpleNamespace(train_dataloader=loader, datamodule=None, lightning_module=torch.nn.Module())
    return collect.loader_facts(trainer, Sources([]))


@pytest.mark.parametrize(
    ("loader", "sharded"),
    [
        (DataLoader(DATA), False),
        (DataLoader(DATA, shuffle=True, batch_size=None), False),
        (PrefetchLoader(DATA), False),
        (Wrapper(DataLoader(DATA)), False),
        (DataLoader(DATA, sampler=SPLIT), True),
        (DataLoader(DATA, batch_sampler=OwnBatches(SPLIT, 2, False)), True),
        (Wrapper(DataLoader(DATA, sampler=SPLIT)), True),
        (DataLoader(DATA, sampler=Own()), None),
        (DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, False)), None),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), None),
        ([1, 2].__iter__(), None),
        (Wrapper(range(8)), None),
    ],
)
def test_only_torchs_own_samplers_tell_whether_ranks_share_the_data(loader, sharded):
    assert facts(loader).sharded is sharded


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_tensors_of_other_kinds_are_described_or_passed_over():
    image = (torch.arange(8.0) / 255).view(1, 2, 2, 2)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    batch = {"image": image.as_subclass(Uncut), "words": nested, "label": torch.ones(3)}
    plain = {"image": image, "label": torch.ones(3)}
    assert collect.batch_tensors(batch) == collect.batch_tensors(plain)
    assert collect.shapes_of(batch) == collect.shapes_of(plain) == ((1, 2, 2, 2), (3,))


def test_a_stream_within_a_wrapper_is_one():
    assert facts(Wrapper(DataLoader(Stream()))).iterable_dataset


def test_a_dali_loader_is_left_to_itself(tmp_path):
    loader = DALILoader(ImageFolder(make_photos(tmp_path, per_class=2), train=True), batch_size=2, device="cpu")
    assert facts(loader).sharded is None
    assert not loader.built, "to ask builds nothing"


def schedulers(make, **more):
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    given = {"interval": "step", "frequency": 1, "automatic": True, "max_epochs": 5, "max_steps": -1, "accumulate": 1}
    given = SimpleNamespace(**{**given, **more})
    module = torch.nn.Module()
    module.automatic_optimization = given.automatic
    config = SimpleNamespace(scheduler=make(optimizer), interval=given.interval, frequency=given.frequency)
    trainer = SimpleNamespace(
        lr_scheduler_configs=[config],
        lightning_module=module, accumulate_grad_batches=given.accumulate, max_epochs=given.max_epochs,
        max_steps=given.max_steps,
    )  # fmt: skip
    (found,) = collect.scheduler_facts(trainer, Sources([]), 10)
    return found


def cycle(optimizer):
    return CyclicLR(optimizer, 0.01, 0.1, step_size_up=4)


@pytest.mark.parametrize(
    ("make", "length", "turn"),
    [
        (lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=10), 9, None),
        (cycle, 4, 4),
        (lambda optimizer: StepLR(optimizer, 3), None, None),
    ],
)
def test_lengths_of_schedules(make, length, turn):
    found = schedulers(make)
    assert (found.length, found.turn) == (length, turn)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 50),
        ({"frequency": 2}, 25),
        ({"accumulate": 2, "frequency": 2}, 25),
        ({"accumulate": 2, "frequency": 4}, 13),
        ({"max_epochs": -1, "max_steps": 30}, 30),
        ({"max_epochs": -1}, None),
        ({"interval": "epoch"}, None),
        ({"automatic": False}, None),
    ],
)
def test_the_steps_of_a_schedule_in_the_run(settings, steps):
    assert schedulers(cycle, **settings).steps == steps


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "batches", "automatic", "epochs"),
    [
        (5, -1, 10, True, 5),
        (-1, 9, 10, True, 2),
        (5, 9, 10, True, 2),
        (1, 9, 10, True, 1),
        (None, 9, 10, False, None),
        (-1, 9, None, True, None),
        (-1, -1, 10, True, None),
    ],
)
def test_the_end_of_a_run_in_epochs(max_epochs, max_steps, batches, automatic, epochs):
    module = SimpleNamespace(automatic_optimization=automatic)
    trainer = SimpleNamespace(
        max_epochs=max_epochs, max_steps=max_steps, accumulate_grad_batches=2, lightning_module=module
    )
    assert collect.count_epochs(trainer, batches) == epochs
