"""Lightning neither replaces nor wraps these orders wrongly: two gloo ranks see what the samplers say."""

import json
from pathlib import Path

import pytest

from lightning_turbo import LengthBatchSampler, WeightedSampler
from tests.data.orders.orders_worker import LENGTHS
from tests.ranks import run_ranks


@pytest.mark.distributed
def test_two_ranks_are_given_what_the_orders_say(tmp_path):
    run_ranks(Path(__file__).with_name("orders_worker.py"), tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert len(ranks[0]) == 12
    for case in ranks[0]:
        for stage, epochs in (("fit", (0, 1)), ("validate", (0, 1)), ("predict", (0,))):
            for epoch in epochs:
                for rank in (0, 1):
                    own = [batch for at, batch in ranks[rank][case][stage] if at == epoch or stage == "predict"]
                    # The epoch of a prediction after a fit is the last one that was set.
                    assert own in [
                        expected(case, rank, each) for each in ((epoch,) if stage != "predict" else (0, 1, 2))
                    ]


def expected(case, rank, epoch):
    if "by length" in case:
        sampler = LengthBatchSampler(LENGTHS, max_cost=60, seed=1, num_replicas=2, rank=rank)
        sampler.set_epoch(epoch)
        return list(sampler)
    sampler = WeightedSampler([1.0, 2.0] * 21, 40, seed=1, num_replicas=2, rank=rank)
    sampler.set_epoch(epoch)
    drawn = list(sampler)
    return [drawn[start : start + 4] for start in range(0, 20, 4)]
