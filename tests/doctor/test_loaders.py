"""Facts about a loader: how it loads, whether ranks share the data, and which generators it uses."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo import DALILoader, Doctor, PrefetchLoader
from lightning_turbo.data import seed_samples
from lightning_turbo.data.loading import prefetcher
from lightning_turbo.doctor.facts import Loader
from lightning_turbo.doctor.loaders import describe_loader
from lightning_turbo.errors import NoEffectWarning
from tests.integration.doctor_runs import Base, trainer

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


facts = describe_loader


@pytest.mark.parametrize(("loader", "sharded"), [
    (DataLoader(DATA), False),
    (PrefetchLoader(DATA), False),
    (Wrapper(DataLoader(DATA)), False),
    (DataLoader(DATA, sampler=SPLIT), True),
    (DataLoader(DATA, batch_sampler=OwnBatches(SPLIT, 2, False)), True),
    (Wrapper(DataLoader(DATA, sampler=SPLIT)), True),
    (DataLoader(DATA, sampler=Own()), None),
    (DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, False)), None),
    (DALILoader.__new__(DALILoader), None),  # DALI shards by itself, and no pipeline is built for this fact
    (Wrapper(range(8)), None),
])  # fmt: skip
def test_only_samplers_of_torch_show_whether_ranks_share_the_data(loader, sharded):
    assert facts(loader).sharded is sharded
    assert facts(Wrapper(DataLoader(Stream()))).iterable_dataset


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
def test_generators_that_workers_copy_are_detected(dataset, settings, copied):
    assert facts(DataLoader(dataset, **{"num_workers": 2, **settings})).copied_generators == copied
    assert facts(seed_samples(DataLoader(OWN, num_workers=2), 1)).copied_generators == ()


def test_no_facts_without_a_loader_or_with_several():
    several = DataLoader(DATA), DataLoader(DATA)
    assert [describe_loader(each) for each in (None, list(several), {"a": several[0]})] == [Loader()] * 3


class Drawing(torch.utils.data.Dataset):
    """Draws from its own generator or a global one."""

    def __init__(self, kind):
        self.kind, self.own = kind, np.random.RandomState(0)

    def __len__(self):
        return 160

    def __getitem__(self, i):
        draw = {"numpy": np.random.rand, "torch": torch.rand, "python": random.random, "own": self.own.rand}
        if self.kind == "put back":
            state = np.random.get_state()
            np.random.seed(i)
            np.random.rand()
            np.random.set_state(state)
        elif self.kind:
            draw[self.kind](*[] if self.kind == "python" else [1])
        return torch.ones(8), i % 4


def drew(data, model=Base):
    """Return who draws from what, as the Doctor saw it in a run."""
    trainer(doctor := Doctor(warmup=1, timed=1, watched=2), max_steps=6, max_epochs=-1).fit(model(), data)
    return doctor.report.facts.loader.draws


@pytest.mark.parametrize("kind", ["numpy", "torch", "python", "own", ""])
def test_settings_without_effect_are_judged_as_by_the_loader(kind, monkeypatch):
    monkeypatch.setattr(prefetcher, "MIN_SECONDS", 0.0)
    found = drew(DataLoader(Drawing(kind), batch_size=4, shuffle=True))
    assert bool(found) == bool(kind)
    if kind:
        with pytest.warns(NoEffectWarning):
            list(PrefetchLoader(Drawing(kind), batch_size=4))
    assert drew(DataLoader(Drawing(kind), batch_size=4, num_workers=1)) == ""


class Drops(Base):
    """Draws in the step."""

    def training_step(self, batch, batch_idx):
        return self.loss([torch.nn.functional.dropout(batch[0]), batch[1]])


class Noted(torch.optim.SGD):
    """Draws in the optimizer's step."""

    def step(self, closure=None):
        random.random()
        return super().step(closure)


class Noisy(Base):
    def configure_optimizers(self):
        return Noted(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("model", "name"), [(Drops, "torch"), (Noisy, "random")])
def test_a_step_that_draws_leaves_a_thread_without_effect(model, name, monkeypatch):
    monkeypatch.setattr(prefetcher, "MIN_SECONDS", 0.0)
    loader = DataLoader(Drawing(""), batch_size=4, shuffle=True)
    assert drew(loader, model) == f"the step draws from the global RNG of {name}, which loading may use too"
    with pytest.warns(NoEffectWarning, match="what is done with a batch draws"):
        drew(PrefetchLoader(Drawing(""), batch_size=4), model)
    # No code of the user's loads from arrays: a thread may, whatever the step draws.
    data = TensorDataset(torch.ones(160, 8), torch.zeros(160, dtype=torch.long))
    assert drew(DataLoader(data, batch_size=4), model) == ""


def test_samples_with_seeds_load_in_the_calling_thread():
    data = TensorDataset(torch.ones(160, 8), torch.zeros(160, dtype=torch.long))
    assert "sample_seeds" in drew(seed_samples(DataLoader(data, batch_size=4), 1))
