import statistics

import pytest

from lightning_turbo.bench.stats import Summary, figure, ratio, step_seconds, summarise, three_digits, throughput


def row(*seconds, steps=2, samples=0, sweeps=None, peak=None, **numbers):
    sweeps = sweeps or range(len(seconds))
    rounds = [
        {"sweep": w, "seconds": s, "steps": steps, "samples": samples} for w, s in zip(sweeps, seconds, strict=True)
    ]
    return {"rounds": rounds, "peak_bytes": peak, "numbers": numbers}


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
