"""Orders by length and by weight go on in mid-epoch; those by weight on other ranks too."""

from collections import Counter

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_turbo import (
    LengthBatchSampler,
    PatchDataset,
    PrefetchLoader,
    WeightedSampler,
    seed_samples,
    tune_workers,
)
from lightning_turbo.data import pack_folder

NUMBER = 61
LENGTHS = [1 + i * 7 % 23 for i in range(NUMBER)]
WEIGHTS = [1.0 + i % 5 for i in range(NUMBER)]


def make(kind, ranks, rank, workers=0, seeds=None, epoch=3):
    """A loader of one rank, in an epoch."""
    if kind == "weights":
        sampler = WeightedSampler(WEIGHTS, seed=2, num_replicas=ranks, rank=rank)
        settings = {"batch_size": 3, "sampler": sampler}
    else:
        limits = {"batch_size": 4} if kind == "number" else {"max_cost": 50}
        sampler = LengthBatchSampler(LENGTHS, **limits, seed=2, num_replicas=ranks, rank=rank)
        settings = {"batch_sampler": sampler}
    loader = PrefetchLoader(range(NUMBER), **settings, num_workers=workers, collate_fn=list, sample_seeds=seeds)
    sampler.set_epoch(epoch)
    return loader


def lives(kind, plan, **settings):
    """What all ranks are given in an epoch that is stopped and goes on as planned: ranks, and steps or ``None``."""
    given, state, whole = [], None, None
    for ranks, steps in plan:
        loaders = [make(kind, ranks, rank, **settings) for rank in range(ranks)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        if whole is None:
            whole = [list(make(kind, ranks, rank, **settings)) for rank in range(ranks)]
        if steps is None:
            rows = list(zip(*iterators, strict=True))
        else:
            rows = [tuple(next(iterator) for iterator in iterators) for _ in range(steps)]
        given += [batch for row in rows for batch in row]
        state = loaders[0].state_dict()
        for loader in loaders:
            loader.close()
    return given, [batch for row in zip(*whole, strict=True) for batch in row]


@pytest.mark.parametrize("kind", ["number", "cost", "weights"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seeds", [None, 7])
def test_on_the_same_ranks_the_rest_follows_bit_for_bit(kind, ranks, seeds):
    given, whole = lives(kind, [(ranks, 1), (ranks, 2), (ranks, 1), (ranks, None)], seeds=seeds)
    assert given == whole


@pytest.mark.parametrize("kind", ["number", "cost"])
@pytest.mark.parametrize(("before", "now"), [(1, 2), (3, 1)])
def test_batches_by_length_on_other_ranks_are_refused_within_an_epoch_alone(kind, before, now):
    """And before the first batch nothing is lost."""
    loader, other = make(kind, before, 0), make(kind, now, 0)
    iterator = iter(loader)
    other.load_state_dict(loader.state_dict())
    assert list(other) == list(make(kind, now, 0))
    next(iterator)
    with pytest.raises(ValueError, match=f"ranks of the LengthBatchSampler: expected {before} .* got {now}. Go on wit"):
        other.load_state_dict(loader.state_dict())
    list(iterator)
    other.load_state_dict(loader.state_dict())
    assert list(other) == list(make(kind, now, 0))


@pytest.mark.parametrize("plan", [[(1, 5), (2, None)], [(2, 3), (1, None)], [(2, 1), (3, 2), (1, None)]])
def test_on_other_ranks_draws_by_weight_are_those_of_the_one_order(plan):
    given, _ = lives("weights", plan)
    order = WeightedSampler(WEIGHTS, seed=2, num_replicas=1, rank=0).draw(3)
    counts = Counter(i for batch in given for i in batch)
    filled = Counter(order[: sum(counts.values()) - len(order)])  # taken again, so that ranks have as many
    assert counts == Counter(order) + filled
    assert sum(filled.values()) < 8


def test_worker_processes_change_nothing():
    given, whole = lives("number", [(2, 1), (2, None)], workers=1)
    assert given == whole
    assert whole == lives("number", [(2, None)])[1]


@pytest.mark.parametrize("kind", ["number", "weights"])
def test_a_state_of_other_lengths_or_weights_is_refused(kind, monkeypatch):
    loader = make(kind, 1, 0)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    monkeypatch.setitem(globals(), "LENGTHS", LENGTHS[::-1])
    monkeypatch.setitem(globals(), "WEIGHTS", WEIGHTS[::-1])
    with pytest.raises(ValueError, match="weights or lengths, as a digest: expected"):
        make(kind, 2, 0).load_state_dict(state)


@pytest.mark.parametrize(("settings", "what"), [
    ({"batch_sampler": LengthBatchSampler([1, 2], batch_size=1, seed=0)}, "lengths"),
    ({"sampler": WeightedSampler([1.0, 2.0], seed=0)}, "weights"),
])  # fmt: skip
def test_numbers_that_do_not_fit_the_dataset_are_refused(settings, what):
    message = f"number of {what}: expected 3, the number of samples of range, got 2"
    with pytest.raises(ValueError, match=message):
        PrefetchLoader(range(3), **settings)
    with pytest.raises(ValueError, match=message):
        PrefetchLoader.of(seed_samples(DataLoader(range(3), **settings), seed=0))


def test_the_orders_serve_tune_workers_and_patches(tmp_path):
    def loader(num_workers):
        sampler = LengthBatchSampler(LENGTHS, batch_size=4, seed=0)
        return DataLoader(range(NUMBER), batch_sampler=sampler, num_workers=num_workers, collate_fn=list)

    assert tune_workers(loader, seconds=0.2, max_workers=0, show=None).num_workers == 0
    volumes = {"image": np.arange(3 * 8, dtype=np.float32).reshape(3, 2, 2, 2)}
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", volumes["image"][number])
    pack_folder(tmp_path, tmp_path.with_name("packed"))
    data = PatchDataset(tmp_path.with_name("packed"), (1, 1, 1), per_scan=2, keys={"image": "volumes"})
    scans = [0.0, 0.0, 1.0]
    sampler = WeightedSampler([scans[index // 2] for index in range(len(data))], 40, seed=0)
    batches = PrefetchLoader(data, batch_size=8, sampler=sampler, collate_fn=PatchDataset.collate, sample_seeds=1)
    assert min(batch["image"].min() for batch in batches) >= 16  # the third scan alone
