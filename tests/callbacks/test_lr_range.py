"""lr_range under a Trainer."""

import copy
import math

import pytest
import torch

from lightning_turbo import lr_range
from tests.convolutions import Net
from tests.trainers import quiet_trainer


@pytest.mark.usefixtures("_no_tqdm_monitor")
def test_lr_range_proposes_bounds_and_does_not_change_the_model():
    model = Net(n=1600, batch_size=20)
    before = copy.deepcopy(model.state_dict())
    found = lr_range(quiet_trainer(max_epochs=1), model, min_lr=1e-5, max_lr=10.0, num_training=60)
    assert 1e-5 < found.base_lr < found.max_lr < 10.0
    assert found.losses[found.lrs.index(found.base_lr)] > found.losses[found.lrs.index(found.max_lr)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.lr == 0.1


@pytest.mark.parametrize(("make", "message"), [
    (lambda: lr_range(quiet_trainer(), Net(), max_lr=math.inf), r"expected 0 < min_lr < max_lr, got .*inf"),
    (lambda: lr_range(quiet_trainer(fast_dev_run=True), Net()), "expected a Trainer without fast_dev_run"),
    (lambda: lr_range(3, Net()), r"lr_range\(trainer\): expected a Trainer, got 3"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Skipping learning rate finder")
def test_impossible_values_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
