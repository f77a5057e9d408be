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
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tensor_parallel_peers_see_the_same_samples_and_data_parallel_ranks_others(size, tmp_path):
    run_ranks(tensor_parallel_peers, tmp_path, size, ranks=2 * size)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2 * size)]
    for first, peer in zip(seen[::2], seen[1::2], strict=True):
        assert first == peer
        for order in ("seeded", "by weight", "by length"):
            assert first[f"{order}, False"] == first[f"{order}, True"], "as with the mesh's own ranks"
    for order in ("stock", "seeded", "by length"):
        assert sorted(sample for each in seen[::2] for sample in each[f"{order}, False"]) == list(range(16))


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
