"""LARS and LAMB against the formulas of their papers."""

import sys
import types

import pytest
import torch
from torch import nn

from lightning_turbo.errors import MissingExtraError
from lightning_turbo.optim import lamb, lars, split_parameters


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))


def gradients(model, step):
    model.zero_grad()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()


def naive_lars(model, steps, lr, momentum, decay, trust):
    buffers = {p: torch.zeros_like(p) for p in model.parameters()}
    for step in range(steps):
        gradients(model, step)
        with torch.no_grad():
            for p in model.parameters():
                g = p.grad.clone()
                if p.ndim > 1:
                    ratio = trust * p.norm() / (g.norm() + decay * p.norm())
                    g = ratio * (g + decay * p)
                buffers[p] = momentum * buffers[p] + g
                p -= lr * buffers[p]


def naive_lamb(model, steps, lr, betas, eps, decay):
    m = {p: torch.zeros_like(p) for p in model.parameters()}
    v = {p: torch.zeros_like(p) for p in model.parameters()}
    for step in range(steps):
        gradients(model, step)
        with torch.no_grad():
            for p in model.parameters():
                m[p] = betas[0] * m[p] + (1 - betas[0]) * p.grad
                v[p] = betas[1] * v[p] + (1 - betas[1]) * p.grad**2
                update = m[p] / (v[p].sqrt() + eps)
                if p.ndim > 1:
                    update = update + decay * p
                    update = update * p.norm() / update.norm()
                p -= lr * update


def same(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)  # float32, and eps in the trust ratio's denominator


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars_follows_its_formula(momentum):
    model, reference = network(), network()
    optimizer = lars(model, lr=0.5, momentum=momentum, weight_decay=0.01, trust_coefficient=0.02)
    for step in range(4):
        gradients(model, step)
        optimizer.step()
    naive_lars(reference, 4, 0.5, momentum, 0.01, 0.02)
    same(model, reference)


def test_lamb_follows_its_formula():
    model, reference = network(), network()
    with torch.no_grad():
        for net in (model, reference):
            net[0].weight.mul_(40)  # norms above 10, which must not be cut off
    optimizer = lamb(model, lr=0.01, weight_decay=0.1)
    for step in range(4):
        gradients(model, step)
        optimizer.step()
    naive_lamb(reference, 4, 0.01, (0.9, 0.999), 1e-6, 0.1)
    same(model, reference)


def test_biases_and_norms_get_no_decay_and_no_trust_ratio():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.norm = nn.LayerNorm((2, 3))  # two dimensions, yet a norm
            self.tied = self.linear
            self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)

    net = Net()
    weights, rest = split_parameters(net)
    assert [p.shape for p in weights] == [(3, 4)]
    assert [p.shape for p in rest] == [(3,), (2, 3), (2, 3)]
    with pytest.raises(ValueError, match=r"parameters of shape \[\(2, 3\), \(2, 3\)\] would get the trust ratio"):
        lars(net, lr=0.1)
    assert [group["adam"] for group in lamb(net, lr=0.1).param_groups] == [False, True]


@pytest.mark.parametrize("make", [lars, lamb])
def test_save_load_go_on_equals_never_having_stopped(make):
    def go(model, optimizer, steps):
        for step in steps:
            gradients(model, step)
            optimizer.step()

    whole = network()
    go(whole, make(whole, lr=0.1), range(6))
    first = network()
    optimizer = make(first, lr=0.1)
    go(first, optimizer, range(3))
    second = network()
    second.load_state_dict(first.state_dict())
    resumed = make(second, lr=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    go(second, resumed, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), second.parameters(), strict=True))


class FakeLAMB(torch.optim.SGD):
    def __init__(self, params, lr, betas, eps, weight_decay, max_grad_norm):
        super().__init__(params, lr=lr)
        self.given = (betas, eps, max_grad_norm)


def test_fused_is_apex_if_it_is_there(monkeypatch):
    fake = types.ModuleType("apex.optimizers")
    fake.FusedLAMB = FakeLAMB
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", fake)
    optimizer = lamb(network(), lr=0.1, fused=True, max_grad_norm=1.0)
    assert isinstance(optimizer, FakeLAMB)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert lamb(network(), lr=0.1, fused=True).given[2] == float("inf")
    with pytest.raises(ValueError, match="drops the trust ratio of groups without weight decay"):
        lamb(network(), lr=0.1, fused=True, weight_decay=0.0)


@pytest.mark.parametrize("module", [None, types.ModuleType("apex.optimizers")])
def test_without_apex_fused_is_refused(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "apex.optimizers", module)
    with pytest.raises(MissingExtraError, match=r"Build apex from https://github\.com/NVIDIA/apex"):
        lamb(network(), lr=0.1, fused=True)


@pytest.mark.parametrize("make", [lars, lamb])
def test_a_missing_package_is_named(monkeypatch, make):
    monkeypatch.setattr("lightning_turbo._optional.installed", lambda module: False)
    with pytest.raises(MissingExtraError, match=r"pytorch_optimizer.*lightning-turbo\[optim\]"):
        make(network(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (lars, {"lr": 0}, ValueError, "lr: expected a finite number above 0, got 0"),
        (
            lars,
            {"lr": 0.1, "weight_decay": -1},
            ValueError,
            "weight_decay: .* number at least 0, got -1",
        ),
        (lars, {"lr": 0.1, "momentum": 1.0}, ValueError, "momentum: expected a number from 0 to below 1"),
        (lars, {"lr": 0.1, "nesterov": None}, TypeError, "nesterov=None"),
        (lamb, {"lr": 0.1, "fused": 0}, TypeError, "fused=0"),
        (lamb, {"lr": 0.1, "betas": (0.9,)}, TypeError, r"betas: expected two numbers .* got \(0.9,\)"),
        (lamb, {"lr": 0.1, "betas": (0.9, 1.0)}, ValueError, "beta2: expected .* got 1.0"),
        (lamb, {"lr": "1"}, ValueError, "lr: .* got '1'"),
        (lamb, {"lr": 0.1, "eps": 0.0}, ValueError, "eps: .* got 0.0"),
        (lamb, {"lr": 0.1, "max_grad_norm": -1.0}, ValueError, "max_grad_norm: .* got -1.0"),
    ],
)
def test_impossible_values_are_refused(make, arguments, error, message):
    with pytest.raises(error, match=message):
        make(network(), **arguments)


@pytest.mark.parametrize("make", [lars, lamb])
def test_a_module_with_parameters_is_needed(make):
    with pytest.raises(TypeError, match=rf"{make.__name__}\(module\): expected a torch.nn.Module .* got 3"):
        make(3, lr=0.1)
    with pytest.raises(ValueError, match=f"{make.__name__}: ReLU has no parameter that requires a gradient"):
        make(nn.ReLU(), lr=0.1)


@pytest.mark.parametrize("make", [lars, lamb])
def test_a_group_that_is_added_later_has_the_same_weight_decay(make):
    net = nn.Linear(4, 2)
    optimizer = make(nn.Linear(2, 1), lr=0.1, weight_decay=0.05)
    optimizer.add_param_group({"params": [net.weight]})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.0, 0.05]
