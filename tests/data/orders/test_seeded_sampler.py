"""SeededSampler: one order is interleaved over the ranks, also those of a process group that starts later."""

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_turbo.data import SeededSampler

SEED = 7


@pytest.mark.parametrize(("ranks", "shuffle", "drop_last"), [(2, True, False), (8, True, True), (8, False, False)])
def test_ranks_are_interleaved_one_order_in_turn(ranks, shuffle, drop_last):
    length, more, orders = 21, {"shuffle": shuffle, "drop_last": drop_last}, set()
    for epoch in range(3):
        samplers = [SeededSampler(range(length), SEED, num_replicas=ranks, rank=n, **more) for n in range(ranks)]
        whole = SeededSampler(range(length), SEED, shuffle=shuffle)
        for sampler in [*samplers, whole]:
            sampler.set_epoch(epoch)
        order = list(whole)
        assert sorted(order) == list(range(length))
        assert (order == list(range(length))) is not shuffle
        assert order == list(whole)
        steps = length // ranks if drop_last else -(-length // ranks)
        interleaved = [index for step in zip(*samplers, strict=True) for index in step]
        assert interleaved == (order + order)[: steps * ranks]
        assert {len(sampler) for sampler in samplers} == {steps}
        orders.add(tuple(order))
    assert len(orders) == (3 if shuffle else 1)


@pytest.mark.parametrize("change", [{"seed": SEED + 1}, {"shuffle": False}, {"drop_last": True}, {"dataset": range(9)}])
def test_attributes_that_are_set_later_count_as_in_a_distributed_sampler(change):
    """Also after the sampler was asked for its length, at which it counts the ranks."""
    ours = SeededSampler(range(21), SEED, num_replicas=2, rank=1)
    torchs = DistributedSampler(change.get("dataset", range(21)), 2, 1, seed=SEED, drop_last="drop_last" in change)
    for sampler in (ours, torchs):
        for name, value in change.items():
            setattr(sampler, name, value)
    assert (len(ours), list(ours)) == (len(torchs), list(torchs))
    assert {name: getattr(ours, name) for name in change} == change


@pytest.mark.parametrize("name", ["shuffle", "drop_last"])
def test_switches_are_bools(name):
    with pytest.raises(TypeError, match=f"{name}='no': expected True or False"):
        SeededSampler(range(4), SEED, **{name: "no"})


def test_a_process_group_that_begins_later_counts(tmp_path):
    loader = DataLoader(range(6), sampler=SeededSampler(range(6), SEED, shuffle=False))
    loader.sampler.set_epoch(3)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=store)
    try:
        assert (len(loader), [batch.item() for batch in loader], loader.sampler.epoch) == (3, [1, 3, 5], 3)
    finally:
        torch.distributed.destroy_process_group()
    assert len(loader) == 6
