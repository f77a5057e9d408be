"""A run that goes on with other ranks, workers and batch sizes sees each sample once, in the order and as it was."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from lightning_turbo import PrefetchLoader, SeededSampler
from tests.integration.anywhere_worker import BATCHES, EPOCHS, SEED, Augmented, case_of
from tests.ranks import run_ranks

WORKER = Path(__file__).with_name("anywhere_worker.py")
RANKS = 2, 1, 2
pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:Loading a batch draws"),
]


def expected(case):
    """The rows of each epoch in one process without a stop, in the order of a ``SeededSampler``."""
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


def check(folder, names, timeout=150):
    for life, ranks in enumerate(RANKS):
        run_ranks(WORKER, folder, life, *names, ranks=ranks, timeout=timeout)
    for case in map(case_of, names):
        rows, steps = rows_of(folder, case)
        assert steps == list(range(len(steps))), case
        for epoch, whole in enumerate(expected(case)):
            seen = torch.stack(rows[epoch])
            # With drop_last, what made no batch in the last life of the epoch is left out.
            assert case.length - case.drop_last * max(RANKS) * max(BATCHES) <= len(seen) <= case.length, case
            assert seen[:, 0].unique().numel() == len(seen), case
            if case.seeded:
                assert torch.equal(seen, whole[: len(seen)]), case
            else:  # another order, the same augmentation
                assert torch.equal(seen, whole[whole[:, 0].argsort()][seen[:, 0].long()]), case


def test_each_sample_is_seen_once_with_other_ranks_workers_and_batch_sizes(tmp_path):
    check(tmp_path, ["1", "4", "7"])


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_each_sample_is_seen_once_in_thirty_runs_that_are_stopped_at_random(tmp_path):
    check(tmp_path, [str(number) for number in range(30)], timeout=800)
