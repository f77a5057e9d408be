"""What lies between a loss and the weights: the backward pass, the unscaling, the step."""

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lightning_turbo import amp
from lightning_turbo.amp.engine import AmpEngine
from lightning_turbo.amp.loss_scaling import LossScaler
from tests.unit.amp.loops import INF, backward, init


def engine_of(optimizer):
    engine = AmpEngine("O1", device_type="cpu", dtype=torch.float16)
    engine.attach(optimizer, [])
    return engine


def arrive(engine, optimizer, *gradients):
    """Lets a backward pass make these gradients, scaled."""
    with engine.backward([optimizer], 0, delay_unscale=True):
        for weight, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=False):
            weight.grad = gradient
    engine.unscale(optimizer)


def by_autocast(first, second):
    with torch.autocast("cpu", enabled=False):
        return first @ second


def by_disable_casts(first, second):
    with amp.disable_casts():
        return first @ second


def by_einsum(first, second):  # apex leaves it alone
    return torch.einsum("ij,jk->ik", first, second)


@pytest.mark.parametrize("product", [by_autocast, by_disable_casts, by_einsum])
def test_what_ran_in_float32_has_float32_gradients(product):
    weight = Parameter(torch.randn(16, 16))
    inputs = torch.randn(16, 16)
    (wanted,) = torch.autograd.grad(product(inputs, weight).square().mean(), weight)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD([weight, *model.parameters()], lr=0.0)
    init(model, optimizer, "O1", dtype=torch.bfloat16, cast_lists="apex")
    loss = product(inputs, weight).square().mean()
    backward(loss, optimizer)
    assert loss.dtype is torch.float32
    assert torch.equal(weight.grad, wanted)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("gradients", [
    [(INF, INF), (INF, INF), (1.0, 1.0), (1.0, 1.0)], [(1.0, None), (None, INF), (None, 1.0), (1.0, None)],
], ids=["of both weights", "of the second one alone"])  # fmt: skip
def test_an_overflow_in_the_first_fused_step_of_a_weight_leaves_no_momentum(gradients, momentum):
    ends = []
    for fused in (True, False):
        weights = [Parameter(torch.ones(1 << 16)) for _ in range(2)]
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=momentum, fused=fused)
        engine = engine_of(optimizer)
        for made in gradients:
            optimizer.zero_grad()
            left_behind = [torch.full((1 << 16,), 123.0) for _ in range(8)]
            del left_behind  # by activations: what torch.empty may find
            scale = engine.scaler(0).loss_scale
            arrive(engine, optimizer, *(g and torch.full((1 << 16,), g) * scale for g in made))
            engine.step(optimizer, optimizer.step)
            engine.update()
        ends.append([weight.detach() for weight in weights])
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_of_any_dtype_are_unscaled(dtype):
    weight = Parameter(torch.zeros(3, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    engine = engine_of(optimizer)
    engine.scaler(0).load_state_dict({"loss_scale": 1024.0, "unskipped": 0})
    arrive(engine, optimizer, torch.tensor([1.0, -2.0, 0.5], dtype=dtype) * 1024)
    assert weight.grad.tolist() == [1.0, -2.0, 0.5]
    assert not engine.will_skip(optimizer)
    arrive(engine, optimizer, torch.tensor([1.0, float("nan"), 0.5], dtype=dtype))
    assert engine.will_skip(optimizer)


def test_an_optimizer_that_takes_a_scaler_is_not_left_to_skip_by_itself():
    class Capturable(torch.optim.SGD):  # as apex's, which read the overflow from the scaler
        _step_supports_amp_scaling = True

        def step(self, closure=None, grad_scaler=None):
            return super().step(closure)

    weight = Parameter(torch.ones(4))
    optimizer = Capturable([weight], lr=1.0)
    engine = engine_of(optimizer)
    arrive(engine, optimizer, torch.full((4,), INF))
    engine.step(optimizer, optimizer.step)
    assert weight.tolist() == [1.0] * 4


def test_a_fused_optimizer_with_the_state_of_an_unfused_one_skips():
    weight = Parameter(torch.ones(4))
    plain = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones(4)
    plain.step()
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    optimizer.load_state_dict(plain.state_dict())
    engine = engine_of(optimizer)
    before = weight.detach().clone()
    for gradient in (INF, 1.0):
        arrive(engine, optimizer, torch.full((4,), gradient))
        engine.step(optimizer, optimizer.step)
        assert torch.equal(weight, before) is (gradient != 1.0)


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.Adam])
def test_the_count_of_steps_of_a_parameter_without_dimensions_stays_wide(optimizer):
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


def test_an_overflow_is_not_lost_on_the_way_to_another_device():
    scaler = LossScaler("dynamic")
    scaler.unscale_([torch.tensor([INF])])
    scaler.to(torch.device("cpu", 0))
    assert scaler.overflowed
    scaler.update()
    assert scaler.loss_scale == 2.0**15


def test_a_scale_that_was_steady_for_longer_than_the_window_grows():
    scaler = LossScaler("dynamic", scale_window=5)
    scaler.load_state_dict({"loss_scale": 8.0, "unskipped": 40})
    scaler.unscale_([torch.ones(1)])
    scaler.update()
    assert scaler.loss_scale == 16.0
