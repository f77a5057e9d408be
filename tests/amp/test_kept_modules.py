"""Modules that compute in float32 at O2 and O3 by default, because half precision breaks them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_turbo import amp
from lightning_turbo.amp.kept_modules import needs_float32
from tests.amp.loops import backward


def start(net, level, dtype):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return amp.initialize(net, optimizer, opt_level=level, dtype=dtype, loss_scale=1.0, verbosity=0)


def orthogonal(kind):
    return lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map=kind)


WEIGHTS = {
    **{kind: orthogonal(kind) for kind in ("matrix_exp", "cayley", "householder")},
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "older spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_parametrized_weight_trains_as_in_float32(kind, level, dtype):
    ends = []
    for used in ("O0", level):
        torch.manual_seed(0)
        net = nn.Sequential(WEIGHTS[kind](), nn.Tanh(), nn.Linear(8, 1))
        net, optimizer = start(net, used, dtype)
        for x in torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            backward((net(x) - x[:, :1]).square().mean(), optimizer)
            optimizer.step()
        amp.shutdown()
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert ends[1].isfinite().all()
    torch.testing.assert_close(ends[1], ends[0], rtol=0.05, atol=0.02)
    if kind in ("matrix_exp", "cayley", "householder"):
        weight = net[0].weight
        torch.testing.assert_close(weight @ weight.T, torch.eye(8), rtol=1e-4, atol=1e-4)


def test_modules_of_other_packages_are_recognized_by_name():
    for package, name in (("monai.networks.blocks.warp", "Warp"), ("timm.layers.blur_pool", "BlurPool2d")):
        assert needs_float32(type(name, (nn.Module,), {"__module__": package})())
        assert not needs_float32(type(name, (nn.Module,), {"__module__": "mine"})())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_displacement_fields_are_added_to_positions_in_float32(level):
    monai = pytest.importorskip("monai.networks.blocks.warp")

    class Registration(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Conv2d(2, 2, 3, padding=1)
            with pytest.warns(UserWarning, match="native grid_sample"):
                self.warp = monai.Warp()

        def forward(self, moving, fixed):
            field = self.net(torch.cat([moving, fixed], 1))
            return self.warp(moving, field), field

    net = Registration()
    y, x = torch.meshgrid(torch.arange(160.0), torch.arange(160.0), indexing="ij")
    moving, fixed = torch.sin(x)[None, None], torch.cos(y)[None, None]
    wanted = net(moving, fixed)[0]
    net, _ = start(net, level, torch.bfloat16)
    error = (net(moving, fixed)[0] - wanted).abs().max()
    assert error < 0.05  # positions beyond 128 have no fractions in bfloat16
