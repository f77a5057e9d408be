"""Each mend: what it changes, when it holds back, and that undoing puts everything back."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_turbo.doctor.advice import Finding
from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.mend import Mends

DATA = TensorDataset(torch.zeros(8, 2))
CASES = {
    "benchmark-off": ({}, ("cudnn.benchmark", False, True), "cudnn.benchmark is on for the rest of the run"),
    "benchmark-thrashes": ({}, ("cudnn.benchmark", True, False), "cudnn.benchmark is off for the rest of the run"),
    "anomaly-mode": ({}, ("anomaly", True, False), "anomaly detection is off for the rest of the run"),
    "pin-memory": ({}, ("pin_memory", False, True), "pin_memory=True from the next epoch on"),
    "workers": ({}, ("num_workers", 0, 3), "num_workers=3 from the next epoch on; random augmentations draw other"),
    "workers, depth": (
        {"num_workers": 1, "prefetch_factor": 1}, ("prefetch_factor", 1, 2), "prefetch_factor=2 from the next epoch on",
    ),
}  # fmt: skip


def finding(rule):
    return Finding(rule=rule, level="warning", what="x", remedy="y", card="z")


def run(loader=None, optimizers=(), epoch=0):
    return SimpleNamespace(train_dataloader=loader, optimizers=list(optimizers), max_epochs=3, current_epoch=epoch)


def value(name, loader):
    if name == "anomaly":
        return torch.is_anomaly_enabled()
    return torch.backends.cudnn.benchmark if name == "cudnn.benchmark" else getattr(loader, name)


@pytest.fixture
def forking(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "fork")


@pytest.fixture(autouse=True)
def _switches():
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = benchmark
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize("case", CASES)
def test_it_is_mended_told_and_undone(case, forking):
    options, (name, before, after), told = CASES[case]
    loader = DataLoader(DATA, **options)
    if name == "anomaly":
        torch.autograd.set_detect_anomaly(True)
    elif name == "cudnn.benchmark":
        torch.backends.cudnn.benchmark = before
    mends = Mends(run(loader), anomaly_before=True)
    other, done = mends.apply([finding("host-sync"), finding(case.partition(",")[0])], Facts(cores=4))
    assert other.mended == ""
    assert done.mended.startswith(told)
    assert value(name, loader) == after
    assert mends.applied
    mends.undo()
    assert value(name, loader) == before
    assert not mends.applied


@pytest.mark.parametrize("rule", ["workers", "pin-memory"])
def test_a_loader_that_is_not_started_anew_is_left_alone(rule, forking):
    mends = Mends(run(DataLoader(DATA), epoch=2))
    assert mends.apply([finding(rule)], Facts(cores=4))[0].mended == ""
    assert not mends.applied


def test_workers_are_not_started_where_they_would_import_the_program_anew(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "spawn")
    assert Mends(run(DataLoader(DATA))).apply([finding("workers")], Facts(cores=4))[0].mended == ""


def test_more_workers_than_spare_cores_are_not_started(forking):
    loader = DataLoader(DATA)
    Mends(run(loader)).apply([finding("workers")], Facts(cores=64))
    assert loader.num_workers == 4
    assert Mends(run(DataLoader(DATA))).apply([finding("workers")], Facts(cores=1))[0].mended == ""


def net():
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def test_gradients_that_a_loop_keeps_are_not_for_a_mend():
    # A step with zeros differs from one without, and whether old gradients count only the loop knows.
    optimizer = torch.optim.SGD(net().parameters(), 0.1)
    assert Mends(run(optimizers=[optimizer])).apply([finding("gradients-kept")], Facts())[0].mended == ""
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.usefixtures("forking")
def test_an_iterable_dataset_gets_no_workers():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(8))

    loader = DataLoader(Stream())
    assert Mends(run(loader)).apply([finding("workers")], Facts(cores=4))[0].mended == ""
    assert loader.num_workers == 0
