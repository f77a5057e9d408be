"""O1's cast lists on CUDA, where those of autocast differ from the CPU."""

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


@pytest.mark.parametrize(("call", "expected"), [
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
    (lambda: F.linear(torch.ones(4, 4), torch.ones(4, 4)), torch.float32),  # not changed on the CPU
])  # fmt: skip
def test_a_function_returns_apexs_dtype(call, expected):
    amp.initialize(nn.Linear(2, 2).cuda(), opt_level="O1", verbosity=0)
    assert call().dtype is expected
