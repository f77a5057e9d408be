"""Memory formats: the same values in another memory order."""

import re

import pytest
import torch
from torch import nn

from lightning_turbo.nn import set_memory_format


def network(kind=nn.Conv2d, norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return nn.Sequential(kind(3, 4, 3), norm(4), nn.Dropout(0.2), nn.ReLU(), kind(4, 2, 3))


@pytest.mark.parametrize(("kind", "norm", "shape", "last"), [
    (nn.Conv2d, nn.BatchNorm2d, (2, 3, 8, 8), torch.channels_last),
    (nn.Conv3d, nn.BatchNorm3d, (2, 3, 8, 8, 8), torch.channels_last_3d),
])  # fmt: skip
def test_the_memory_format_changes_and_the_results_do_not(kind, norm, shape, last):
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
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # another kernel sums in another order
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert set_memory_format(net, "contiguous") == 2
    assert net[0].weight.is_contiguous()


@pytest.mark.parametrize("given", [torch.channels_last, torch.channels_last_3d, torch.contiguous_format])
def test_torch_memory_formats_are_accepted(given):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(0), nn.Unflatten(0, (1, 4, 1, 1, 1)), nn.Conv3d(4, 4, 2))
    set_memory_format(net, given)
    last = given is not torch.contiguous_format
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last) == last
    assert net[3].weight.is_contiguous(memory_format=torch.channels_last_3d) == last


@pytest.mark.parametrize("wrong", ["nhwc", "measure", None, torch.preserve_format, []])
def test_impossible_values_are_refused(wrong):
    message = (
        f"memory_format: expected 'channels_last' or 'contiguous', got {re.escape(repr(wrong))}.* lightning-turbo tune"
    )
    with pytest.raises(ValueError, match=message):
        set_memory_format(nn.Conv2d(3, 4, 3), wrong)
    with pytest.raises(TypeError, match="module: expected a torch"):
        set_memory_format(None, "contiguous")
