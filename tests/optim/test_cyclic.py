"""The learning rate of every step compared with torch's CyclicLR, and features that it does not have."""

import copy
import gc
import math
import weakref

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import nn
from torch.optim import lr_scheduler as s

from lightning_turbo import ApexAMP
from lightning_turbo.optim import cyclic_lr
from tests.convolutions import Net, fit


def parameters():
    return {"params": [nn.Parameter(torch.zeros(1))]}


def sgd(groups=1, momentum=0.0, lr=0.1):
    return torch.optim.SGD([parameters() for _ in range(groups)], lr=lr, momentum=momentum)


def cyclic(optimizer, low=0.1, high=1.0, **arguments):
    return cyclic_lr(optimizer, low, high, **arguments)["scheduler"]


def run(optimizer, schedule, steps):
    rates = []
    for _ in range(steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


def first_rates(optimizer, schedule, steps):
    return [rate for rate, *_ in run(optimizer, schedule, steps)]


def torchs(steps, low, high, up, down=None, **arguments):
    """Return the learning rates of torch's CyclicLR."""
    optimizer = sgd()
    return first_rates(optimizer, s.CyclicLR(optimizer, low, high, up, down, cycle_momentum=False, **arguments), steps)


@pytest.mark.parametrize("arguments", [
    {}, {"mode": "triangular2"}, {"mode": "exp_range", "gamma": 0.9}, {"scale_fn": lambda x: 1 / x},
    {"scale_fn": lambda x: 1 / (1 + x), "scale_mode": "iterations"},
], ids=["triangular", "triangular2", "exp_range", "by cycle", "by step"])  # fmt: skip
@pytest.mark.parametrize(("up", "down"), [(4, None), (3, 7)])
def test_every_step_has_the_learning_rate_of_torchs_cyclic_lr(arguments, up, down):
    optimizer = sgd()
    config = cyclic_lr(optimizer, 0.01, 0.5, step_size_up=up, step_size_down=down, **arguments)
    assert {"interval": "step", "frequency": 1}.items() <= config.items()
    assert first_rates(optimizer, config["scheduler"], 30) == torchs(30, 0.01, 0.5, up, down, **arguments)


def used():
    """An optimizer after three steps of another scheduler."""
    optimizer = sgd(lr=0.5)
    run(optimizer, s.StepLR(optimizer, 2), 3)
    return optimizer


def tensor():
    return torch.optim.Adam([parameters()], lr=torch.tensor(0.5), foreach=False)


@pytest.mark.parametrize("make", [used, tensor])
def test_the_first_step_uses_base_lr_after_any_earlier_learning_rate(make):
    optimizer = make()
    got = first_rates(optimizer, cyclic(optimizer, 0.01, 0.1, step_size_up=4), 6)
    assert got == pytest.approx(torchs(6, 0.01, 0.1, 4), rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step")  # SequentialLR of older versions of torch
def test_each_scheduler_of_a_sequential_lr_has_its_own_learning_rates():
    optimizer = sgd(lr=0.5)
    constant = s.ConstantLR(optimizer, factor=0.5, total_iters=100)
    sequence = s.SequentialLR(optimizer, [constant, cyclic(optimizer, 0.01, 0.1, step_size_up=2)], [3])
    assert first_rates(optimizer, sequence, 7) == pytest.approx([0.25] * 3 + torchs(4, 0.01, 0.1, 2))


class Length:
    num_training_batches, accumulate_grad_batches = 10, 4


LENGTH = Length()  # a scheduler does not keep its Trainer alive


def test_the_length_of_the_cycle_is_read_from_the_trainer_at_the_first_step():
    length = Length()
    length.num_training_batches = math.inf  # as before the loader is set up
    optimizer = sgd()
    schedule = cyclic(optimizer, 0.0, epochs_up=2, trainer=length)
    optimizer.step()
    with pytest.raises(ValueError, match=r"Trainer: expected a finite number of training steps .* Pass step_size_up"):
        schedule.step()
    length.num_training_batches = 10
    # ceil(10 / 4) steps an epoch, two epochs up
    assert first_rates(optimizer, schedule, 7) == pytest.approx(torchs(7, 0, 1, 6))


def test_each_param_group_has_its_own_bounds():
    optimizer = sgd(groups=2)
    schedule = cyclic(optimizer, [0.0, 0.5], [1.0, 2.5], epochs_up=0.5, steps_per_epoch=8)
    assert run(optimizer, schedule, 3) == [[0.0, 0.5], [0.25, 1.0], [0.5, 1.5]]


def test_momentum_cycles_inversely_to_the_learning_rate():
    optimizers = sgd(momentum=0.5), torch.optim.Adam([parameters()], lr=0.1)
    for optimizer, read in zip(optimizers, (lambda g: g["momentum"], lambda g: g["betas"][0]), strict=True):
        schedule = cyclic(optimizer, step_size_up=2, cycle_momentum=True)
        seen = []
        for _ in range(4):
            seen.append(read(optimizer.param_groups[0]))
            run(optimizer, schedule, 1)
        assert seen == pytest.approx([0.9, 0.85, 0.8, 0.85])


def test_a_scheduler_does_not_keep_its_trainer_alive():
    class Owner(Length):
        """A Trainer, which refers to its schedulers."""

    owner, optimizer = Owner(), sgd(momentum=0.9)
    owner.schedule = cyclic(optimizer, epochs_up=1, trainer=owner)
    run(optimizer, owner.schedule, 3)
    weight = weakref.ref(optimizer.param_groups[0]["params"][0])
    gc.disable()
    try:
        del owner, optimizer
        assert weight() is None
    finally:
        gc.enable()


def half(x):
    return 0.5**x


@pytest.mark.parametrize(("cut", "arguments"), [
    (0, {}), (1, {}), (8, {}), (8, {"mode": "exp_range", "gamma": 0.8}), (8, {"scale_fn": half}),
])  # fmt: skip
def test_a_saved_and_resumed_cycle_equals_an_uninterrupted_one(cut, arguments):
    def build():
        optimizer = sgd(momentum=0.9)
        return optimizer, cyclic(optimizer, epochs_up=1, cycle_momentum=True, trainer=LENGTH, **arguments)

    optimizer, schedule = build()
    whole = run(optimizer, schedule, 20)
    first, stopped = build()
    begun = run(first, stopped, cut)
    torch.save({"optimizer": first.state_dict(), "schedule": stopped.state_dict()}, "state.pt")
    saved = torch.load("state.pt", weights_only=True)
    kept = copy.deepcopy(saved["schedule"])
    second, resumed = build()
    second.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["schedule"])
    assert saved["schedule"] == kept  # torch's state_dict lacks an entry
    assert begun + run(second, resumed, 20 - cut) == whole
    assert second.param_groups[0]["momentum"] == optimizer.param_groups[0]["momentum"]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"base_lr": 1.0, "max_lr": 0.1, "step_size_up": 4}, r"base_lr: expected no more than max_lr=0.1, got 1.0"),
    ({"max_lr": math.nan, "step_size_up": 4}, r"max_lr: expected a finite number .* got nan"),
    ({"base_lr": [0.1, 0.1], "step_size_up": 4}, r"each of the 1 parameter groups, got \[0.1, 0.1\]"),
    ({"step_size_up": 2.5}, r"step_size_up: expected an integer of 1 or more, got 2.5"),
    ({}, r"step_size_up and epochs_up: expected exactly one of the two, got \(None, None\)"),
    ({"step_size_up": 4, "epochs_down": 1}, r"expected step_size_down, because the rise is in steps, got 1"),
    ({"epochs_up": 1}, r"trainer: expected self.trainer, or steps_per_epoch=..., with epochs_up, got None"),
    ({"step_size_up": 4, "mode": "square"}, r"mode: expected 'triangular', .* got 'square'"),
    ({"step_size_up": 4, "gamma": 0}, r"gamma: expected a number above 0"),
    ({"step_size_up": 4, "base_momentum": 0.95}, r"base_momentum and max_momentum: expected .* got \(0.95, 0.9\)"),
    ({"optimizer": 3, "step_size_up": 4}, "optimizer: expected a torch.optim.Optimizer, got 3"),
    ({"optimizer": torch.optim.Adagrad([parameters()]), "step_size_up": 4, "cycle_momentum": True}, "must support mom"),
])  # fmt: skip
def test_impossible_values_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        cyclic_lr(**{"optimizer": sgd(momentum=0.9), "base_lr": 0.1, "max_lr": 1.0, **arguments})


