"""From the loss to the weights: backward pass, unscaling, overflow, step."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lightning_turbo import amp
from lightning_turbo.amp.grad_scaler import ApexGradScaler
from lightning_turbo.errors import AmpUsageError
from tests.amp.loops import INF, backward, init


def arrive(scaler, optimizer, *gradients):
    """Run a backward pass that creates these gradients, scaled, and unscale them."""
    with scaler.backward([optimizer], unscale=False):
        for weight, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=False):
            weight.grad = gradient
    scaler.unscale_(optimizer)


def skips(scaler, optimizer):
    return scaler.state_of(optimizer).is_overflow()


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
            scaler.update()
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
    assert not skips(scaler, optimizer)
    arrive(scaler, optimizer, torch.tensor([1.0, float("nan"), 0.5], dtype=dtype))
    assert skips(scaler, optimizer)


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
    scaler.update()
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loop_for_torchs_grad_scaler_gives_the_same_bits(fused, unscales):
    ends = []
    for kind in (ApexGradScaler, lambda: torch.amp.GradScaler("cpu")):
        torch.manual_seed(0)
        model, scaler = nn.Linear(4, 2), kind()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        for number in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean() * (INF if number == 2 else 1.0)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        ends.append((model.weight.detach().clone(), scaler.get_scale()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] == 2.0**15


def test_a_loss_scale_of_one_equals_a_disabled_grad_scaler_of_torch():
    ends = []
    for scaler in (ApexGradScaler(1.0), torch.amp.GradScaler("cpu", enabled=False)):
        weight = Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.sum() * INF).backward()
        for _ in range(2):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        ends.append((weight.item(), weight.grad.item()))
    assert ends[0] == ends[1] == (-INF, INF)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("scale", ["dynamic", 8.0])
def test_scale_accepts_several_losses(scale, kind):
    losses = kind([torch.ones(2), kind([torch.ones((), dtype=torch.float16)])])
    scaled = ApexGradScaler(scale).scale(losses)
    wanted = torch.amp.GradScaler("cpu", 8.0 if scale == 8.0 else 2.0**16).scale(kind([torch.ones(2), torch.ones(())]))
    assert type(scaled) is type(scaled[1]) is kind
    assert torch.equal(scaled[0], wanted[0])
    assert torch.equal(scaled[1][0], wanted[1])


@pytest.mark.parametrize("scale", ["dynamic", 8.0])
def test_an_optimizer_without_gradients_does_not_affect_the_loss_scale(scale):
    optimizer, scaler = torch.optim.SGD([Parameter(torch.ones(1))], lr=1.0), ApexGradScaler(scale, growth_interval=1)
    before = scaler.get_scale()
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == before
    assert not scaler.was_skipped(optimizer)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_loop_for_torchs_grad_scaler_may_unscale_and_not_step(unscales):
    """As in loops that check the norm of the gradients and skip a batch."""
    weights = []
    for kind in (ApexGradScaler, lambda: torch.amp.GradScaler("cpu")):
        weight, scaler = Parameter(torch.zeros(1)), kind()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            if number == 1 or unscales:
                scaler.unscale_(optimizer)
            if number != 1:
                scaler.step(optimizer)
            scaler.update()
        weights.append(weight.item())
    assert weights == [-2.0, -2.0]


@pytest.mark.parametrize("optimizer", [
    torch.optim.SGD, lambda weights, lr: torch.optim.AdamW(weights, lr=lr, fused=True),
], ids=["plain", "fused"])  # fmt: skip
@pytest.mark.parametrize("scale", ["dynamic", 8.0])
@pytest.mark.parametrize("calls", [
    "step step", "step unscale_", "unscale_ unscale_", "unscale_ step unscale_", "unscale_ step step",
    "step update step", "step update unscale_ step", "unscale_ update unscale_ step", "unscale_ step update unscale_",
])  # fmt: skip
def test_calls_in_the_wrong_order_raise_as_in_torchs_grad_scaler(calls, scale, optimizer):
    ends = []
    for scaler in (ApexGradScaler(scale), torch.amp.GradScaler("cpu", 8.0 if scale == 8.0 else 2.0**16)):
        weight = Parameter(torch.zeros(1))
        steps, refused = optimizer([weight], lr=1.0), None
        scaler.scale(weight.sum() * 3).backward()
        for name in calls.split():
            try:
                getattr(scaler, name)(*([] if name == "update" else [steps]))
            except RuntimeError:
                refused = name
                break
        ends.append((refused, weight.item(), weight.grad.item()))
    assert ends[0] == ends[1]


def test_a_backward_pass_after_a_step_needs_no_update_of_the_scaler():
    """As in loops that step twice on one batch."""
    weight, scaler = Parameter(torch.zeros(1)), ApexGradScaler(8.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        with scaler.backward([optimizer], unscale=False):
            scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
    assert weight.item() == -2.0


def test_setting_the_loss_scale_resets_a_found_overflow():
    for kind in (ApexGradScaler, lambda: torch.amp.GradScaler("cpu")):
        weight, scaler = Parameter(torch.zeros(1)), kind()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for factor in (INF, 1.0):
            scaler.scale(weight.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update(1024.0 if factor == INF else None)
            optimizer.zero_grad()
        assert scaler.get_scale() == 1024.0


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


def test_a_pickled_scaler_has_no_state_of_the_current_step():
    weight = Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), ApexGradScaler(growth_interval=7, min_scale=2.0)
    arrive(scaler, optimizer, torch.full((1,), INF))
    scaler.step(optimizer)
    scaler.update()
    other = pickle.loads(pickle.dumps(scaler))
    assert other.state_dict() == scaler.state_dict() == {"loss_scale": 2.0**15, "unskipped": 0}
    assert (other.get_growth_interval(), other.min_scale, other.was_skipped(optimizer)) == (7, 2.0, False)


@pytest.mark.parametrize(("name", "value"), [
    ("num_losses", 0), ("scale_window", 0), ("min_loss_scale", 0.0), ("cast_lists", "mine"),
])  # fmt: skip
def test_initialize_refuses_invalid_arguments(name, value):
    with pytest.raises(AmpUsageError, match="expected"):
        init(nn.Linear(2, 1), None, "O1", **{name: value})
