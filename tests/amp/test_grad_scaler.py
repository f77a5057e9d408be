"""From the loss to the weights: backward pass, unscaling, overflow, step."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lightning_turbo import amp
from lightning_turbo.amp.grad_scaler import ApexGradScaler, forget_gradients, gradients_of
from lightning_turbo.errors import AmpUsageError
from tests.amp.loops import INF, backward, init


def arrive(scaler, optimizer, *gradients):
    """Run a backward pass that creates these gradients, scaled, and unscale them."""
    with scaler.backward([optimizer], unscale=False):
        for weight, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=False):
            weight.grad = gradient
    scaler.check(optimizer)


def skips(optimizer):
    return bool(gradients_of(optimizer).overflow)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("gradients", [
    [(INF, INF), (INF, INF), (1.0, 1.0), (1.0, 1.0)], [(1.0, None), (None, INF), (None, 1.0), (1.0, None)],
], ids=["of both weights", "of the second one alone"])  # fmt: skip
def test_an_overflow_in_the_first_fused_step_of_a_weight_leaves_no_momentum(gradients, momentum):
    ends = []
    for fused in (True, False):
        weights = [Parameter(torch.ones(1 << 16)) for _ in range(2)]
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=momentum, fused=fused)
        scaler = ApexGradScaler()
        for made in gradients:
            optimizer.zero_grad()
            left_behind = [torch.full((1 << 16,), 123.0) for _ in range(8)]
            del left_behind  # not zero, as memory of torch.empty may be
            scale = scaler.get_scale()
            arrive(scaler, optimizer, *(g and torch.full((1 << 16,), g) * scale for g in made))
            scaler.step(optimizer)
            scaler.settle()
        ends.append([weight.detach() for weight in weights])
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_of_any_dtype_are_unscaled(dtype):
    weight = Parameter(torch.zeros(3, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ApexGradScaler()
    scaler.load_state_dict({"loss_scale": 1024.0, "unskipped": 0})
    arrive(scaler, optimizer, torch.tensor([1.0, -2.0, 0.5], dtype=dtype) * 1024)
    assert weight.grad.tolist() == [1.0, -2.0, 0.5]
    assert not skips(optimizer)
    arrive(scaler, optimizer, torch.tensor([1.0, float("nan"), 0.5], dtype=dtype))
    assert skips(optimizer)


def test_an_optimizer_that_accepts_grad_scaler_does_not_skip_steps_itself():
    class Capturable(torch.optim.SGD):  # like apex's, which read the overflow from the scaler
        _step_supports_amp_scaling = True

        def step(self, closure=None, grad_scaler=None):
            return super().step(closure)

    weight = Parameter(torch.ones(4))
    optimizer = Capturable([weight], lr=1.0)
    scaler = ApexGradScaler()
    arrive(scaler, optimizer, torch.full((4,), INF))
    scaler.step(optimizer)
    assert weight.tolist() == [1.0] * 4


def test_a_fused_optimizer_with_the_state_of_an_unfused_one_skips():
    weight = Parameter(torch.ones(4))
    plain = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones(4)
    plain.step()
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    optimizer.load_state_dict(plain.state_dict())
    scaler = ApexGradScaler()
    before = weight.detach().clone()
    for gradient in (INF, 1.0):
        optimizer.zero_grad()
        arrive(scaler, optimizer, torch.full((4,), gradient))
        scaler.step(optimizer)
        assert torch.equal(weight, before) is (gradient != 1.0)


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.Adam])
def test_the_step_count_of_a_scalar_parameter_stays_float32(optimizer):
    net = nn.Linear(1, 1, bias=False)
    net.gain = nn.Parameter(torch.tensor(1.0))
    steps = optimizer(net.parameters(), lr=0.0)
    (net(torch.ones(1, 1)) * net.gain).sum().backward()
    steps.step()
    for state in steps.state.values():
        state["step"].fill_(256.0)  # bfloat16 has no 257
    init(net, steps, "O3", dtype=torch.bfloat16)
    backward((net(torch.ones(1, 1)) * net.gain).sum(), steps)
    steps.step()
    assert [state["step"].item() for state in steps.state.values()] == [257.0, 257.0]


def test_the_loss_scale_grows_after_more_steps_than_the_growth_interval():
    weight = Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), ApexGradScaler(growth_interval=5)
    scaler.load_state_dict({"loss_scale": 8.0, "unskipped": 40})
    arrive(scaler, optimizer, torch.ones(1))
    scaler.settle()
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("overflow_at", [None, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loop_gives_the_same_bits_as_torchs_grad_scaler(fused, overflow_at):
    ends = []
    for kind in (ApexGradScaler, lambda: torch.amp.GradScaler("cpu")):
        torch.manual_seed(0)
        model, scaler = nn.Linear(4, 2), kind()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        for number in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean() * (INF if number == overflow_at else 1.0)
            if kind is ApexGradScaler:
                with scaler.backward([optimizer], unscale=number % 2 == 0):
                    scaler.scale(loss).backward()
                scaler.check(optimizer)
                scaler.step(optimizer)
                scaler.settle()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        ends.append((model.weight.detach().clone(), scaler.get_scale()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] == 2.0 ** (16 - (overflow_at is not None))


def test_a_loss_scale_of_one_equals_a_disabled_grad_scaler_of_torch():
    ends = []
    for scaler in (ApexGradScaler(1.0), torch.amp.GradScaler("cpu", enabled=False)):
        weight = Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.sum() * INF).backward()
        for _ in range(2):
            scaler.step(optimizer)
        ends.append((weight.item(), weight.grad.item()))
    assert ends[0] == ends[1] == (-INF, INF)


@pytest.mark.parametrize("scale", ["dynamic", 8.0])
def test_an_optimizer_without_gradients_does_not_affect_the_loss_scale(scale):
    optimizer, scaler = torch.optim.SGD([Parameter(torch.ones(1))], lr=1.0), ApexGradScaler(scale, growth_interval=1)
    before = scaler.get_scale()
    for _ in range(2):
        scaler.check(optimizer)
        scaler.step(optimizer)
        scaler.settle()
    assert scaler.get_scale() == before
    assert not scaler.was_skipped(optimizer)


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("factor", [3.0, INF])
def test_a_parameter_that_optimizers_share_has_the_gradient_of_a_plain_loop(unscale, factor):
    ends = []
    for scaled in (False, True):
        first, shared, last = weights = [Parameter(torch.ones(1)) for _ in range(3)]
        optimizers = [torch.optim.SGD(own, lr=1.0) for own in ([first, shared], [shared, last])]
        scaler = ApexGradScaler() if scaled else ApexGradScaler(1.0)
        with scaler.backward(optimizers, unscale=unscale):
            scaler.scale(sum(weights).sum() * factor).backward()
        for optimizer in optimizers:
            scaler.check(optimizer)
        ends.append([weight.grad.item() for weight in weights])
        if scaled:
            assert [skips(optimizer) for optimizer in optimizers] == [factor == INF] * 2
    assert ends[0] == ends[1] == [factor] * 3


# What is known about gradients


def look(scaler, optimizer):
    state = gradients_of(optimizer)
    overflow = None if state.overflow is None else bool(state.overflow)
    return state.scaled_by is scaler, overflow, scaler.was_skipped(optimizer)


CALLS = {
    "scaled": lambda scaler, optimizer, loss: _pass(scaler, optimizer, loss, False),
    "unscaled": lambda scaler, optimizer, loss: _pass(scaler, optimizer, loss, True),
    "check": lambda scaler, optimizer, loss: scaler.check(optimizer),
    "step": lambda scaler, optimizer, loss: scaler.step(optimizer),
    "settle": lambda scaler, optimizer, loss: scaler.settle(),
    "zero": lambda scaler, optimizer, loss: optimizer.zero_grad(),
    "forget": lambda scaler, optimizer, loss: forget_gradients(optimizer),
}


def _pass(scaler, optimizer, factor, unscale):
    with scaler.backward([optimizer], unscale=unscale):
        scaler.scale(optimizer.param_groups[0]["params"][0].sum() * factor).backward()


@pytest.mark.parametrize(("calls", "factor", "scaled", "overflow", "skipped"), [
    ("", 1.0, False, None, False),
    ("scaled", 1.0, True, None, False),
    ("scaled scaled", 1.0, True, None, False),
    ("unscaled", 1.0, False, False, False),
    ("unscaled scaled", 1.0, True, False, False),
    ("unscaled scaled", INF, True, True, False),
    ("unscaled zero scaled", INF, True, False, False),
    ("scaled check", 1.0, False, False, False),
    ("scaled check step settle", 1.0, False, None, False),
    ("scaled check", INF, False, True, False),
    ("unscaled", INF, False, True, False),
    ("scaled check step", INF, False, None, True),
    ("unscaled step settle", INF, False, None, True),  # a scheduler may ask after settle
    ("unscaled step scaled", INF, True, True, False),
    ("unscaled step check", INF, False, True, True),  # a second step would use the same gradients
    ("unscaled step zero check", INF, False, False, True),
    ("unscaled step forget", INF, False, None, False),
])  # fmt: skip
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_known_about_gradients_after_each_call(calls, factor, scaled, overflow, skipped, fused):
    weight = Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.AdamW([weight], fused=fused), ApexGradScaler()
    for call in calls.split():
        CALLS[call](scaler, optimizer, factor)
    assert look(scaler, optimizer) == (scaled, overflow, skipped)
    assert bool(scaler.skipped_steps) is (factor == INF and "step" in calls)


@pytest.mark.parametrize("calls", ["step", "scaled step", "unscaled step step", "scaled check step settle step"])
@pytest.mark.parametrize("scale", ["dynamic", 8.0])
def test_a_step_without_a_look_at_the_gradients_is_refused(calls, scale):
    weight = Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), ApexGradScaler(scale)
    *before, last = calls.split()
    for call in before:
        CALLS[call](scaler, optimizer, 1.0)
    kept = weight.item()
    with pytest.raises(AmpUsageError, match=r"step: expected a backward pass within.*keeps torch.amp.GradScaler"):
        CALLS[last](scaler, optimizer, 1.0)
    assert weight.item() == kept


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 3.0])
@pytest.mark.parametrize("make", [
    lambda x: x, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.to_sparse,
    lambda x: torch.complex(torch.zeros_like(x), x),
], ids=["float32", "float16", "bfloat16", "float64", "sparse", "complex"])  # fmt: skip
def test_the_overflow_check_does_not_change_gradients(make, bad):
    values = torch.ones(3), torch.tensor([1.0, bad])
    weights = [Parameter(make(value).to_dense()) for value in values]
    optimizer, scaler = torch.optim.SGD(weights, lr=1.0), ApexGradScaler()
    for weight, value in zip(weights, values, strict=True):
        weight.grad = make(value)
    scaler.check(optimizer)
    assert skips(optimizer) is (bad != 3.0)
    torch.testing.assert_close([weight.grad for weight in weights], [make(value) for value in values], equal_nan=True)


@pytest.mark.parametrize("before", [False, True])
def test_a_failed_backward_pass_keeps_the_previous_gradients(before):
    """As after an out-of-memory error in a loop that continues with the next batch."""

    def fail(parameter):
        raise RuntimeError("out of memory")

    def pass_():
        with amp.scale_loss(net(torch.ones(1, 1)).float().sum(), optimizer) as scaled:
            scaled.backward()

    net = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level="O2", dtype=torch.float16, loss_scale=128.0, verbosity=0)
    if before:
        pass_()
    handle = net.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        pass_()
    handle.remove()
    pass_()
    assert net.weight.grad.item() == 1.0 + before


def test_a_pickled_scaler_has_the_same_state():
    weight = Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), ApexGradScaler(growth_interval=7, min_scale=2.0)
    arrive(scaler, optimizer, torch.full((1,), INF))
    scaler.step(optimizer)
    scaler.settle()
    other = pickle.loads(pickle.dumps(scaler))
    assert other.state_dict() == scaler.state_dict() == {"loss_scale": 2.0**15, "unskipped": 0}
    assert (other.growth_interval, other.min_scale) == (7, 2.0)


@pytest.mark.parametrize(("name", "value"), [
    ("num_losses", 0), ("scale_window", 0), ("min_loss_scale", 0.0), ("cast_lists", "mine"),
])  # fmt: skip
def test_initialize_refuses_invalid_arguments(name, value):
    with pytest.raises(AmpUsageError, match="expected"):
        init(nn.Linear(2, 1), None, "O1", **{name: value})
