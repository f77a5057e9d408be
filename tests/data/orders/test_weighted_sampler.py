"""Samples by weight: torch's distribution, one order for all ranks."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, WeightedRandomSampler

from lightning_turbo.data import WeightedSampler, balanced_weights, mixture_weights


def draw(ranks, weights, number=None, epoch=0, **settings):
    """What each rank draws."""
    samplers = [
        WeightedSampler(weights, number, seed=5, num_replicas=ranks, rank=rank, **settings) for rank in range(ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    drawn = [list(sampler) for sampler in samplers]
    assert [len(own) for own in drawn] == [len(sampler) for sampler in samplers]
    return drawn


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_order_is_the_one_that_torchs_sampler_draws_from_this_seed(replacement, epoch):
    weights = torch.rand(50)
    theirs = WeightedRandomSampler(weights, 40, replacement, generator=torch.Generator().manual_seed(5 + epoch))
    assert draw(1, weights, 40, epoch, replacement=replacement) == [list(theirs)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("number", [1, 24, 25])
def test_ranks_share_the_positions_of_one_order(ranks, number):
    (whole,) = draw(1, [1.0, 2.0, 3.0], number)
    drawn = draw(ranks, [1.0, 2.0, 3.0], number)
    interleaved = [index for step in zip(*drawn, strict=True) for index in step]
    filled = whole * ranks  # the first ones are repeated to pad the last step
    assert interleaved == filled[: len(interleaved)]
    assert number <= len(interleaved) < number + ranks
    dropped = draw(ranks, [1.0, 2.0, 3.0], number, drop_last=True) if number >= ranks else []
    assert [index for step in zip(*dropped, strict=True) for index in step] == whole[: len(dropped) * (number // ranks)]


def test_draws_follow_the_weights():
    weights = torch.tensor([1.0, 2.0, 0.0, 5.0])
    counts = torch.bincount(torch.tensor([index for own in draw(3, weights, 24_000) for index in own]), minlength=4)
    assert counts[2] == 0
    expected = weights / weights.sum() * 24_000
    kept = weights > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 13.8  # 0.999 of the distribution with two degrees of freedom


def test_without_replacement_no_sample_is_drawn_twice():
    (drawn,) = draw(1, [0.1, 5.0, 2.0, 1.0], replacement=False)
    assert sorted(drawn) == [0, 1, 2, 3]


def test_it_leaves_the_random_numbers_of_the_process():
    before = torch.get_rng_state()
    list(WeightedSampler([1.0, 2.0], seed=0))
    assert torch.equal(before, torch.get_rng_state())


def test_weights_of_classes_and_of_parts():
    labels = [0] * 90 + [1] * 10
    for given in (labels, torch.tensor(labels), [("a", "b")[label] for label in labels]):
        weights = balanced_weights(given)
        assert weights[:90].sum().item() == pytest.approx(1)
        assert weights[90:].sum().item() == pytest.approx(1)
    parts = ConcatDataset([range(10), range(1000)])
    weights = mixture_weights(parts, [3, 1])
    assert weights[:10].sum().item() == pytest.approx(3)
    assert weights[10:].sum().item() == pytest.approx(1)
    (drawn,) = draw(1, weights, 4000)
    assert 2800 < sum(index < 10 for index in drawn) < 3200


def test_a_loader_takes_it_as_its_sampler():
    sampler = WeightedSampler([1.0, 0.0, 1.0], 6, seed=1)
    batches = list(DataLoader(range(3), batch_size=4, sampler=sampler, collate_fn=list))
    assert [index for batch in batches for index in batch] == list(sampler)


@pytest.mark.parametrize(("settings", "message"), [
    ({"weights": []}, "weights: expected 1 to 16777216, got '0 of them'"),
    ({"weights": [[1.0]]}, "weights: expected one number for each sample"),
    ({"weights": ["a"]}, "weights: expected one number for each sample"),
    ({"weights": [1.0, -1.0]}, r"weights\[1\]: expected a finite number of 0 or more, got -1.0"),
    ({"weights": [float("nan")]}, r"weights\[0\]: expected a finite number of 0 or more, got nan"),
    ({"weights": [1.0, float("inf")]}, r"weights\[1\]: expected a finite number"),
    ({"weights": [0.0, 0.0]}, "weights: expected a weight above zero, got 'zeros only'"),
    ({"num_samples": 0}, "num_samples: expected an integer of 1 or more, got 0"),
    ({"num_samples": 3, "replacement": False}, "num_samples: expected at most 2 without replacement"),
    ({"replacement": 1}, "replacement=1: expected True or False"),
    ({"seed": 2**32}, "seed: expected an integer from 0"),
])  # fmt: skip
def test_bad_arguments_are_named(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        WeightedSampler(**{"weights": [1.0, 2.0, 0.0], "seed": 0, **settings})


@pytest.mark.parametrize(("call", "message"), [
    (lambda: balanced_weights([]), "labels: expected the class of each sample"),
    (lambda: balanced_weights({0, 1}), "labels: expected a sequence or a tensor"),
    (lambda: balanced_weights(torch.tensor(3)), "labels: expected a sequence or a tensor"),
    (lambda: balanced_weights(torch.zeros(2, 2)), "labels: expected one class for each sample"),
    (lambda: mixture_weights(range(3), [1]), "dataset: expected a torch.utils.data.ConcatDataset"),
    (lambda: mixture_weights(ConcatDataset([range(3)]), [1, 2]), "shares: expected 1 numbers, one for each part"),
    (lambda: mixture_weights(ConcatDataset([range(3)]), [-1]), r"weights\[0\]"),
])  # fmt: skip
def test_bad_arguments_of_the_helpers_are_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
