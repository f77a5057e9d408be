"""The time of an epoch is computed from its steps, its boundary and its validations."""

import math

import pytest

from lightning_turbo.measure import new_row
from lightning_turbo.tune.evidence import Comparison, Configuration, epoch_by_sweep


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
])  # fmt: skip
def test_the_seconds_of_an_epoch(found, seconds):
    assert epoch_by_sweep(found, 10) == pytest.approx({0: seconds, 1: seconds})


@pytest.mark.parametrize(("configuration", "name"), [
    (Configuration(), "default"),
    (Configuration(("lean", "fused")), "lean + fused"),
    (Configuration(mode="loader"), "loader"),
    (Configuration(("lean",), mode="epoch"), "epoch with lean"),
    (Configuration(batch_size=64), "batch size 64"),
])  # fmt: skip
def test_a_configuration_is_named_by_its_changes(configuration, name):
    assert str(configuration) == name


def test_the_factor_of_an_epoch_is_shown_with_that_of_a_step():
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


UNKNOWN = {"batches": None, "borders": []}


def test_epochs_of_variable_length_are_compared_at_the_length_of_the_unchanged_script():
    comparison = Comparison()
    comparison.add(row(0.1, batches=30, borders=[4.0]), row(0.1, batches=20, borders=[4.0]))
    assert comparison.ratio == pytest.approx(1.0), "more batches do not make a setting slower"
    comparison.add(row(0.05, batches=10, borders=[4.0]), row(0.1, batches=20, borders=[4.0]))
    assert math.exp(comparison.logs[1]) == pytest.approx((19 * 0.05 + 4.0) / (19 * 0.1 + 4.0))


@pytest.mark.parametrize("unknown", [(0,), (1,), (0, 1)], ids=["with it", "without it", "both"])
@pytest.mark.parametrize("at", [0, 1])
def test_an_epoch_time_is_not_compared_with_a_step_time(unknown, at):
    """A generator has no length, and not every process has reached its end."""
    comparison = Comparison()
    for pair in range(2):
        sides = [row(seconds, **UNKNOWN) if pair == at and side in unknown else row(seconds, borders=[4.0])
                 for side, seconds in enumerate((0.05, 0.1))]  # fmt: skip
        comparison.add(*sides)
    assert comparison.logs == pytest.approx([math.log(0.5)] * 2), "only of steps, in all pairs"
    assert str(comparison) == "a step 2.00 times as fast (2.00 to 2.00)"


def test_a_failed_process_does_not_change_the_others():
    comparison = Comparison()
    for below in (row(0.1, borders=[0.1]), {**new_row(), "status": "failed"}, row(0.1, borders=[0.1])):
        comparison.add(row(0.05, borders=[0.1]), below)
    assert len(comparison.logs) == len(comparison.of_steps) == 2
    assert comparison.of_epochs
