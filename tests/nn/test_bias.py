"""Biases before a norm: which are dropped, which stay, and what does not change."""

import contextlib
import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn import drop_bias_before_norm


def warmed(module, x):
    """Set nontrivial running statistics and biases."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        for _ in range(3):
            module(torch.randn_like(x))
    return module


def train(module, x):
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    seen = []
    for _ in range(6):
        optimizer.zero_grad()
        out = module(x)
        loss = (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def close(a, b, tolerance=1e-5):  # float32 sums in another order
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_biases_before_norms_are_found_in_the_graph_not_by_names_or_order():
    def forward(net, x):
        return net.last(net.norm(net.other(net.body(net.conv(x)))))

    net = ConvNorm(forward, lambda net: net.add_module("body", nn.BatchNorm2d(4)))
    net.last = nn.Conv2d(4, 2, 1)  # before no norm
    report = drop_bias_before_norm(net)
    assert report.dropped == {"conv": "body", "other": "norm"}
    assert report.parameters == 8
    assert str(report).splitlines()[0] == "2 biases dropped, 8 parameters:"


BATCH, INSTANCE = (
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
SETTINGS = [
    (nn.Conv1d, BATCH, {}), (nn.Conv2d, BATCH, {"momentum": None}), (nn.Conv3d, BATCH, {"affine": False}),
    (nn.ConvTranspose2d, BATCH, {"track_running_stats": False}), (nn.Conv2d, INSTANCE, {}),
    (nn.Conv1d, INSTANCE, {"affine": True, "track_running_stats": True}),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "norms", "settings"), SETTINGS)
def test_training_and_evaluation_give_the_same_numbers(layer, norms, settings):
    dims = int(layer.__name__[-2])
    x = torch.randn(3, 3, *[7] * dims)
    net = nn.Sequential(layer(3, 4, 3), norms[dims - 1](4, **settings), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    net(x)
    without = warmed(net, x)
    net = copy.deepcopy(without)
    assert drop_bias_before_norm(without).dropped == {"0": "1"}
    for mode in (True, False):
        close(without.train(mode)(x), net.train(mode)(x))
    losses = [train(each.train(), x) for each in (without, net)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # rounding over six steps
    close(without.eval()(x), net.eval()(x), 1e-4)


# Biases that stay


class ConvNorm(nn.Module):
    def __init__(self, forward=lambda self, x: self.norm(self.conv(x)), change=lambda self: None):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.other = nn.Conv2d(4, 4, 1)
        self.run = forward
        change(self)

    def forward(self, x):
        return self.run(self, x)


class Opaque(nn.Module):
    """Branches on values, so that it cannot be traced."""

    def __init__(self, conv=None):
        super().__init__()
        self.conv, self.norm = conv or nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.norm(self.conv(x))
        return y if y.sum() > 0 else -y


def tie(net):
    net.other.bias = net.conv.bias


def sequence(change=lambda net: None):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    change(net)
    return net


DIRECTLY = "no convolution with a bias is directly followed by a batch or instance norm"


@pytest.mark.parametrize(("net", "reason"), [
    (ConvNorm(lambda m, x: m.norm(m.conv(x)) + m.conv(x).mean()), "used more than once"),
    (ConvNorm(change=lambda m: m.add_module("again", m.conv)), "used more than once"),
    (ConvNorm(lambda m, x: m.body(m.norm(m.conv(x))), lambda m: m.add_module("body", Opaque(m.conv))), "once"),
    (ConvNorm(lambda m, x: (lambda y: m.norm(y) + y)(m.conv(x))), "its output is also used elsewhere"),
    (ConvNorm(lambda m, x: m.norm(m.conv(x)) * m.conv.bias.sum()), "its bias is also used elsewhere"),
    (ConvNorm(lambda m, x: m.other(m.norm(m.conv(x))), tie), "its bias is also used elsewhere"),
    (sequence(lambda net: net[1].eval()), "in evaluation mode, where it cancels nothing"),
    (sequence(lambda net: net[0].register_forward_hook(lambda *_: None)), "a hook, or another forward"),
    (sequence(lambda net: setattr(net[0], "forward", net[0].forward)), "a hook, or another forward"),
    (sequence(lambda net: net.insert(1, nn.Identity())), DIRECTLY),
    (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), DIRECTLY),
    (nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)), DIRECTLY),
    (nn.Sequential(Opaque(), nn.ReLU()), "0 cannot be traced: pass its submodules, not compiled"),
])  # fmt: skip
def test_a_bias_that_may_have_an_effect_stays_and_the_reason_is_given(net, reason):
    before = copy.deepcopy(net.state_dict())
    with pytest.warns(NoEffectWarning, match=reason):
        assert not drop_bias_before_norm(net).dropped
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_submodule_that_cannot_be_traced_keeps_its_biases():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), Opaque())
    assert drop_bias_before_norm(net).dropped == {"0": "1"}
    assert net[2].conv.bias is not None
    with pytest.raises(ValueError, match=r"module: expected a forward that torch.fx can trace, got that of Opaque"):
        drop_bias_before_norm(Opaque())
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module, got 3"):
        drop_bias_before_norm(3)


class SideEffects(ConvNorm):
    """Has side effects of every kind in ``forward``, and optional arguments."""

    def __init__(self, fails):
        super().__init__()
        self.register_buffer("temperature", torch.tensor(1.0))
        self.outputs, self.fails = [], fails

    def forward(self, x, skip=None, *, raw=False):
        self.temperature.mul_(0.5)
        y = self.conv(x) if raw else self.norm(self.conv(x)) * torch.rand(())
        self.outputs.append((y, random.random(), np.random.rand()))
        return y if not self.fails or y.sum() > 0 else -y


@pytest.mark.parametrize("fails", [False, True])
def test_tracing_does_not_change_the_module_or_the_global_rng(fails):
    net = SideEffects(fails)
    weight = net.conv.weight.clone()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    with pytest.raises(ValueError, match="can trace") if fails else contextlib.nullcontext():
        assert drop_bias_before_norm(net).dropped == {"conv": "norm"}
    assert (net.outputs, net.temperature.item(), net.training) == ([], 1, True)
    assert torch.equal(net.conv.weight, weight)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[2]) == states[1:]


def nested():
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.Conv2d(4, 1, 1))


# Checkpoints with and without biases


@pytest.mark.parametrize("copied", [False, True])
def test_a_state_dict_without_biases_loads_into_both_networks(copied):
    x = torch.randn(2, 3, 5, 5)
    old, net = warmed(nested(), x).eval(), nested()
    net.load_state_dict(old.state_dict())
    drop_bias_before_norm(net)
    net = pickle.loads(pickle.dumps(copy.deepcopy(net))) if copied else net
    close(net.eval()(x), old(x))
    plain, again = nested(), nested()
    drop_bias_before_norm(again)
    for target in (plain, again):
        target.load_state_dict(net.state_dict())
        close(target.eval()(x), old(x))
    again[1].load_state_dict(net[1].state_dict())  # the submodule only
    assert again[1][0].bias is None
    assert net.half().state_dict()["1.0.bias"].dtype is torch.float16


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_with_biases_is_refused_after_they_were_dropped(strict):
    net = nested()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    drop_bias_before_norm(net)
    with pytest.raises(
        RuntimeError, match=r"1\.0\.bias: expected zeros, .* Load the checkpoint before drop_bias_before"
    ):
        net.load_state_dict(state, strict=strict)


@pytest.mark.parametrize("later", ["fused", "another norm"])
def test_a_layer_or_norm_replaced_later_saves_and_loads_its_bias(later):
    def make():
        net = nested()
        drop_bias_before_norm(net)
        net.eval()
        if later == "fused":
            net[1][0], net[1][1] = fuse_conv_bn_eval(*net[1]), nn.Identity()
        else:
            net[1][1] = nn.GroupNorm(2, 4)
        return net

    x = torch.randn(2, 3, 5, 5)
    net, again = make(), make()
    again.load_state_dict(net.state_dict())
    close(again(x), net(x), 0.0)
    assert bool(net.state_dict()["1.0.bias"].any()) == (later == "fused")


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_monais_unet_loses_every_bias_before_a_norm(norm):
    from monai.networks.nets import UNet

    x = torch.randn(2, 1, 8, 8, 8)
    net = warmed(UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=2, norm=norm), x)
    without = copy.deepcopy(net)
    report = drop_bias_before_norm(without)
    assert (len(report.dropped), report.kept) == (9, {})
    for mode in (True, False):
        close(without.train(mode)(x), net.train(mode)(x), 1e-4)


def test_a_layer_whose_weight_is_computed_later_saves_no_zeros_and_loads_what_it_saved():
    net = nested()
    drop_bias_before_norm(net)
    twin = copy.deepcopy(net)
    for each in (net, twin):
        nn.utils.parametrizations.weight_norm(each[1][0])
    state = net.state_dict()
    assert "1.0.bias" not in state
    twin.load_state_dict(state)
    close(twin[1][0].weight, net[1][0].weight)
