"""Memory formats: the same numbers, another order in memory, and a measurement without traces."""

import copy
import random
import time

import numpy as np
import pytest
import torch
from torch import nn

from lightning_turbo._random import changed_generators as moved
from lightning_turbo._random import shared_state
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
    state = {name: value.clone() for name, value in net.state_dict().items()}
    assert set_memory_format(net, "channels_last") == 2
    assert net[0].weight.is_contiguous(memory_format=last)
    got = net(x)
    assert got.is_contiguous(memory_format=last)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # another kernel adds in another order
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert set_memory_format(net, "contiguous") == 2
    assert net[0].weight.is_contiguous()


def test_gradients_follow():
    net = nn.Conv2d(3, 4, 3)
    net(torch.randn(1, 3, 5, 5)).sum().backward()
    set_memory_format(net, "channels_last")
    assert net.weight.grad.is_contiguous(memory_format=torch.channels_last)


class SlowWhen(nn.Conv2d):
    """A convolution that is slow in one memory format."""

    def __init__(self, slow):
        super().__init__(3, 4, 3)
        self.slow = slow

    def forward(self, x):
        if self.weight.is_contiguous(memory_format=torch.channels_last) == (self.slow == "channels_last"):
            time.sleep(0.01)
        return super().forward(x)


@pytest.mark.parametrize("slow", ["contiguous", "channels_last"])
def test_the_faster_one_is_found(slow):
    found = measure_memory_format(SlowWhen(slow), [torch.randn(1, 3, 8, 8)], rounds=1, steps=1)
    assert found.best != slow
    assert found.seconds[slow] > found.seconds[found.best]


def test_a_win_within_the_margin_is_none():
    found = measure_memory_format(SlowWhen("contiguous"), [torch.randn(1, 3, 8, 8)], rounds=1, steps=1, margin=0.9999)
    assert found.best == "contiguous"


def test_the_measurement_leaves_no_trace():
    net = network()
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        net.register_forward_pre_hook(lambda *_, draw=draw: setattr(net, "drawn", draw()))
    before, state = copy.deepcopy(net), shared_state()
    measure_memory_format(net, [torch.randn(2, 3, 8, 8, generator=torch.Generator())], rounds=1, steps=1)
    assert moved(state, shared_state()) == []
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.state_dict().values(), strict=True))
    assert all(p.grad is None and p.is_contiguous() for p in net.parameters())


def test_outputs_of_any_shape_and_own_steps():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return {"a": (self.conv(x), torch.ones(1, dtype=torch.long)), "b": None}

    calls = []

    def step(module, inputs):
        calls.append(1)
        return module(*inputs)["a"][0].mean()

    x = [torch.randn(1, 3, 8, 8)]
    assert measure_memory_format(Two(), x, rounds=1, steps=1).best
    assert measure_memory_format(Two(), x, rounds=1, steps=1, step=step).best
    assert len(calls) == 8  # two turns of two formats, each with a step to get used to it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounds": 0}, "rounds=0; accepted is a whole number"),
        ({"device": "gpu"}, "device='gpu' is no device that torch knows; pass 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": 0.5}, "device=0.5 is no device that torch knows"),
        ({"steps": 1.5}, "steps=1.5; accepted is a whole number"),
        ({"margin": 1.0}, "margin=1.0; accepted is a share"),
        ({"module": nn.Linear(2, 2)}, "Linear has no weights of four or five dimensions"),
    ],
)
def test_impossible_values_are_refused(arguments, message):
    arguments = {"module": nn.Conv2d(3, 4, 3), "inputs": [torch.randn(1, 3, 8, 8)], **arguments}
    with pytest.raises(ValueError, match=message):
        measure_memory_format(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": None}, "module=None; accepted is a torch.nn.Module"),
        ({"step": 3}, "step=3 cannot be called; accepted is a function, or None"),
        ({"context": 3}, "context=3 cannot be called"),
        ({"inputs": torch.randn(1, 3, 8, 8)}, "inputs is a Tensor; accepted is a tuple of positional inputs"),
    ],
)
def test_wrong_types_are_refused(arguments, message):
    arguments = {"module": nn.Conv2d(3, 4, 3), "inputs": [torch.randn(1, 3, 8, 8)], **arguments}
    with pytest.raises(TypeError, match=message):
        measure_memory_format(**arguments)


def test_the_device_may_be_a_name():
    found = measure_memory_format(nn.Conv2d(3, 4, 3), [torch.randn(1, 3, 8, 8)], device="cpu", rounds=1, steps=1)
    assert min(found.seconds.values()) > 0


def test_an_unknown_format_is_refused():
    with pytest.raises(TypeError, match=r"module=None; accepted is a torch.nn.Module"):
        set_memory_format(None, "channels_last")
    with pytest.raises(ValueError, match="memory_format='nhwc'; accepted are 'contiguous' and 'channels_last'"):
        set_memory_format(nn.Conv2d(3, 4, 3), "nhwc")
