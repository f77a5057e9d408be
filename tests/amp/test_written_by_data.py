"""Writes through ``.data``, which no version counter shows: calls use the new values, and sums stay exact."""

import copy

import pytest
import torch
from torch import nn

from tests.amp.loops import backward, init, net, sgd

WRITES = {
    "p.data.fill_": lambda p: p.data.fill_(0.5),
    "p.data.copy_": lambda p: p.data.copy_(torch.full_like(p, 0.5)),
    "p.data.mul_": lambda p: p.data.mul_(2.0),
    "p.data = new": lambda p: setattr(p, "data", torch.full_like(p, 0.5)),
    "p.data = changed": lambda p: setattr(p, "data", p.data * 2.0),
    "init": lambda p: nn.init.constant_(p, 0.5),
    "p.add_": lambda p: torch.no_grad()(p.add_)(1.0),
}


def at_start(model, optimizer, x):
    pass


def after_a_step(model, optimizer, x):
    backward(model(x).float().square().mean(), optimizer)
    optimizer.step()


def after_a_forward_pass(model, optimizer, x):
    model(x)


def between_evaluations(model, optimizer, x):
    with torch.no_grad():
        model(x)


def between_inferences(model, optimizer, x):
    with torch.inference_mode():
        model(x)


MOMENTS = (at_start, after_a_step, after_a_forward_pass, between_evaluations, between_inferences)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("when", MOMENTS)
def test_a_call_uses_weights_written_through_data(when, write, level):
    model, x = net(), torch.ones(1, 4)
    optimizer = sgd(model)
    init(model, optimizer, level, loss_scale=1.0)
    when(model, optimizer, x)
    for param in model.parameters():
        WRITES[write](param)
    expected = copy.deepcopy(model).half()(x.half()).float()  # the copy has no hooks
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(model(x).float(), expected)


class Codebook(nn.Module):
    """Keeps moving averages, as many vector quantization codebooks do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.ones(4))

    def forward(self, x):
        if self.training:
            self.count.data.add_(1)
            self.average.data.mul_(0.999).add_(x.detach().mean(0).to(self.average.dtype), alpha=0.001)
        return x + self.average


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_buffers_written_through_data_accumulate_exactly(level):
    model = nn.Sequential(Codebook(), nn.Linear(4, 2))
    init(model, sgd(model), level, dtype=torch.bfloat16)
    for _ in range(300):
        model(torch.full((2, 4), 2.0))
    assert model[0].count == 300
    assert abs(model[0].average.mean() - (2 - 0.999**300)) < 0.01
