"""O1's lists on CUDA, where autocast's own lists are others than on a CPU."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from lightning_turbo import amp

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


def half(*shape):
    return torch.rand(*shape, device="cuda", dtype=torch.float16)


def single(*shape):
    return torch.rand(*shape, device="cuda")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: F.gelu(half(4)), torch.float32),
        (lambda: F.layer_norm(half(4, 4), (4,)), torch.float32),
        (lambda: F.softmax(half(4, 4), -1), torch.float32),
        (lambda: torch.softmax(half(4, 4), -1), torch.float16),
        (lambda: half(4, 4).log_softmax(-1), torch.float16),
        (lambda: torch.log1p(half(4)), torch.float16),
        (lambda: F.huber_loss(half(4), half(4)), torch.float16),
        (lambda: torch.einsum("ij,jk->ik", single(4, 4), single(4, 4)), torch.float32),
        (lambda: torch.einsum("ij,jk->ik", single(4, 4), half(4, 4)), torch.float16),
        (lambda: F.linear(single(4, 4).double(), single(4, 4).double()), torch.float16),
        (lambda: single(4, 4) @ single(4, 4), torch.float16),
        (lambda: F.linear(torch.ones(4, 4), torch.ones(4, 4)), torch.float32),  # on the CPU: left alone
    ],
)
def test_a_function_returns_apexs_dtype(call, expected):
    amp.initialize(nn.Linear(2, 2).cuda(), opt_level="O1", verbosity=0)
    assert call().dtype is expected


def test_attention_keeps_its_weights_in_float32():
    layer = nn.MultiheadAttention(8, 2).cuda()
    amp.initialize(layer, opt_level="O1", verbosity=0)
    x = single(3, 2, 8)
    out, weights = layer(x, x, x)
    assert (out.dtype, weights.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_no_gradient(level, reentrant):
    grads = []
    for again in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)))
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        inner = model[1]
        if again:
            plain = inner.forward
            inner.forward = lambda x, f=plain: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=reentrant)
        loss = model(torch.ones(4, 8, device="cuda")).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        grads.append([p.grad.clone() for p in amp.master_params(optimizer)])
        amp.shutdown()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
