"""ShardOrder against naive loops: coverage, equal steps on every rank, epochs that differ."""

import itertools

import numpy as np
import pytest

from lightning_turbo.data.dali.order import ShardOrder, check_last_batch


def orders(samples, batch_size, world_size, last_batch, *, shuffle=False, seed=0):
    return [
        ShardOrder(
            samples,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            last_batch=last_batch,
            seed=seed,
        )
        for rank in range(world_size)
    ]


def epoch(order, number=0):
    return [order.batch(number, k).tolist() for k in range(len(order))]


GRID = list(itertools.product(range(1, 24), (1, 2, 3, 4, 7), (1, 2, 3, 4)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_partial_sees_each_sample_once_and_steps_agree(shuffle):
    for samples, batch_size, world in GRID:
        if samples < world:
            continue
        ranks = orders(samples, batch_size, world, "partial", shuffle=shuffle)
        epochs = [epoch(order, 3) for order in ranks]
        seen = sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(epochs)))
        assert len({len(batches) for batches in epochs}) == 1
        assert all(1 <= len(batch) <= batch_size for batches in epochs for batch in batches)
        if batch_size > 1 or samples % world == 0:
            assert seen == list(range(samples)), (samples, batch_size, world)
        else:  # a batch size of one cannot give less than one sample a step
            assert sorted(set(seen)) == list(range(samples))
            assert len(seen) - samples == -samples % world


def test_fill_sees_each_sample_in_full_batches():
    for samples, batch_size, world in GRID:
        if samples < world:
            continue
        epochs = [epoch(order) for order in orders(samples, batch_size, world, "fill")]
        assert all(len(batch) == batch_size for batches in epochs for batch in batches)
        assert {n for batches in epochs for batch in batches for n in batch} == set(range(samples))
        assert {len(batches) for batches in epochs} == {-(-samples // (world * batch_size))}


def test_drop_repeats_nothing_and_gives_full_batches():
    for samples, batch_size, world in GRID:
        if samples // world < batch_size:
            continue
        epochs = [epoch(order) for order in orders(samples, batch_size, world, "drop")]
        seen = [n for batches in epochs for batch in batches for n in batch]
        assert all(len(batch) == batch_size for batches in epochs for batch in batches)
        assert len(seen) == len(set(seen)) == samples // world // batch_size * batch_size * world


def test_without_shuffling_one_rank_reads_in_order():
    (order,) = orders(7, 3, 1, "partial")
    assert epoch(order, 0) == epoch(order, 5) == [[0, 1, 2], [3, 4, 5], [6]]


def test_shuffling_changes_order_and_shards_each_epoch():
    first, second = orders(40, 4, 2, "partial", shuffle=True)
    shards = [
        sorted(itertools.chain.from_iterable(epoch(order, number))) for order in (first, second) for number in (0, 1)
    ]
    assert shards[0] != shards[1]
    assert shards[2] != shards[3]
    assert epoch(first, 1) == epoch(orders(40, 4, 2, "partial", shuffle=True)[0], 1)
    assert epoch(first, 1) != epoch(orders(40, 4, 2, "partial", shuffle=True, seed=1)[0], 1)


def test_epochs_can_be_asked_for_in_any_order():
    (order,) = orders(20, 4, 1, "partial", shuffle=True)
    forward = [order.batch(e, k).tolist() for e in (0, 1, 2) for k in range(5)]
    backward = [order.batch(e, k).tolist() for e in (2, 1, 0) for k in reversed(range(5))]
    assert forward == backward[::-1]


def test_numbers_are_int64():
    assert orders(5, 2, 1, "partial", shuffle=True)[0].batch(0, 0).dtype == np.int64


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="2 files for 3 ranks: every rank needs at least one"):
        orders(2, 1, 3, "partial")
    with pytest.raises(ValueError, match="last_batch='drop' leaves no batch: 7 files over 2 ranks are 3 a rank"):
        orders(7, 4, 2, "drop")


@pytest.mark.parametrize("given", ["FILL", "fill", "Fill"])
def test_last_batch_is_taken_in_any_case(given):
    assert check_last_batch(given) == "fill"


@pytest.mark.parametrize("given", ["keep", "", None, 3])
def test_last_batch_is_checked(given):
    with pytest.raises(ValueError, match="accepted are 'fill', 'drop' and 'partial'"):
        check_last_batch(given)
