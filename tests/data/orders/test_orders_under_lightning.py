"""Lightning neither replaces nor wraps these orders wrongly: two gloo ranks see what the samplers say."""

import json

import pytest

from lightning_turbo import LengthBatchSampler, WeightedSampler
from tests.data.orders.orders_worker import CASES, LENGTHS, main, tensor_parallel_peers
from tests.ranks import run_ranks


@pytest.mark.distributed
def test_two_ranks_are_given_what_the_orders_say(tmp_path):
    run_ranks(main, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    warned, _ = (found.pop("own") for found in ranks)
    assert len(warned) == 1, "Lightning made a user's own batch sampler again, which rank 0 says once"
    assert len(ranks[0]) == len(CASES)
    for rank, found in enumerate(ranks):
        for case, seen in found.items():
            for epoch in (0, 1):
                assert given(seen["fit"], epoch) == expected(case, rank, epoch)
                assert given(seen["validate"], epoch) == expected(case, rank, epoch)
            # A prediction is of the epoch that was set last.
            predicted = [batch for _, batch in seen["predict"]]
            assert predicted in [expected(case, rank, epoch) for epoch in (0, 1, 2)]


@pytest.mark.distributed
def test_tensor_parallel_peers_are_refused_unless_the_data_parallel_ranks_are_given(tmp_path):
    run_ranks(tensor_parallel_peers, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second, "peers see the same samples"
    for order, name in (
        ("seeded", "SeededSampler"),
        ("by weight", "WeightedSampler"),
        ("by length", "LengthBatchSamp"),
    ):
        assert first[f"{order}, False"].startswith(name)
        assert "expected data-parallel ranks alone, or num_replicas and rank, got 2 ranks" in first[f"{order}, False"]
        assert len(first[f"{order}, True"]) == 8


def given(seen, epoch):
    return [batch for at, batch in seen if at == epoch]


def expected(case, rank, epoch):
    if "by length" in case:
        sampler = LengthBatchSampler(LENGTHS, max_cost=60, seed=1, num_replicas=2, rank=rank)
        sampler.set_epoch(epoch)
        return list(sampler)
    sampler = WeightedSampler([1.0, 2.0] * 21, 40, seed=1, num_replicas=2, rank=rank)
    sampler.set_epoch(epoch)
    drawn = list(sampler)
    return [drawn[start : start + 4] for start in range(0, 20, 4)]
