"""A run that goes on with other ranks, workers and batch sizes sees each sample once, in the order and as it was."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_turbo import PrefetchLoader, SeededSampler
from tests.integration.anywhere_worker import BATCHES, EPOCHS, SEED, Augmented, case_of
from tests.ranks import run_ranks

WORKER = Path(__file__).with_name("anywhere_worker.py")
RANKS = 2, 1, 2
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:Loading a batch draws")]


def expected(case):
    """The rows of each epoch in one process without a stop, those of the first ``SeededSampler`` order first."""
    data = Augmented(case.length)
    loader = PrefetchLoader(data, 1, sampler=SeededSampler(data, SEED), sample_seeds=SEED)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        yield torch.cat(list(loader))


def rows_of(folder, case):
    """What all lives saw, by epoch and in the order of the samples over all ranks, and their steps."""
    rows, steps = defaultdict(list), []
    for life, ranks in enumerate(RANKS):
        parts = [torch.load(folder / f"{case.name}-{life}.{rank}", weights_only=True) for rank in range(ranks)]
        steps += parts[0]["steps"]
        for each in zip(*(part["seen"] for part in parts), strict=True):
            epoch, number, length, _ = each[0]
            rows[epoch] += [row for turn in zip(*(batch for *_, batch in each), strict=True) for row in turn]
            last = case.length % (ranks * BATCHES[life])
            assert number < length == case.length // (ranks * BATCHES[life]) + (last > 0 and not case.drop_last)
    return rows, steps


def check(folder, names):
    for life, ranks in enumerate(RANKS):
        run_ranks(WORKER, folder, life, *names, ranks=ranks, timeout=400)
    for case in map(case_of, names):
        rows, steps = rows_of(folder, case)
        assert steps == list(range(len(steps))), case
        for epoch, whole in enumerate(expected(case)):
            seen = torch.stack(rows[epoch])
            in_order = seen if case.seeded else seen[seen[:, 0].argsort()]
            assert len(seen) > case.length - max(BATCHES) * max(RANKS) if case.drop_last else len(seen) == case.length
            if case.seeded:
                assert torch.equal(seen, whole[: len(seen)]), case
            else:
                assert torch.equal(in_order, whole[whole[:, 0].argsort()][torch.isin(whole[:, 0].sort()[0], seen[:, 0])])
            assert seen[:, 0].unique().numel() == len(seen), case


def test_each_sample_is_seen_once_with_other_ranks_workers_and_batch_sizes(tmp_path):
    check(tmp_path, ["1", "2", "3"])
