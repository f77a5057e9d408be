"""Scaled learning rates against schedules that were built with the scaled rate."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as s

from lightning_turbo.optim import LearningRateScaling, cyclic_lr, lr_factor


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
    assert [lr_factor(rule, 1024, 256) for rule in ("linear", "sqrt", None)] == [4.0, 2.0, 1.0]
    with pytest.raises((ValueError, TypeError), match=message):
        function(*arguments)


class OwnRates:
    """A schedule in timm's manner: it keeps base values of its own and writes the groups' rates from them."""

    def __init__(self, optimizer):
        self.optimizer, self.made = optimizer, 0
        self.base_values = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]

    def step(self):
        self.made += 1
        for group, base in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = base * 0.9**self.made


# Each builds a schedule whose rates are all `k` times as large.
SCHEDULES = {
    "lambda": lambda o, k: s.LambdaLR(o, lambda t: 1 / (1 + t)),
    "cosine": lambda o, k: s.CosineAnnealingLR(o, 5, eta_min=0.001 * k),
    "one cycle": lambda o, k: s.OneCycleLR(o, 0.5 * k, total_steps=12, cycle_momentum=False),
    "ours": lambda o, k: cyclic_lr(o, 0.01 * k, 0.5 * k, steps_up=3)["scheduler"],
    "sequence": lambda o, k: s.SequentialLR(o, [s.LinearLR(o, 0.1), s.CosineAnnealingLR(o, 4, 0.001 * k)], [3]),
    "own rates": lambda o, k: OwnRates(o),
}


@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step")  # SequentialLR of older torch
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scaled_run_equals_one_built_with_scaled_rates(name):
    def rates(k, factor):
        groups = [{"params": [nn.Parameter(torch.zeros((), dtype=torch.float64))], "lr": lr * k} for lr in (0.1, 0.2)]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        schedule = SCHEDULES[name](optimizer, k)
        LearningRateScaling(optimizer, factor)
        seen = []
        for _ in range(10):
            seen.append(step(optimizer))
            schedule.step()
        return seen

    for got, expected in zip(rates(1.0, 4.0), rates(4.0, 1.0), strict=True):
        assert got == pytest.approx(expected, rel=1e-9)


def test_the_warm_up_rises_from_the_unscaled_rate_and_changes_no_rate_that_others_see():
    optimizer = sgd(lr=0.2)
    schedule = s.ExponentialLR(optimizer, 0.5)
    scaling = LearningRateScaling(optimizer, 4.0, warmup_steps=3)
    shown, moved = [], []
    for _ in range(5):
        shown.append(optimizer.param_groups[0]["lr"])
        moved += step(optimizer)
        schedule.step()
    plain = [0.2 * 0.5**t for t in range(5)]
    assert shown == pytest.approx(plain)
    assert moved == pytest.approx([r * m for r, m in zip(plain, (1, 2, 3, 4, 4), strict=True)], rel=1e-5)
    scaling.remove()
    assert scaling.done == 5
    assert step(optimizer) == pytest.approx([0.2 * 0.5**5], rel=1e-4)


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
