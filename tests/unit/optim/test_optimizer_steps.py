"""What follows the steps of an optimizer: a step that a scaler skips is none, and a copy follows its own optimizer."""

import math
import pickle

import pytest
import torch
from torch import nn

from lightning_turbo import amp
from lightning_turbo.optim import LearningRateScaling


class WarmUp:
    def __init__(self, optimizer):
        self.scaling = LearningRateScaling(optimizer, 4.0, warmup_steps=4)

    def follow(self):
        return self.scaling.done


def sgd(**settings):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, **settings)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("make", "fused"), [
    (WarmUp, False), (WarmUp, True),
])  # fmt: skip
def test_a_step_that_the_scaler_skipped_is_none(make, fused):
    optimizer = sgd(fused=fused)
    follower, scaler = make(optimizer), torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=100)
    (weight,) = optimizer.param_groups[0]["params"]
    followed = []
    for value in (1.0, math.inf, 1.0, math.inf, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * value).backward()
        scaler.step(optimizer)
        scaler.update()
        followed.append(follower.follow())
    assert followed == [1, 1, 2, 2, 2, 3]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("first", ["initialize", "schedule"])
@pytest.mark.parametrize("make", [WarmUp])
def test_a_step_that_scale_loss_has_skipped_is_none(make, first):
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follower = make(optimizer) if first == "schedule" else None
    amp.initialize(model, optimizer, opt_level="O1", dtype=torch.float16, verbosity=0)
    follower = follower or make(optimizer)
    followed = []
    for value in (1.0, math.inf, 1.0, math.inf, math.inf, 1.0):
        optimizer.zero_grad()
        with amp.scale_loss(model.weight.sum() * value, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        followed.append(follower.follow())
    assert followed == [1, 1, 2, 2, 2, 3]
    with amp.scale_loss(model.weight.sum() * math.inf, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    amp.shutdown()
    follower.follow()
    optimizer.step()
    assert follower.follow() == 4  # a step that nobody skips


@pytest.mark.parametrize("make", [WarmUp])
def test_a_copy_follows_the_copy_of_the_optimizer(make):
    def rates(optimizer, follower, steps):
        seen = []
        for _ in range(steps):
            (weight,) = optimizer.param_groups[0]["params"]
            before, weight.grad = weight.item(), torch.ones(1)
            optimizer.step()
            follower.follow()
            seen.append(before - weight.item())
        return seen

    optimizer = sgd()
    pair = optimizer, make(optimizer)
    rates(*pair, 2)
    twin = pickle.loads(pickle.dumps(pair))
    assert rates(*twin, 5) == pytest.approx(rates(*pair, 5))
