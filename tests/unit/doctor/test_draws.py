"""Random numbers in worker processes: told where a sample's load draws them, and nowhere else."""

import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from lightning_turbo import Doctor
from lightning_turbo.data.sample_seeds import seed_samples
from lightning_turbo.doctor.draws import find_draws
from tests.integration.doctor_runs import QUIET, Noisy, equal, images, rules, trained

pytestmark = QUIET
TORCH, NUMPY, PYTHON = "torch's generator", "NumPy's generator", "Python's generator"


class Data(Dataset):
    def __init__(self, draw=lambda self: 0, **more):
        self.draw = draw
        vars(self).update(more)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.draw(self) * index


class Jitter(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(1), y


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.rand(8))


def fail(data):
    raise OSError("no such file")


def reseed(worker_id):
    get_worker_info().dataset.rng = np.random.default_rng(worker_id)


def reset(worker_id):
    np.random.seed(0)


GLOBAL = Data(lambda data: torch.rand(1) + np.random.rand() + random.random())
OWN = Data(lambda data: data.rng.random(), rng=np.random.default_rng(0))
NOISE = Data(lambda data: data.transform.R.rand(), transform=SimpleNamespace(R=np.random.RandomState(0)))


@pytest.mark.parametrize(("dataset", "settings", "draws", "repeated"), [
    (Data(rng=np.random.default_rng(0)), {}, (), ()),
    (GLOBAL, {}, (TORCH, NUMPY, PYTHON), ()),
    (GLOBAL, {"num_workers": 0}, (), ()),
    (GLOBAL, {"worker_init_fn": reset}, (TORCH, NUMPY, PYTHON), (NUMPY,)),
    (OWN, {}, ("dataset.rng",), ("dataset.rng",)),
    (OWN, {"num_workers": 1}, ("dataset.rng",), ()),
    (OWN, {"worker_init_fn": reseed}, ("dataset.rng",), ()),
    (Data(lambda data: torch.rand(1, generator=data.g), g=torch.Generator()), {}, ("dataset.g",), ("dataset.g",)),
    (Subset(NOISE, [3, 4]), {}, ("dataset.transform.R",), ("dataset.transform.R",)),
    (seed_samples(DataLoader(GLOBAL, num_workers=2), 1), {}, (), ()),
    (Data(fail), {}, (), ()),
    (Stream(), {}, (), ()),
])  # fmt: skip
def test_what_a_sample_draws_is_told(dataset, settings, draws, repeated):
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    loader = dataset if isinstance(dataset, DataLoader) else DataLoader(dataset, **{"num_workers": 2, **settings})
    found = find_draws(loader)
    assert (found.get("draws", ()), found.get("repeated", ())) == (draws, repeated)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (random.getstate(), str(np.random.get_state())) == before[1:]


def test_a_sample_that_takes_too_long_is_no_finding(monkeypatch):
    monkeypatch.setattr("lightning_turbo.doctor.draws.SECONDS", 0.1)
    found = find_draws(DataLoader(Data(lambda data: time.sleep(1) or torch.rand(1)), num_workers=1))
    assert found == {"draws": (), "repeated": ()}


@pytest.mark.parametrize("watched", [0, 2])
def test_the_run_is_the_same_and_a_doctor_that_only_times_loads_nothing(watched):
    class Augmented(Noisy):
        def train_dataloader(self):
            return DataLoader(Jitter(*images(32).tensors), batch_size=4, shuffle=True, num_workers=1)

    doctor = Doctor(warmup=1, timed=2, watched=watched)
    assert equal(trained(model=Augmented), trained(doctor, model=Augmented))
    assert ("worker-draws" in rules(doctor)) == (watched > 0)
