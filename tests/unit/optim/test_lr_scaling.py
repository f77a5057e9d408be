"""Learning rates that are scaled while a step is made, and at no other time."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as s

from lightning_turbo.optim import LearningRateScaling, lr_factor


def sgd(lr=0.1):
    return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=lr)


def step(optimizer):
    """One step with a gradient of 1; returns how far each parameter moved: the rate that the step was made with."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.item() for p in parameters]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [b - p.item() for b, p in zip(before, parameters, strict=True)]


@pytest.mark.parametrize(("function", "arguments", "message"), [
    (lr_factor, ("cubic", 1, 1), "lr_rule: expected 'linear', 'sqrt' or None, got 'cubic'"),
    (lr_factor, ("linear", 0, 1), "^batch_size: expected an integer of 1 or more, got 0"),
    (LearningRateScaling, (None, 2.0), "optimizer: expected a torch.optim.Optimizer, got None"),
    (LearningRateScaling, (sgd(), 0.0), "factor: expected a finite number above 0, got 0.0"),
    (LearningRateScaling, (sgd(), 2.0, math.nan), "warmup_steps: expected an integer .* got nan"),
    (LearningRateScaling, (sgd(), 2.0, 1, -1), "done: expected an integer of 0 or more, got -1"),
])  # fmt: skip
def test_impossible_values_are_refused(function, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        function(*arguments)


def test_the_warm_up_rises_from_the_unscaled_rate_and_changes_no_rate_that_others_see():
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(()))], "lr": lr} for lr in (0.2, 0.1)])
    schedule = s.ExponentialLR(optimizer, 0.5)
    scaling = LearningRateScaling(optimizer, 4.0, warmup_steps=3)
    for t, factor in enumerate((1, 2, 3, 4, 4)):
        plain = [0.2 * 0.5**t, 0.1 * 0.5**t]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(plain)
        assert step(optimizer) == pytest.approx([rate * factor for rate in plain], rel=1e-5)
        schedule.step()
    scaling.remove()
    assert scaling.done == 5
    assert step(optimizer) == pytest.approx([0.2 * 0.5**5, 0.1 * 0.5**5], rel=1e-4)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_a_checkpoint_within_a_step_holds_the_rate_without_the_factor(rate):
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=rate)
    LearningRateScaling(optimizer, 2.0)
    seen = []

    def closure():
        seen.append((optimizer.state_dict()["param_groups"][0]["lr"], optimizer.param_groups[0]["lr"]))
        return optimizer.param_groups[0]["params"][0].sum()

    optimizer.step(closure)
    assert [float(lr) for lr in seen[0]] == pytest.approx([0.1, 0.2])
    assert optimizer.param_groups[0]["lr"] is rate


def test_a_step_that_raises_does_not_leave_a_scaled_rate():
    optimizer = sgd()
    scaling = LearningRateScaling(optimizer, 4.0)

    def fail():
        raise RuntimeError("no loss")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no loss"):
            optimizer.step(fail)
    scaling.remove()
    assert (optimizer.param_groups[0]["lr"], scaling.done) == (0.1, 0)
