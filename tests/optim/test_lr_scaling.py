"""The factor of the learning rate for a larger batch."""

import pytest

from lightning_turbo.optim import lr_factor


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_factor_follows_the_rule(rule, factor):
    assert lr_factor(rule, 1024, 256) == factor
    assert lr_factor(rule, 256, 1024) == 1 / factor


@pytest.mark.parametrize(("arguments", "message"), [
    (("cubic", 1, 1), "rule: expected 'linear' or 'sqrt', got 'cubic'"),
    (("linear", 0, 1), "^batch_size: expected an integer of 1 or more, got 0"),
    (("linear", 1, 1.5), "^base_batch_size: expected an integer of 1 or more, got 1.5"),
])  # fmt: skip
def test_impossible_values_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        lr_factor(*arguments)
