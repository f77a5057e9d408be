"""Batches of like length: each sample once, and the same number of batches of like cost on every rank."""

import random

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_turbo.data import LengthBatchSampler


def draw(ranks, lengths, epoch=0, **settings):
    """The batches of each rank."""
    samplers = [LengthBatchSampler(lengths, seed=5, num_replicas=ranks, rank=rank, **settings) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in samplers]
    assert [len(own) for own in batches] == [len(sampler) for sampler in samplers]
    return batches


def costs(batches, lengths, multiple=1):
    return [max(-(-lengths[i] // multiple) * multiple for i in batch) * len(batch) for batch in batches]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("limits", [{"batch_size": 4}, {"max_cost": 120}, {"batch_size": 7, "max_cost": 90}])
@pytest.mark.parametrize("multiple", [1, 8])
def test_each_sample_is_in_one_batch_and_all_ranks_have_as_many_batches(ranks, limits, multiple):
    draws = random.Random(ranks)
    for number in (8, 9, 31, 100):
        lengths = [draws.randint(1, 40) for _ in range(number)]
        shuffle = draws.random() < 0.7
        batches = draw(ranks, lengths, epoch=2, shuffle=shuffle, pad_to_multiple_of=multiple, **limits)
        assert len({len(own) for own in batches}) == 1
        assert sorted(i for own in batches for batch in own for i in batch) == list(range(number))
        for own in batches:
            assert max(map(len, own)) <= limits.get("batch_size", number)
            assert max(costs(own, lengths, multiple)) <= limits.get("max_cost", 40 * number)


def test_a_batch_holds_neighbors_in_length_and_a_step_has_like_costs():
    lengths = torch.randint(1, 500, (2000,)).tolist()
    batches = draw(4, lengths, batch_size=10)
    for own in batches:
        assert max(max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in own) < 20
    for step in zip(*(costs(own, lengths) for own in batches), strict=True):
        assert max(step) < 1.5 * min(step) or max(step) < 300  # below that one sample more makes a difference


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_epoch_or_seed_is_another_order_and_the_same_one_is_the_same(ranks):
    lengths = [1 + i % 9 for i in range(90)]
    assert draw(ranks, lengths, batch_size=4) == draw(ranks, lengths, batch_size=4)
    assert draw(ranks, lengths, batch_size=4) != draw(ranks, lengths, epoch=1, batch_size=4)
    one, other = (LengthBatchSampler(lengths, batch_size=4, seed=seed) for seed in (1, 2))
    assert list(one) != list(other)
    assert draw(ranks, lengths, epoch=0, shuffle=False, batch_size=4) == draw(
        ranks, lengths, epoch=1, shuffle=False, batch_size=4
    )


def test_it_leaves_the_random_numbers_of_the_process():
    before = torch.get_rng_state()
    list(LengthBatchSampler([3, 1, 2], batch_size=2, seed=0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_loads_its_batches_whatever_the_workers(workers):
    lengths = [5, 1, 4, 2, 3, 3]
    sampler = LengthBatchSampler(lengths, batch_size=2, seed=0)
    loader = DataLoader(range(6), batch_sampler=sampler, num_workers=workers, collate_fn=list)
    assert [list(batch) for batch in loader] == list(sampler)
    assert len(loader) == 3


def test_padding_is_the_share_of_elements_that_are_padding():
    sampler = LengthBatchSampler([4, 3, 2, 2], batch_size=2, seed=0)
    assert sampler.padding == pytest.approx(1 - 11 / (2 * 4 + 2 * 2))
    assert LengthBatchSampler([4, 3], batch_size=2, pad_to_multiple_of=8, seed=0).padding == pytest.approx(1 - 7 / 16)


def test_batches_of_one_sample_are_taken_again_where_the_ranks_would_not_have_as_many():
    batches = draw(2, [1, 2, 3], batch_size=1)
    assert [len(own) for own in batches] == [2, 2]
    assert {i for own in batches for batch in own for i in batch} == {0, 1, 2}


@pytest.mark.parametrize(("settings", "message"), [
    ({"lengths": []}, "lengths: expected an integer for each sample"),
    ({"lengths": [[1, 2]]}, r"lengths: expected .* one axis, got 'shape \(1, 2\)'"),
    ({"lengths": [1, 0]}, r"lengths\[1\]: expected 1 or more, got 0"),
    ({"lengths": [1.5]}, "lengths: expected an integer"),
    ({"lengths": ["a"]}, "lengths: expected an integer"),
    ({"batch_size": None}, "at least one of them"),
    ({"batch_size": 0}, "batch_size: expected an integer of 1 or more, got 0"),
    ({"max_cost": 4}, r"lengths\[0\]: expected at most max_cost=4 after padding, got 5"),
    ({"max_cost": 5, "pad_to_multiple_of": 4}, r"lengths\[0\]: expected at most max_cost=5 after padding, got 8"),
    ({"seed": -1}, "seed: expected an integer from 0"),
    ({"shuffle": 1}, "shuffle=1: expected True or False"),
])  # fmt: skip
def test_bad_arguments_are_named(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LengthBatchSampler(**{"lengths": [5, 2, 3], "batch_size": 2, "seed": 0, **settings})


def test_more_ranks_than_samples_are_refused():
    with pytest.raises(ValueError, match="2 samples cannot make a batch for each of 3 ranks"):
        draw(3, [1, 2], batch_size=2)
