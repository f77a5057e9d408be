"""How bytes and time are counted."""

import pytest
import torch
from torch import nn

from lightning_turbo.demo.history import RunHistory, training_bytes


def test_bytes_of_a_plain_model():
    model = nn.Linear(10, 4)  # 44 weights of 4 bytes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert training_bytes(model.parameters(), [optimizer]) == {"weights": 176, "gradients": 0, "optimizer_state": 0}
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    assert training_bytes(model.parameters(), [optimizer]) == {"weights": 176, "gradients": 176, "optimizer_state": 176}


def test_bytes_of_masters_count_as_weights_and_shared_storage_counts_once():
    half = nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
    master = nn.Parameter(torch.zeros(100))
    master.grad = torch.zeros(100)
    optimizer = torch.optim.SGD([master], lr=0.1)
    found = training_bytes([half, half, half.detach()], [optimizer])
    assert found == {"weights": 600, "gradients": 400, "optimizer_state": 0}


@pytest.mark.parametrize(("seconds", "median"), [([], None), ([9.0], 9.0), ([9.0, 2.0, 4.0, 3.0], 3.0)])
def test_the_first_epoch_is_left_out_of_the_median(seconds, median):
    history = RunHistory(samples=100)
    history.epoch_seconds = seconds
    assert history.seconds_per_epoch == median
    assert history.samples_per_second == (pytest.approx(100 / median) if median else None)
