"""What is read from the Trainer: the contents of a batch, the optimizers, and the length of the run."""

import math
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_turbo.doctor import collect
from lightning_turbo.doctor.source import Sources, kind_of
from tests.trainers import quiet_trainer


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_the_size_of_a_batch_counts_only_tensors():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    batch = {"image": [torch.ones(2, 2), torch.ones(3, dtype=torch.float64)], "words": nested, "name": "x"}
    assert collect.batch_facts(batch) == collect.BatchFacts(16 + 24, 2, ("batch['image'][1]",))


@dataclass
class Sample:
    image: torch.Tensor
    name: str = ""


def test_the_size_of_a_batch_counts_tensors_in_mappings_and_dataclasses():
    batch = UserDict(first=torch.ones(2, 2), rest=[Sample(torch.ones(3, dtype=torch.float64)), Sample])
    assert collect.batch_facts(batch) == collect.BatchFacts(16 + 24, 2, ("batch['rest'][0].image",))


@pytest.mark.parametrize(("max_steps", "complete"), [(-1, True), (50, False), (51, True)])
def test_whether_a_run_reaches_the_end_of_an_epoch(max_steps, complete):
    runs = quiet_trainer(max_steps=max_steps, max_epochs=-1, accumulate_grad_batches=2, limit_train_batches=0)
    runs.strategy.connect(BoringModel())
    for batches, ends in ((101, complete), (math.inf, max_steps < 0)):
        runs.fit_loop.max_batches = batches
        assert collect.run_facts(runs).ends_epoch is ends


@pytest.mark.parametrize(("module", "contiguous"), [
    (torch.nn.Conv2d(1, 2, 3), True), (torch.nn.Conv3d(2, 2, 3), True), (torch.nn.Linear(2, 2), False),
    (torch.nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), False),
])  # fmt: skip
def test_convolutions_in_the_contiguous_memory_format_are_detected(module, contiguous):
    assert collect.has_contiguous_convolutions(module) == contiguous


@pytest.mark.parametrize("file", ["/a/lib/python3.11/site-packages/{}/x.py", "/usr/lib/python3/dist-packages/{}/x.py"])
def test_packages_of_another_environment_on_the_path_are_not_user_code(file):
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
def test_the_number_of_epochs_of_a_run(max_epochs, max_steps, batches, epochs):
    trainer = SimpleNamespace(
        max_epochs=max_epochs, max_steps=max_steps, accumulate_grad_batches=2, num_training_batches=batches
    )
    assert collect.count_epochs(trainer) == epochs


def test_param_groups_with_equal_settings_count_once():
    def groups(count, **more):
        return [{"params": [torch.nn.Parameter(torch.ones(1))], **more} for _ in range(count)]

    module = BoringModel()
    given = [*groups(5, lr=0.1), *groups(3, lr=0.1, weight_decay=0.0), *groups(2, lr=0.2)]
    trainer = SimpleNamespace(lightning_module=module, optimizers=[torch.optim.AdamW(given)])
    (facts,) = collect.optimizer_facts(trainer, Sources([module]))
    assert (facts.groups, facts.kinds) == (10, 3)
