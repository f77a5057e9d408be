"""The learning rate of every step against a loop that follows the paper's formula."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn

from lightning_turbo.errors import MissingExtraError, NoEffectWarning, TurboWarning
from lightning_turbo.optim import CyclicSchedule, cyclic_lr, preview, propose_lr_range


def sgd(groups=1, momentum=0.0, lr=0.1):
    return torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=lr, momentum=momentum
    )


def run(optimizer, schedule, steps):
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


def naive(step, low, high, up, down, scale):
    """The rate of one step: up in a line, down in a line, its height scaled."""
    cycle, at = divmod(step, up + down)
    share = at / up if at <= up else (up + down - at) / down
    return low + (high - low) * share * scale(cycle + 1, step)


CASES = {
    "triangular": ({}, lambda cycle, step: 1.0),
    "triangular2": ({"mode": "triangular2"}, lambda cycle, step: 0.5 ** (cycle - 1)),
    "exp_range": ({"mode": "exp_range", "gamma": 0.9}, lambda cycle, step: 0.9**step),
    "by cycle": ({"scale_fn": lambda x: 1 / x}, lambda cycle, step: 1 / cycle),
    "by step": ({"scale_fn": lambda x: 1 / (1 + x), "scale_mode": "iterations"}, lambda cycle, step: 1 / (1 + step)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("up", "down"), [(4, None), (3, 7)])
def test_every_step_follows_the_formula(case, up, down):
    arguments, scale = CASES[case]
    optimizer = sgd()
    config = cyclic_lr(optimizer, 0.01, 0.5, steps_up=up, steps_down=down, **arguments)
    assert {"interval": "step", "frequency": 1}.items() <= config.items()
    got = [rate for (rate,) in run(optimizer, config["scheduler"], 30)]
    # The parent computes with fractions of a cycle, which round.
    assert got == pytest.approx([naive(t, 0.01, 0.5, up, down or up, scale) for t in range(30)], rel=1e-9)


def test_epochs_are_steps_per_epoch_times_epochs():
    by_epochs, by_steps = sgd(), sgd()
    a = cyclic_lr(by_epochs, 0.0, 1.0, epochs_up=1.5, epochs_down=0.5, steps_per_epoch=6)["scheduler"]
    b = cyclic_lr(by_steps, 0.0, 1.0, steps_up=9, steps_down=3)["scheduler"]
    assert run(by_epochs, a, 30) == run(by_steps, b, 30)


class Length:
    num_training_batches, accumulate_grad_batches, max_epochs, max_steps = 10, 4, 100, -1


def test_the_trainer_is_asked_at_the_first_step_and_no_earlier():
    length = Length()
    length.num_training_batches = math.inf  # as before the loader is there
    optimizer = sgd()
    schedule = cyclic_lr(optimizer, 0.0, 1.0, epochs_up=2, trainer=length)["scheduler"]
    length.num_training_batches = 10
    assert [rate for (rate,) in run(optimizer, schedule, 7)] == pytest.approx(
        [naive(t, 0, 1, 6, 6, lambda *_: 1.0) for t in range(7)]  # ceil(10 / 4) steps an epoch, two epochs up
    )


def test_an_endless_loader_has_no_epochs():
    length = Length()
    length.num_training_batches = math.inf
    optimizer = sgd()
    schedule = cyclic_lr(optimizer, 0.0, 1.0, epochs_up=2, trainer=length)["scheduler"]
    optimizer.step()
    with pytest.raises(ValueError, match=r"counts inf training batches .* Give steps_up, steps_per_epoch"):
        schedule.step()


def test_each_group_has_its_own_bounds():
    optimizer = sgd(groups=2)
    schedule = cyclic_lr(optimizer, [0.0, 0.5], [1.0, 2.5], steps_up=2)["scheduler"]
    assert run(optimizer, schedule, 5) == [[0.0, 0.5], [0.5, 1.5], [1.0, 2.5], [0.5, 1.5], [0.0, 0.5]]


def test_momentum_is_left_alone_unless_asked():
    optimizer = sgd(momentum=0.7)
    run(optimizer, cyclic_lr(optimizer, 0.0, 1.0, steps_up=2)["scheduler"], 3)
    assert optimizer.param_groups[0]["momentum"] == 0.7


def test_momentum_cycles_against_the_rate_where_there_is_any():
    parameters = [{"params": [nn.Parameter(torch.zeros(1))], "momentum": m} for m in (0.9, 0.0)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    schedule = cyclic_lr(optimizer, 0.0, 1.0, steps_up=2, momentum=(0.8, 0.9))["scheduler"]
    seen = []
    for _ in range(4):
        seen.append([group["momentum"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert [first for first, _ in seen] == pytest.approx([0.9, 0.85, 0.8, 0.85])
    assert [second for _, second in seen] == [0.0] * 4


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_an_optimizer_without_momentum_gets_none(kind):
    weight = [nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(weight, lr=0.1) if kind == "sgd" else torch.optim.Adam(weight, lr=0.1)
    before = {k: v for k, v in optimizer.param_groups[0].items() if k in ("momentum", "betas")}
    with pytest.warns(NoEffectWarning, match="has no momentum here"):
        schedule = cyclic_lr(optimizer, 0.0, 1.0, steps_up=2, momentum=(0.8, 0.9))["scheduler"]
    run(optimizer, schedule, 3)
    assert {k: v for k, v in optimizer.param_groups[0].items() if k in before} == before


def test_without_a_step_of_the_optimizer_nothing_advances():
    optimizer = sgd()
    schedule = cyclic_lr(optimizer, 0.0, 1.0, steps_up=4)["scheduler"]
    schedule.step()  # torch alone would warn here and go on
    assert schedule.last_epoch == 0
    optimizer.step()
    schedule.step()
    schedule.step()
    assert schedule.last_epoch == 1


class Wrapper(torch.optim.Optimizer):
    """Two steps or one, as SAM has them; the optimizer inside steps the groups."""

    def __init__(self, parameters, inner_steps=1):
        super().__init__(parameters, {"lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups
        self.other = sgd()  # of other parameters, and its steps are its own
        self.inner_steps = inner_steps

    def second_step(self):
        self.other.step()
        self.base_optimizer.step()

    def step(self, closure=None):
        for _ in range(self.inner_steps):
            self.second_step()


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # torch looks for the outer step
@pytest.mark.parametrize(("inner_steps", "step"), [(1, "second_step"), (1, "step"), (3, "step"), (0, "step")])
def test_a_step_of_a_wrapper_is_one_step(inner_steps, step):
    optimizer = Wrapper([nn.Parameter(torch.zeros(1))], inner_steps)
    schedule = cyclic_lr(optimizer, 0.0, 1.0, steps_up=4)["scheduler"]
    rates = []
    for _ in range(4):
        getattr(optimizer, step)()
        schedule.step()
        schedule.step()  # without a step of the optimizer
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_the_scaler_does_not_advance(fused):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
    schedule = cyclic_lr(optimizer, 0.1, 1.0, steps_up=4)["scheduler"]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=100)
    advanced = []
    for value in (1.0, math.inf, 1.0, math.inf, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * value).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        advanced.append(schedule.last_epoch)
    assert advanced == [1, 1, 2, 2, 2, 3]


class Decay:
    def __init__(self, base):
        self.base = base

    def __call__(self, x):
        return self.base**x


def half(x):
    return 0.5**x


@pytest.mark.parametrize("cut", [0, 1, 5, 8, 13])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mode": "exp_range", "gamma": 0.8},
        {"scale_fn": half},
        {"scale_fn": Decay(0.7)},
        {"scale_fn": lambda x: 1 / x},
    ],
    ids=["plain", "exp_range", "function", "object", "lambda"],
)
def test_save_load_go_on_equals_never_having_stopped(cut, arguments):
    def build():
        optimizer = sgd(momentum=0.9)
        return optimizer, cyclic_lr(
            optimizer, 0.1, 1.0, epochs_up=1, steps_per_epoch=4, momentum=(0.8, 0.9), **arguments
        )["scheduler"]

    optimizer, schedule = build()
    whole = run(optimizer, schedule, 20)
    first, stopped = build()
    begun = run(first, stopped, cut)
    saved = copy.deepcopy({"optimizer": first.state_dict(), "schedule": stopped.state_dict()})
    second, resumed = build()
    second.load_state_dict(saved["optimizer"])
    kept = copy.deepcopy(saved["schedule"])
    resumed.load_state_dict(saved["schedule"])
    assert saved["schedule"] == kept  # torch's own takes an entry out
    assert begun + run(second, resumed, 20 - cut) == whole
    assert second.param_groups[0]["momentum"] == optimizer.param_groups[0]["momentum"]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_a_copy_goes_on_by_itself(copied):
    optimizer = sgd()
    schedule = cyclic_lr(optimizer, 0.1, 1.0, epochs_up=1, trainer=Length())["scheduler"]
    begun = run(optimizer, schedule, 2)
    pair = copied((optimizer, schedule))
    assert run(*pair, 8) == run(optimizer, schedule, 8) != begun
    assert pair[1].optimizer is pair[0]
    assert pair[1].last_epoch == schedule.last_epoch == 10


def test_the_state_is_plain_data():
    optimizer = sgd()
    schedule = cyclic_lr(optimizer, 0.1, 1.0, epochs_up=1, trainer=Length(), scale_fn=half)["scheduler"]
    run(optimizer, schedule, 3)
    torch.save(schedule.state_dict(), "state.pt")
    assert torch.load("state.pt", weights_only=True)["last_epoch"] == 3


@pytest.mark.parametrize(("saved", "loaded"), [(half, None), (None, half), (half, lambda x: 1.0)])
def test_another_scale_fn_is_refused(saved, loaded):
    a, b = (CyclicSchedule(sgd(), 0.1, 1.0, steps_up=4, scale_fn=f) for f in (saved, loaded))
    with pytest.raises(ValueError, match="cannot be saved: build the schedule with the same scale_fn"):
        b.load_state_dict(a.state_dict())


def test_a_lambda_of_another_value_is_refused():
    a, b = (CyclicSchedule(sgd(), 0.1, 1.0, steps_up=4, scale_fn=f) for f in (lambda x: 0.5, lambda x: 1.0))
    with pytest.raises(ValueError, match=r"gives \[1.0\] at \[1\], but the saved one gave \[0.5\]"):
        b.load_state_dict(a.state_dict())


@pytest.mark.parametrize(("epochs", "steps", "warned"), [(1, -1, True), (100, 2, True), (100, -1, False)])
def test_a_run_too_short_for_the_rise_is_warned_of(epochs, steps, warned):
    length = Length()
    length.max_epochs, length.max_steps = epochs, steps
    optimizer = sgd()
    schedule = cyclic_lr(optimizer, 0.1, 1.0, steps_up=4, trainer=length)["scheduler"]
    optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule.step()
        optimizer.step()
        schedule.step()
    assert [issubclass(w.category, TurboWarning) for w in caught] == [True] * warned
    if warned:
        assert "fewer than the 4 steps that the learning rate takes to rise" in str(caught[0].message)


OK = {"base_lr": 0.1, "max_lr": 1.0}
BAD = [
    ({"base_lr": 1.0, "max_lr": 0.1, "steps_up": 4}, r"base_lr=1.0 is above max_lr=0.1 in parameter group 0"),
    ({"base_lr": -1.0, "max_lr": 0.1, "steps_up": 4}, r"base_lr=-1.0; accepted is a finite number"),
    ({"base_lr": 0.1, "max_lr": math.nan, "steps_up": 4}, r"max_lr=nan; accepted is a finite number"),
    ({"base_lr": "0.1", "max_lr": 1.0, "steps_up": 4}, r"base_lr='0.1'; accepted"),
    ({"base_lr": [0.1, 0.1], "max_lr": 1.0, "steps_up": 4}, r"has 2 values, but the optimizer has 1 parameter groups"),
    ({**OK, "steps_up": 0}, r"steps_up=0; accepted is a whole number, at least 1"),
    ({**OK, "steps_up": 2.5}, r"steps_up=2.5; accepted is a whole number"),
    ({**OK, "steps_up": 4, "steps_down": 0}, r"steps_down=0; accepted is a whole number"),
    ({**OK}, r"steps_up=None and epochs_up=None; accepted is exactly one"),
    ({**OK, "steps_up": 4, "epochs_up": 1}, r"steps_up=4 and epochs_up=1; accepted is exactly one"),
    ({**OK, "steps_up": 4, "epochs_down": 1}, r"use one unit: give steps_down"),
    ({**OK, "epochs_up": 1, "steps_down": 4, "steps_per_epoch": 2}, r"use one unit: give epochs_down"),
    ({**OK, "epochs_up": 0, "steps_per_epoch": 2}, r"epochs_up=0; accepted is a number of epochs"),
    ({**OK, "epochs_up": 1, "epochs_down": -1, "steps_per_epoch": 2}, r"epochs_down=-1; accepted"),
    ({**OK, "epochs_up": 1}, r"Pass trainer=self.trainer in configure_optimizers"),
    ({**OK, "epochs_up": 1, "steps_per_epoch": 0}, r"steps_per_epoch=0; accepted"),
    ({**OK, "steps_up": 4, "mode": "square"}, r"mode='square'; accepted are 'triangular'"),
    ({**OK, "steps_up": 4, "scale_mode": "epoch"}, r"scale_mode='epoch'; accepted are 'cycle'"),
    ({**OK, "steps_up": 4, "gamma": 0}, r"gamma=0; accepted is a number above 0"),
    ({**OK, "steps_up": 4, "momentum": (0.9, 0.8)}, r"momentum=\(0.9, 0.8\); accepted is"),
    ({**OK, "steps_up": 4, "momentum": 0.9}, r"momentum=0.9; accepted is"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_impossible_values_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        cyclic_lr(sgd(momentum=0.9), **arguments)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match=r"optimizer=3: accepted is a torch.optim.Optimizer"):
        cyclic_lr(3, 0.1, 1.0, steps_up=4)
    with pytest.raises(TypeError, match=r"scale_fn=0\.5 cannot be called; accepted is a function"):
        cyclic_lr(sgd(), 0.1, 1.0, steps_up=4, scale_fn=0.5)
    with pytest.raises(TypeError, match=r"trainer=3; accepted is a Trainer, or None. Pass self.trainer"):
        cyclic_lr(sgd(), 0.1, 1.0, steps_up=4, trainer=3)
    with pytest.raises(TypeError, match=r"name=3; accepted is a name for the logs, or None"):
        cyclic_lr(sgd(), 0.1, 1.0, steps_up=4, name=3)


def test_preview_is_what_training_does(tmp_path):
    optimizer = sgd(groups=2, momentum=0.9)
    arguments = {"steps_up": 3, "mode": "triangular2", "momentum": (0.8, 0.9)}
    rates = run(optimizer, cyclic_lr(optimizer, [0.0, 0.1], 1.0, **arguments)["scheduler"], 12)
    seen = preview([0.0, 0.1], 1.0, steps=12, path=tmp_path / "cycle.png", **arguments)
    assert [list(step) for step in zip(*seen.lr, strict=True)] == rates
    assert seen.momentum[0][3] == pytest.approx(0.8)
    assert (tmp_path / "cycle.png").read_bytes().startswith(b"\x89PNG")
    assert preview(0.0, 1.0, steps=2, steps_up=1).momentum == []


def test_preview_takes_every_argument_of_a_schedule():
    settings = {"base_lr": 0.0, "max_lr": 1.0, "steps_up": 2, "name": "cycle"}
    assert cyclic_lr(sgd(), **settings)["name"] == "cycle"
    assert preview(**settings, steps=3).lr == [[0.0, 0.5, 1.0]]


def test_preview_refuses_no_steps_and_a_missing_matplotlib(monkeypatch):
    with pytest.raises(ValueError, match=r"base_lr=\(\) has 0 values, but the optimizer has 1 parameter groups"):
        preview((), 1.0, steps=5, steps_up=2)
    with pytest.raises(ValueError, match="steps=0; accepted is a whole number"):
        preview(0.0, 1.0, steps=0, steps_up=2)
    monkeypatch.setattr("lightning_turbo._optional.installed", lambda module: False)
    with pytest.raises(MissingExtraError, match="lightning-turbo\\[demo\\]"):
        preview(0.0, 1.0, steps=2, steps_up=2, path="x.png")


def test_the_range_is_where_the_loss_falls():
    lrs = [10.0**e for e in range(-6, 3)]
    losses = [2.0, 2.0, 1.95, 1.7, 1.3, 1.02, 1.0, 3.0, math.nan]
    found = propose_lr_range(lrs, losses)
    assert (found.base_lr, found.max_lr) == (lrs[3], lrs[5])  # 0.1 and 0.9 of the fall from 2 to 1 are done there
    assert len(found.losses) == 8


@pytest.mark.parametrize(
    ("lrs", "losses", "message"),
    [
        ([1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 4.0, 5.0], "never fell below its start of 1"),
        ([1, 2, 3], [1.0, 2.0, 3.0], "has 3 finite losses; at least 5"),
        ([1, 2], [1.0], "2 learning rates with 1 losses"),
    ],
)
def test_a_curve_without_a_fall_is_refused(lrs, losses, message):
    with pytest.raises(ValueError, match=message):
        propose_lr_range(lrs, losses)
    with pytest.raises(ValueError, match=r"begin=0.9 and end=0.1; accepted is 0 < begin < end <= 1"):
        propose_lr_range(lrs, losses, begin=0.9, end=0.1)
    with pytest.raises(ValueError, match=r"begin=None and end=0.9; accepted is 0 < begin < end <= 1"):
        propose_lr_range(lrs, losses, begin=None)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_checkpoint_between_a_skipped_step_and_its_schedule_does_not_run_ahead():
    def make():
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
        return weight, optimizer, cyclic_lr(optimizer, 0.0, 1.0, steps_up=4)["scheduler"]

    weight, optimizer, schedule = make()
    for skipped in (False, True):
        weight.grad = torch.ones(1)
        optimizer.found_inf = torch.tensor(float(skipped))  # as a loss scaler tells a fused optimizer
        optimizer.step()
        state = schedule.state_dict()
        schedule.step()
        _, _, resumed = make()
        resumed.load_state_dict(state)
        resumed.step()
        assert resumed.last_epoch == schedule.last_epoch == 1
