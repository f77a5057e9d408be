"""LARS and LAMB compared with the formulas of their papers."""

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


def naive_lars(p, state):
    g = p.grad.clone()
    if p.ndim > 1:
        g = 0.02 * p.norm() / (g.norm() + 0.01 * p.norm()) * (g + 0.01 * p)
    state["m"] = 0.8 * state.get("m", 0) + g
    return 0.5 * state["m"]


def naive_lamb(p, state):
    state["t"] = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * p.grad
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * p.grad**2
    update = state["m"] / (1 - 0.9 ** state["t"]) / ((state["v"] / (1 - 0.999 ** state["t"])).sqrt() + 1e-6)
    if p.ndim > 1:
        update = update + 0.1 * p
        update = update * p.norm() / update.norm()
    return 0.01 * update


@pytest.mark.parametrize(("make", "settings", "naive"), [
    (lars, {"lr": 0.5, "momentum": 0.8, "weight_decay": 0.01, "trust_coefficient": 0.02}, naive_lars),
    (lamb, {"lr": 0.01, "weight_decay": 0.1}, naive_lamb),
])  # fmt: skip
def test_lars_and_lamb_steps_follow_the_formulas(make, settings, naive):
    model, reference = network(), network()
    with torch.no_grad():
        for net in (model, reference):
            net[0].weight.mul_(40)  # norms above 10, which must not be clipped
    optimizer = make(model, **settings)
    states = {p: {} for p in reference.parameters()}
    for step in range(4):
        gradients(model, step)
        optimizer.step()
        gradients(reference, step)
        with torch.no_grad():
            for p, state in states.items():
                p -= naive(p, state)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)  # float32, and eps in the trust ratio's denominator


def test_biases_and_norms_get_no_decay_and_no_trust_ratio():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.norm = nn.LayerNorm((2, 3))  # a norm with a two-dimensional weight
            self.tied = self.linear
            self.scale = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)

    net = Net()
    weights, rest = split_parameters(net)
    assert [p.shape for p in weights] == [(3, 4)]
    assert [p.shape for p in rest] == [(3,), (3,), (2, 3), (2, 3)]
    with pytest.raises(ValueError, match=r"one-dimensional parameters, got shapes \[\(2, 3\), \(2, 3\)\]"):
        lars(net, lr=0.1)
    optimizer = lamb(net, lr=0.1, weight_decay=0.05)
    assert [group["trust_ratio"] for group in optimizer.param_groups] == [True, False]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.0, 0.05]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("lightning_turbo._optional.installed", lambda module: False)
    with pytest.raises(MissingExtraError, match=r"pytorch_optimizer.*\[optim\]"):
        lars(network(), lr=0.1)
    lamb(network(), lr=0.1)


@pytest.mark.parametrize(("make", "arguments", "message"), [
    (lars, {"weight_decay": -1}, "weight_decay must be non-negative"),  # by pytorch_optimizer
    (lars, {"module": 3}, r"module: expected a torch.nn.Module, got 3"),
    (lamb, {"module": nn.ReLU()}, "lamb: expected a module with trainable parameters, got ReLU without"),
    (lamb, {"lr": 0.0}, "lr: expected a number above 0, got 0.0"),
    (lamb, {"betas": (0.9, 1.0)}, "betas: expected two numbers"),
    (lamb, {"max_grad_norm": 0.0}, "max_grad_norm: expected a number above 0, or None"),
])  # fmt: skip
def test_impossible_values_are_refused(make, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(**{"module": network(), "lr": 0.1, **arguments})


@pytest.mark.parametrize("steps", [1, 10, 300])
@pytest.mark.parametrize("weight", ["zero", "of a norm", "bias"])
def test_parameters_without_a_trust_ratio_are_updated_as_by_adam(weight, steps):
    """Also in LAMB's first steps. A weight of zeros has a ratio of 1 only in the first step."""
    moved = []
    for make in (lambda net: lamb(net, 1e-3, weight_decay=0.0), lambda net: torch.optim.Adam(net.parameters(), 1e-3)):
        net = network().double()
        held = {"zero": net[0].weight, "of a norm": net[1].weight, "bias": net[3].bias}[weight]
        nn.init.zeros_(net[0].weight)
        start, optimizer = held.detach().clone(), make(net)
        for _ in range(1 if weight == "zero" else steps):
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        moved.append(held.detach() - start)
    torch.testing.assert_close(*moved, rtol=1e-5, atol=1e-9)


def test_lamb_clips_the_norm_of_all_gradients_and_resumes_from_its_state():
    ends = []
    for clips in (True, False):
        net = network()
        optimizer = lamb(net, 0.01, max_grad_norm=0.1 if clips else None)
        for step in range(4):
            gradients(net, step)
            if not clips:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            state = optimizer.state_dict()
            optimizer = lamb(net, 0.01, max_grad_norm=0.1 if clips else None)
            optimizer.load_state_dict(state)
        ends.append([p.detach() for p in net.parameters()])
    torch.testing.assert_close(*ends)


def test_a_param_group_without_gradients_is_not_updated():
    """As for a head that the loss of a batch did not use."""
    used, unused = network(), network()
    optimizer = lamb(used, 0.01)
    optimizer.add_param_group({"params": list(unused.parameters())})
    before = [p.detach().clone() for p in (*used.parameters(), *unused.parameters())]
    gradients(used, 0)
    optimizer.step()
    same = [torch.equal(p, q) for p, q in zip(before, (*used.parameters(), *unused.parameters()), strict=True)]
    assert same == [False] * (len(same) // 2) + [True] * (len(same) // 2)
