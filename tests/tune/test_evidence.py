"""An epoch is put together from its steps, its border and its validations."""

import math

import pytest

from lightning_turbo.measure import new_row
from lightning_turbo.tune.evidence import Comparison, epoch_by_sweep, epoch_parts


def row(step, *, batches=10, borders=(), validations=(), each=0.0):
    rounds = [{"sweep": n, "process": 0, "seconds": 5 * step, "steps": 5} for n in range(2)]
    numbers = {"facts": {"batches": batches, "validations": each}, "borders": borders, "validations": validations}
    return {**new_row(), "status": "ok", "rounds": rounds, "numbers": numbers}


@pytest.mark.parametrize(("found", "seconds"), [
    (row(0.1), 1.0),
    (row(0.1, borders=[0.5, 0.7, 9.0]), 9 * 0.1 + 0.7),
    (row(0.1, borders=[0.5], validations=[2.0, 3.0], each=1.0), 9 * 0.1 + 0.5 + 2.5),
    (row(0.1, validations=[2.0], each=4.0), 1.0 + 8.0),
    (row(0.1, validations=[2.0], each=0.5), 1.0 + 1.0),
    (row(0.1, batches=None, borders=[0.5]), 0.1),
])  # fmt: skip
def test_the_seconds_of_an_epoch(found, seconds):
    assert epoch_by_sweep(found) == pytest.approx({0: seconds, 1: seconds})
    assert (epoch_parts(found) is None) == (seconds == 0.1)


def test_the_factor_of_an_epoch_has_that_of_a_step_beside_it():
    comparison = Comparison()
    for _ in range(2):
        comparison.add(row(0.05, borders=[0.1]), row(0.1, borders=[0.1]))
    assert comparison.ratio == pytest.approx((9 * 0.05 + 0.1) / 1.0)
    assert comparison.step_ratio == pytest.approx(0.5)
    assert str(comparison) == "1.82 times as fast (1.82 to 1.82; a step 2.00)"
    only = Comparison()
    only.add(row(0.05, borders=[0.1]), row(0.1, borders=[0.1]), steps_only=True)
    assert only.logs == pytest.approx([math.log(0.5)])
    assert str(only) == "2.00 times as fast (in one process)"
