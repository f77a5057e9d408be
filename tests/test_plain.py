"""``plain``: what a checkpoint may hold by classes of other libraries, and still load safely."""

import enum
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch

from lightning_turbo._plain import plain


class Names(str, enum.Enum):
    LOSS = "loss"


class Count(enum.IntEnum):
    TWO = 2


class Share(float):
    pass


class Labeled(torch.Tensor):
    pass


@pytest.mark.parametrize(("given", "expected"), [
    (Names.LOSS, "loss"), (np.array(["dice"])[0], "dice"), (Count.TWO, 2), (np.int64(2), 2), (np.bool_(True), True),
    (np.float32(0.5), 0.5), (Share(0.5), 0.5), (None, None), (True, True), (b"x", b"x"), (math.inf, math.inf),
    ({Names.LOSS: [np.int64(1), (Count.TWO,)]}, {"loss": [1, (2,)]}), (OrderedDict(a=1), OrderedDict(a=1)),
])  # fmt: skip
def test_values_keep_what_they_are_and_lose_the_class_of_a_library(given, expected, tmp_path):
    value = plain(given)
    assert value == expected
    assert type(value) is type(expected)
    torch.save(value, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == expected


@pytest.mark.parametrize("given", [torch.ones(2).as_subclass(Labeled), torch.nn.Parameter(torch.ones(2))])
def test_tensors_are_torchs_own(given):
    value = plain([given])[0]
    assert type(value) is torch.Tensor
    assert not value.requires_grad
    assert value.data_ptr() == given.data_ptr()


def test_a_tensor_and_what_is_unknown_stay_the_same_object():
    tensor, unknown = torch.ones(2), np.ones(2)
    assert plain([tensor])[0] is tensor
    assert plain([unknown])[0] is unknown
