"""Memory formats: the same numbers, another order in memory, and a measurement without traces."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_turbo.nn import measure_memory_format, set_memory_format


def network(kind=nn.Conv2d, norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return nn.Sequential(kind(3, 4, 3), norm(4), nn.Dropout(0.2), nn.ReLU(), kind(4, 2, 3))


@pytest.mark.parametrize(
    ("kind", "norm", "shape", "last"),
    [
        (nn.Conv2d, nn.BatchNorm2d, (2, 3, 8, 8), torch.channels_last),
        (nn.Conv3d, nn.BatchNorm3d, (2, 3, 8, 8, 8), torch.channels_last_3d),
    ],
)
def test_the_format_changes_and_the_numbers_do_not(kind, norm, shape, last):
    x = torch.randn(shape)
    net = network(kind, norm).eval()
    expected = net(x)
    expected.sum().backward()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    assert set_memory_format(net, "channels_last") == 2
    assert net[0].weight.is_contiguous(memory_format=last)
    assert net[0].weight.grad.is_contiguous(memory_format=last)
    got = net(x)
    assert got.is_contiguous(memory_format=last)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # another kernel adds in another order
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert set_memory_format(net, "contiguous") == 2
    assert net[0].weight.is_contiguous()


class Clock:
    """Replaces the time module and is a hook, which copies share: a convolution takes longer in one memory format."""

    def __init__(self, slow, seconds):
        self.now, self.slow, self.seconds = 0.0, slow, seconds

    def perf_counter(self):
        return self.now

    def __call__(self, layer, args):
        last = layer.weight.is_contiguous(memory_format=torch.channels_last)
        self.now += self.seconds if last == (self.slow == "channels_last") else 1.0

    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize(
    ("slow", "seconds", "best"),
    [("contiguous", 2.0, "channels_last"), ("channels_last", 2.0, "contiguous"), ("contiguous", 1.01, "contiguous")],
)
def test_the_faster_one_is_found_unless_it_wins_by_less_than_the_margin(monkeypatch, slow, seconds, best):
    clock = Clock(slow, seconds)
    monkeypatch.setattr("lightning_turbo.nn.memory_format.time", clock)
    net = nn.Conv2d(3, 4, 3)
    net.register_forward_pre_hook(clock)
    found = measure_memory_format(net, [torch.randn(1, 3, 8, 8)], device="cpu", rounds=1)
    assert found.best == best
    assert found.seconds[slow] == pytest.approx(seconds)


def test_the_measurement_leaves_no_trace():
    net = network()
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        net.register_forward_pre_hook(lambda *_, draw=draw: setattr(net, "drawn", draw()))
    before = copy.deepcopy(net)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    measure_memory_format(net, [torch.randn(2, 3, 8, 8, generator=torch.Generator())], rounds=1)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[2]) == states[1:]
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.state_dict().values(), strict=True))
    assert all(p.grad is None and p.is_contiguous() for p in net.parameters())


def test_outputs_may_have_any_structure():
    class Two(nn.Conv2d):
        def forward(self, x):
            return {"a": (super().forward(x), torch.ones(1, dtype=torch.long)), "b": None}

    assert measure_memory_format(Two(3, 4, 3), [torch.randn(1, 3, 8, 8)], rounds=1).best


@pytest.mark.parametrize(("arguments", "message"), [
    ({"rounds": 0}, "rounds: expected a whole number of at least 1, got 0"),
    ({"device": "gpu"}, "device: expected 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
    ({"margin": 1.0}, "margin: expected a number of at least 0 and below 1"),
    ({"module": nn.Linear(2, 2)}, "module: expected a network with 2D or 3D layers, got 'Linear'"),
    ({"module": None}, "module: expected a torch.nn.Module, got None"),
    ({"context": 3}, "context=3"),
    ({"inputs": torch.randn(1, 3, 8, 8)}, "inputs: expected a tuple of positional inputs .*Tensor"),
])  # fmt: skip
def test_impossible_values_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        measure_memory_format(**{"module": nn.Conv2d(3, 4, 3), "inputs": [torch.randn(1, 3, 8, 8)], **arguments})
    with pytest.raises(ValueError, match="memory_format: expected 'contiguous' or 'channels_last', got 'nhwc'"):
        set_memory_format(nn.Conv2d(3, 4, 3), "nhwc")
