"""The numbers that transforms draw: those of SplitMix64, which belong to the sample, and their distribution."""

import math

import pytest
import torch

from lightning_turbo.data.augment.draws import draws_of
from lightning_turbo.data.sample_seeds import seeds_of
from tests.data.augment.samples import CPU


def split_mix(state):
    """SplitMix64 as in the paper, with Python's integers."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def test_uniform_numbers_are_those_of_split_mix():
    step, seed, epoch, index, position = 0x9E3779B97F4A7C15, 7, 3, 123456789, 2
    key = split_mix((seeds_of(seed, epoch, 0, kind="augment")[0] + 2**63 + step * index) % 2**64)
    key = split_mix((key + step * (position + 1)) % 2**64)
    expected = [(split_mix((key + step * number) % 2**64) >> 11) / 2**53 for number in range(1, 7)]
    draws = draws_of(seed, epoch, [5, index], 3)[position]
    got = [draws.uniform(0, 1, 2, 2)[1].flatten(), draws.uniform(0, 1, 2)[1]]
    assert torch.cat(got).tolist() == expected


def everything(indices, epoch=1):
    """All kinds of numbers, of the second transform."""
    draws, rows = draws_of(7, epoch, indices, 2)[1], torch.arange(len(indices))
    some = [draws.uniform(-2, 3, 4), draws.beta(0.3)[:, None], draws.normal(rows, (7, 5), CPU).flatten(1).double()]
    return torch.cat([*some, draws.uniform(0, 1)[:, None]], 1)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_draws_belong_to_the_sample_in_any_batch(size):
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist()
    batches = [order[at : at + size] for at in range(0, 50, size)]
    got = torch.cat([everything(batch) for batch in batches])
    assert torch.equal(got, everything(list(range(50)))[order])
    assert not torch.equal(got, everything(order, epoch=2))


def test_drawn_numbers_are_distributed_as_they_say_and_independent():
    count = 10_000
    columns = []
    for epoch in (0, 1):
        for draws in draws_of(0, epoch, range(count), 2):
            columns += [draws.uniform(0, 1), draws.uniform(0, 1)]
    unit = torch.stack(columns)
    assert (unit.mean(1) - 0.5).abs().max() < 5 * math.sqrt(1 / 12 / count)
    assert ((unit.sort(1).values - torch.linspace(0, 1, count)).abs().max() * math.sqrt(count)) < 2.2  # Kolmogorov
    neighbors = torch.cat([unit, unit.roll(1, 1)])
    correlation = torch.corrcoef(neighbors) - torch.eye(len(neighbors))
    assert correlation.abs().max() < 5 / math.sqrt(count)
    draws = draws_of(0, 0, range(count), 1)[0]
    assert abs(len(draws.rows(0.3)) / count - 0.3) < 5 * math.sqrt(0.21 / count)
    assert (len(draws.rows(0)), len(draws.rows(1))) == (0, count)
    for alpha in (0.05, 0.4, 1.0, 8.0):
        share = draws.beta(alpha)
        variance = 1 / (4 * (2 * alpha + 1))
        assert share.isfinite().all()
        assert 0 <= share.min() <= share.max() <= 1
        assert abs(share.mean() - 0.5) < 5 * math.sqrt(variance / count)
        assert share.var() == pytest.approx(variance, rel=0.05)
    noise = draws.normal(torch.arange(100), (101,), CPU)
    assert abs(noise.mean()) < 0.05
    assert noise.var() == pytest.approx(1, rel=0.05)
    assert (noise**4).mean() == pytest.approx(3, rel=0.1)
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.5