# Under a Trainer.


def preview(base_lr, max_lr, steps, **cycle):
    """Return the learning rates of a plain loop."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = cyclic_lr(optimizer, base_lr, max_lr, **cycle)["scheduler"], []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def by_epochs(optimizer, trainer):
    return cyclic_lr(optimizer, 0.01, 0.5, epochs_up=1, epochs_down=0.5, trainer=trainer)


@pytest.mark.parametrize(("accumulate", "per_epoch"), [(1, 10), (4, 3)])
def test_the_trainer_sizes_the_cycle_and_steps_it(accumulate, per_epoch):
    fit(model := Net(by_epochs), accumulate_grad_batches=accumulate)
    cycle = {"epochs_up": 1, "epochs_down": 0.5, "steps_per_epoch": per_epoch}
    assert model.rates == pytest.approx(preview(0.01, 0.5, steps=3 * per_epoch, **cycle))


def test_a_skipped_step_does_not_advance_the_cycle():
    class Spikes(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx in (0, 3) else loss

    model = Spikes(lambda o, t: cyclic_lr(o, 0.001, 0.05, step_size_up=4, trainer=t))
    fit(model, max_epochs=1, plugins=[ApexAMP("O1", loss_scale="dynamic", dtype=torch.bfloat16)])
    steps = [0, 0, 1, 2, 2, 3, 4, 5, 6, 7]  # logged before each of the ten batches, two of which are skipped
    cycle = preview(0.001, 0.05, steps=8, step_size_up=4)
    assert model.rates == pytest.approx([cycle[step] for step in steps])


@pytest.mark.filterwarnings("ignore:.*The parameter.*")
def test_a_cycle_in_epochs_uses_the_batch_size_of_the_batch_size_finder():
    model = Net(by_epochs)
    trainer = fit(model, BatchSizeFinder(mode="power", steps_per_trial=2, init_val=2, max_trials=2), max_epochs=2)
    steps = 40 // model.batch_size
    assert steps == trainer.num_training_batches < 20
    assert trainer.lr_scheduler_configs[0].scheduler.total_size == steps + round(steps / 2)
    expected = preview(0.01, 0.5, steps=2 * steps, epochs_up=1, epochs_down=0.5, steps_per_epoch=steps)
    assert model.rates[-2 * steps :] == pytest.approx(expected)
