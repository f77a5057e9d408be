"""What keeps an autograd graph alive after the step, and what only seems to."""

import torch
import torchmetrics
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


class Error(torchmetrics.MeanSquaredError):
    """A loss that is a metric, and keeps a graph of its own."""

    def forward(self, *args):
        self.kept = super().forward(*args)
        return self.kept


def test_the_latest_result_that_a_metric_keeps_by_itself_is_not_a_kept_graph():
    metric = Error()
    retention = Retention(nn.Sequential(metric))
    for _ in range(2):
        metric(torch.ones(2, requires_grad=True), torch.zeros(2))
        retention.measure()
    assert metric._forward_cache.grad_fn is not None, "it holds a graph like any other"
    assert [part.name for part in retention.find(Sources([]))] == ["0.kept"]
