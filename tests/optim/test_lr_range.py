"""propose_lr_range: the learning rates at which the loss of a range test falls."""

import math

import pytest

from lightning_turbo.optim import propose_lr_range


def test_the_learning_rate_range_is_where_the_loss_falls():
    lrs = [10.0**e for e in range(-6, 3)]
    found = propose_lr_range(lrs, [2.0, 2.0, 1.95, 1.7, 1.3, 1.02, 1.0, 3.0, math.nan])
    assert (found.base_lr, found.max_lr) == (lrs[3], lrs[5])  # 0.1 and 0.9 of the fall from 2 to 1 are reached there
    assert len(found.losses) == 8


@pytest.mark.parametrize(("losses", "message"), [
    ([1.0, 2.0, 3.0, 4.0, 5.0], "losses: expected a fall, got none below the start of 1 from lr=1 to lr=5"),
    ([1.0, 2.0, math.nan, math.inf, 3.0], "losses: expected at least 5 finite ones, got 3"),
    ([1.0], "losses: expected one per learning rate, 5, got 1"),
])  # fmt: skip
def test_a_curve_without_a_fall_is_refused(losses, message):
    with pytest.raises(ValueError, match=message):
        propose_lr_range([1, 2, 3, 4, 5], losses)
