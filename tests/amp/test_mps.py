"""Differences on MPS, tested without a Mac: with fake tensors of that device and the limits of its kernels."""

import types

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_turbo import ApexAMP, ApexGradScaler

HALVES = (torch.float16, torch.bfloat16)
MAKES_NONE = pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="torch 2.6 cannot create these")
ASKS_MACOS = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="before torch 2.9, autocast checks the version of macOS"
)


class AsOnAMac(TorchDispatchMode):
    """MPS has no float64, and its overflow check must not get half gradients."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, out)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "mps":
                assert tensor.dtype is not torch.float64
                assert tensor.dtype not in HALVES or "non_finite" not in str(func)
        return out


@MAKES_NONE
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_on_mps_are_unscaled_and_the_host_decides_on_a_skip(dtype, fused):
    with FakeTensorMode(), AsOnAMac(), torch.no_grad():
        weight = nn.Parameter(torch.ones(2, device="mps", dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
        scaler = ApexGradScaler()
        assert scaler.scale(torch.ones((), device="mps", dtype=dtype)).dtype is torch.float32
        weight.grad = torch.ones_like(weight)
        with scaler.backward([optimizer], unscale=False):
            pass
        scaler.check(optimizer)
        scaler.settle()
        with pytest.raises(DataDependentOutputException):  # a tensor without data cannot decide whether to skip
            scaler.step(optimizer)


@pytest.mark.parametrize("level", [pytest.param("O1", marks=ASKS_MACOS), "O2", "O3"])
def test_levels_on_mps_cast_as_autocast_and_need_no_loss_scale(level):
    module, plugin = pl.LightningModule(), ApexAMP(level)
    module.net = nn.Linear(2, 2)
    module.trainer = types.SimpleNamespace(strategy=types.SimpleNamespace(root_device=torch.device("mps")))
    plugin.convert_module(module)
    assert plugin.loss_scale == 1.0
    with plugin.forward_context():
        assert torch.is_autocast_enabled("mps") is (level == "O1")
        assert level != "O1" or torch.get_autocast_dtype("mps") is torch.bfloat16
        seen = []
        module.net.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("mps")))
        module.net(torch.ones(1, 2))
    assert seen == [level == "O1"]
    plugin.teardown()
    assert module.net.weight.dtype is torch.float32
