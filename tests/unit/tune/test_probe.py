"""What is found out about a script before anything is measured."""

import pytest
from torch import nn

from lightning_turbo.tune.probe import describe_network


@pytest.mark.parametrize(("layers", "convolutions", "norms"), [
    ([nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)], True, True),
    ([nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4)], True, True),
    ([nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4)], False, True),
    ([nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)], True, False),
    ([nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)], True, False),  # which keeps a part of the bias
    ([nn.Linear(1, 4), nn.BatchNorm1d(4)], False, False),
])  # fmt: skip
def test_a_network_has_what_a_candidate_changes(layers, convolutions, norms):
    assert describe_network(nn.Sequential(*layers)) == {"convolutions": convolutions, "norms": norms}
