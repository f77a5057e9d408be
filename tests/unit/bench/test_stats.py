import random
import statistics

import pytest

from lightning_turbo.bench.stats import (
    Summary,
    figure,
    median_interval,
    ratio,
    step_seconds,
    summarise,
    three_digits,
    throughput,
)


def row(*seconds, steps=2, samples=0, sweeps=None, peak=None, **numbers):
    sweeps = sweeps or range(len(seconds))
    rounds = [
        {"sweep": w, "seconds": s, "steps": steps, "samples": samples} for w, s in zip(sweeps, seconds, strict=True)
    ]
    return {"rounds": rounds, "peak_bytes": peak, "numbers": numbers}


@pytest.mark.parametrize(
    ("count", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (20, 6, 15), (24, 7, 18), (100, 40, 61)]
)
def test_the_interval_of_a_median_is_that_of_the_tables(count, low, high):
    values = list(range(count, 0, -1))
    assert median_interval(values) == (low, high)


def test_the_interval_of_a_median_holds_it_as_often_as_it_says():
    generator = random.Random(0)
    draws = [[generator.gauss(3.0, 1.0) for _ in range(24)] for _ in range(2000)]
    hits = sum(low <= 3.0 <= high for low, high in map(median_interval, draws))
    assert 0.94 < hits / len(draws) < 0.99


def test_too_few_values_have_no_interval():
    with pytest.raises(ValueError, match="5 values are too few for an interval of 95 %; give six or more"):
        median_interval([1.0, 2.0, 3.0, 4.0, 5.0])


def test_median_and_quartiles_are_those_of_a_naive_count():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert summarise(values) == Summary(3.0, 2.0, 4.0, 5)
    assert summarise([7.0]) == Summary(7.0, 7.0, 7.0, 1)
    assert summarise([]) is None
    assert summarise([1.0, 2.0]).median == statistics.median([1.0, 2.0])


def test_seconds_are_those_of_a_step():
    assert step_seconds(row(2.0, 4.0, 6.0)).median == 2.0
    assert step_seconds(row()) is None


def test_throughput_counts_samples():
    assert throughput(row(2.0, 4.0, samples=8)) == pytest.approx((8 / 2 + 8 / 4) / 2)
    assert throughput(row(2.0)) is None


def test_a_drift_of_the_machine_cancels_in_the_ratio():
    # The machine gets three times slower; the case stays at 1.5 times the other, pair by pair.
    drift = [1.0, 1.5, 2.0, 2.5, 3.0]
    other, case = row(*drift), row(*(1.5 * d for d in drift))
    value = ratio(case, other)
    assert value.median == pytest.approx(1.5)
    assert value.low == pytest.approx(value.high)


def test_only_rounds_of_the_same_sweep_are_paired():
    value = ratio(row(2.0, 3.0, sweeps=[0, 2]), row(1.0, 1.0, 1.0, sweeps=[0, 1, 3]))
    assert value == Summary(2.0, 2.0, 2.0, 1)
    assert ratio(row(1.0, sweeps=[0]), row(1.0, sweeps=[1])) is None


def test_ratio_of_other_quantities():
    assert ratio(row(peak=30), row(peak=60), "peak_bytes").median == 0.5
    assert ratio(row(loss=1.0), row(loss=4.0), "loss").median == 0.25
    assert ratio(row(), row(peak=60), "peak_bytes") is None
    assert ratio(row(peak=1), row(peak=0), "peak_bytes") is None


def test_figure_of_a_number_that_is_missing_or_not_finite():
    assert figure(row(), "loss") is None
    assert figure(row(loss=None), "loss") is None


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (1.2345, "1.23"), (12.345, "12.3"), (123.45, "123"), (12345.6, "12346")]
)
def test_numbers_are_written_without_exponents(value, text):
    assert three_digits(value) == text
