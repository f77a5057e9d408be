"""Scaled learning rates against schedules that were built with the scaled rate."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as s

from lightning_turbo.optim import LearningRateWarmup, cyclic_lr, lr_factor, scale_learning_rates


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def test_the_rules():
    assert lr_factor("linear", 1024, 256) == 4.0
    assert lr_factor("sqrt", 1024, 256) == 2.0
    assert lr_factor(None, 1024, 256) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cubic", 1, 1), "lr_rule='cubic'; accepted are 'linear', 'sqrt' and None"),
        (("linear", 0, 1), "batch_size=0; accepted is a whole number"),
        (("linear", 1, 2.5), "base_batch_size=2.5; accepted is a whole number"),
    ],
)
def test_impossible_rules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lr_factor(*arguments)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, None, "2"])
def test_impossible_factors_are_refused(factor):
    with pytest.raises(ValueError, match="accepted is a finite number above 0"):
        scale_learning_rates([], [], factor)
    with pytest.raises(ValueError, match="accepted is a finite number above 0"):
        LearningRateWarmup(sgd(), factor, steps=3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"factor": math.nan}, ValueError, "factor=nan; accepted is a finite number above 0"),
        ({"steps": math.nan}, ValueError, "steps=nan; accepted is a whole number, at least 0"),
        ({"steps": -1}, ValueError, "steps=-1; accepted"),
        ({"done": math.inf}, ValueError, "done=inf; accepted is a whole number, at least 0"),
        ({"optimizer": None}, TypeError, "optimizer=None: accepted is a torch.optim.Optimizer"),
    ],
)
def test_an_impossible_warm_up_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        LearningRateWarmup(**{"optimizer": sgd(), "factor": 2.0, "steps": 3, **arguments})


# Each builds a schedule whose rates are all `k` times as large.
SCHEDULES = {
    "none": lambda o, k: None,
    "step": lambda o, k: s.StepLR(o, 2, 0.5),
    "lambda": lambda o, k: s.LambdaLR(o, lambda t: 1 / (1 + t)),
    "exponential": lambda o, k: s.ExponentialLR(o, 0.9),
    "cosine": lambda o, k: s.CosineAnnealingLR(o, 5, eta_min=0.001 * k),
    "restarts": lambda o, k: s.CosineAnnealingWarmRestarts(o, 4, eta_min=0.001 * k),
    "one cycle": lambda o, k: s.OneCycleLR(o, 0.5 * k, total_steps=12, cycle_momentum=False),
    "cyclic": lambda o, k: s.CyclicLR(o, 0.01 * k, 0.5 * k, 3, cycle_momentum=False),
    "ours": lambda o, k: cyclic_lr(o, 0.01 * k, 0.5 * k, steps_up=3)["scheduler"],
    "polynomial": lambda o, k: s.PolynomialLR(o, 8),
    "sequence": lambda o, k: s.SequentialLR(o, [s.LinearLR(o, 0.1), s.CosineAnnealingLR(o, 4, 0.001 * k)], [3]),
    "chain": lambda o, k: s.ChainedScheduler([s.LinearLR(o, 0.1), s.ExponentialLR(o, 0.9)]),
}


def rates(optimizer, schedule, steps=10):
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scaled_schedule_equals_one_built_with_scaled_rates(name):
    def optimizer(k):
        return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr * k} for lr in (0.1, 0.2)], lr=1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: SequentialLR calls step with an epoch
        expected = rates(o := optimizer(4.0), SCHEDULES[name](o, 4.0))
        o = optimizer(1.0)
        schedule = SCHEDULES[name](o, 1.0)
        scale_learning_rates([o], [schedule] if schedule is not None else [], 4.0)
        got = rates(o, schedule)
    for a, b in zip(got, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-12)


def test_a_plateau_keeps_its_lowest_rate_in_proportion():
    o = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = s.ReduceLROnPlateau(o, factor=0.1, patience=0, min_lr=0.05)
    scale_learning_rates([o], [schedule], 4.0)
    for _ in range(5):
        schedule.step(1.0)
    assert o.param_groups[0]["lr"] == pytest.approx(0.2)


def test_a_rate_in_a_tensor_keeps_its_place():
    rate = torch.tensor(0.5)
    o = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=rate, capturable=False, foreach=False)
    held = o.param_groups[0]["lr"]
    scale_learning_rates([o], [], 2.0)
    assert o.param_groups[0]["lr"] is held
    assert held.item() == 1.0


def test_a_rate_in_a_tensor_is_scaled_once_for_all_that_share_it():
    rate = torch.tensor(0.5)
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(3)]
    o = torch.optim.Adam(groups, lr=rate, foreach=False)
    assert o.param_groups[0]["lr"] is o.param_groups[2]["lr"]
    schedule = s.StepLR(o, 10)
    scale_learning_rates([o], [schedule], 2.0)
    assert [group["lr"].item() for group in o.param_groups] == [1.0] * 3
    assert [float(lr) for lr in (*schedule.base_lrs, *schedule.get_last_lr())] == [1.0] * 6


def test_the_warm_up_lowers_the_step_and_nothing_else():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.8)
    schedule = s.ExponentialLR(optimizer, 0.5)
    warmup = LearningRateWarmup(optimizer, factor=4.0, steps=3)
    moved, shown = [], []
    for _ in range(5):
        weight.grad = torch.ones(())
        before = weight.item()
        shown.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        moved.append(before - weight.item())
    full = [0.8 * 0.5**t for t in range(5)]
    assert shown == pytest.approx(full)
    ramp = [0.25, 0.5, 0.75, 1.0, 1.0]  # from 1 / 4 to 1 over three steps
    assert moved == pytest.approx([r * f for r, f in zip(ramp, full, strict=True)], rel=1e-6)
    warmup.remove()
    assert warmup.done == 5


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_the_copy_of_a_warm_up_warms_the_copy_of_the_optimizer_up(copied):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    warmup = LearningRateWarmup(optimizer, factor=4.0, steps=3)
    other, copied_warmup = copied((optimizer, warmup))
    copied_warmup.remove()
    again, last = copied((optimizer, warmup))
    for each, rate in ((other, 1.0), (again, 0.25), (optimizer, 0.25)):
        (parameter,) = each.param_groups[0]["params"]
        parameter.grad = torch.ones(1)
        each.step()
        assert parameter.item() == -rate
    assert (warmup.done, copied_warmup.done, last.done) == (1, 0, 1)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_what_is_saved_within_a_step_holds_the_full_rate(rate):
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=rate)
    warmup = LearningRateWarmup(optimizer, factor=2.0, steps=4)
    saved = []

    def closure():
        saved.append((optimizer.state_dict()["param_groups"][0]["lr"], optimizer.param_groups[0]["lr"]))
        return optimizer.param_groups[0]["params"][0].sum()

    optimizer.step(closure)
    assert [float(lr) for lr in saved[0]] == pytest.approx([0.1, 0.05])
    warmup.remove()
    optimizer.step(closure)
    assert [float(lr) for lr in saved[1]] == pytest.approx([0.1, 0.1])


def test_a_failed_step_does_not_leave_a_lowered_rate():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.8)
    warmup = LearningRateWarmup(optimizer, factor=4.0, steps=3)

    def fail():
        raise RuntimeError("no loss")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no loss"):
            optimizer.step(fail)
    warmup.remove()
    assert optimizer.param_groups[0]["lr"] == 0.8
    assert warmup.done == 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skipped_is_no_step_of_the_warm_up(fused):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.8, fused=fused)
    warmup = LearningRateWarmup(optimizer, factor=4.0, steps=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=100)
    done = []
    for value in (math.inf, 1.0, math.inf, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * value).backward()
        scaler.step(optimizer)
        scaler.update()
        done.append(warmup.done)
    assert done == [0, 1, 1, 2, 3]
