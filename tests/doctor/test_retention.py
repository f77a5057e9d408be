"""What keeps an autograd graph alive after the step, and what only seems to."""

import torch
from torch import nn

from lightning_turbo.doctor.retention import Retention
from lightning_turbo.doctor.source import Sources


class Own(nn.Linear):
    """Keeps its last output."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def test_a_weight_computed_in_each_forward_pass_is_not_a_kept_graph():
    layer = nn.utils.spectral_norm(Own(2, 2))
    retention = Retention(nn.Sequential(layer))
    for _ in range(2):
        layer(torch.ones(1, 2))
        retention.measure()
    assert layer.weight.grad_fn is not None, "it holds a graph like any other"
    assert [part.name for part in retention.find(Sources([]))] == ["0.last"]
