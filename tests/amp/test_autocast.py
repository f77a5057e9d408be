"""The casts of O1: where they start and end. ``test_cast_lists.py`` tests each function."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lightning_turbo import ApexAMP, ApexGradScaler, amp
from lightning_turbo.amp.autocast import FunctionCasts
from lightning_turbo.errors import AmpUsageError
from tests.amp.loops import backward, init, ready


def by_autocast(first, second):
    with torch.autocast("cpu", enabled=False):
        return first @ second


def by_disable_casts(first, second):
    with amp.disable_casts():
        return first @ second


def by_einsum(first, second):  # apex does not cast it
    return torch.einsum("ij,jk->ik", first, second)


@pytest.mark.parametrize("product", [by_autocast, by_disable_casts, by_einsum])
def test_float32_functions_have_float32_gradients_at_O1(product):
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


def test_optimizer_steps_run_without_casts_even_if_the_closure_fails():
    model, optimizer = ready("O1", loss_scale=1.0)
    x, seen = torch.ones(2, 4), []

    def closure():
        optimizer.zero_grad()
        seen.append(model(x).dtype)
        backward(model(x).float().square().mean(), optimizer)

    optimizer.step(closure)
    assert seen == [torch.float32]
    with pytest.raises(KeyError):
        optimizer.step(lambda: {}["fails"])
    assert model(x).dtype is torch.float16


@pytest.mark.parametrize("lists", ["torch", "apex"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_start_and_end_on_a_thread_and_can_be_pickled(lists, dtype):
    for casts in (FunctionCasts("cpu", dtype, lists), pickle.loads(pickle.dumps(FunctionCasts("cpu", dtype, lists)))):
        casts.start()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
        with casts.backward_context():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        casts.stop()
        casts.stop()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with pytest.raises(AmpUsageError, match="cast_lists: expected 'apex'"):
        FunctionCasts("cpu", dtype, "mine")


@pytest.mark.parametrize(("level", "settings"), [
    ("O0", {}), ("O1", {"dtype": torch.float16}), ("O1", {"scaler": ApexGradScaler(8.0)}), ("O2", {}), ("O3", {}),
])  # fmt: skip
def test_a_pickled_plugin_has_the_same_casts(level, settings):
    plugin = ApexAMP(level, **settings)
    other = pickle.loads(pickle.dumps(plugin))
    assert other.opt_level == level
    assert other.half_dtype is plugin.half_dtype
    dtypes = []
    for casts in (plugin.forward_context(), other.forward_context()):
        with casts:
            half = torch.ones(2, 2) @ torch.ones(2, 2)
            dtypes.append((half.dtype, torch.exp(half).dtype, nn.functional.gelu(half).dtype))
    assert dtypes[0] == dtypes[1]
