"""What is found out about a script before anything is measured."""

import pytest
import torch
from torch import nn

from lightning_turbo.tune.describe import describe_network
from lightning_turbo.tune.pipeline import _in_words


@pytest.mark.parametrize(("layers", "convolutions", "norms"), [
    ([nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)], True, True),
    ([nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4)], True, True),
    ([nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4)], False, True),
    ([nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)], True, False),
    ([nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)], True, False),  # which keeps a part of the bias
    ([nn.Linear(1, 4), nn.BatchNorm1d(4)], False, False),
])  # fmt: skip
def test_a_network_has_what_a_candidate_changes(layers, convolutions, norms):
    found = describe_network(nn.Sequential(*layers))
    assert (found["convolutions"], found["norms"], found["float32 weights"]) == (convolutions, norms, True)


@pytest.mark.parametrize(("dtype", "told"), [(torch.float64, False), (torch.bfloat16, True)])
def test_one_weight_in_float64_is_enough(dtype, told):
    network = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1).to(dtype))
    assert describe_network(network)["float32 weights"] == told


@pytest.mark.parametrize(("times", "words"), [
    # 500 samples for each process, 10 ms each to load and to write; 6 ms less in each epoch.
    ((0.16, 0.04, 0.04), "packing takes 5 s (20 samples: 8 ms each to load, 2 packed) and pays from epoch 2 on"),
    ((0.16, 0.16, 0.08), "packing takes 8 s (20 samples: 8 ms each to load, 4 packed) and pays from epoch 5 on"),
    ((0.16, 0.16, 0.16), "packing takes 8 s (20 samples: 8 ms each to load, 8 packed) and saves nothing"),
])  # fmt: skip
def test_when_packing_pays(times, words):
    assert _in_words(500, 20, *times).startswith(words)
