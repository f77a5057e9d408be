import math
import random
import statistics

import pytest

from lightning_turbo.bench.stats import (
    FEWEST_PROCESSES,
    Summary,
    figure,
    interval,
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


def of_processes(logs, rounds=1):
    """A case with one quotient a process, repeated, and the case of a second a step that it is divided by."""
    case = row(*[math.exp(value) for value in logs for _ in range(rounds)], steps=1)
    for part in case["rounds"]:
        part["process"] = part["sweep"] // rounds
    return case, row(*[1.0] * len(case["rounds"]), steps=1)


@pytest.mark.parametrize(("processes", "quantile"), [(6, 2.571), (9, 2.306), (12, 2.201), (31, 2.042)])
def test_interval_is_that_of_student(processes, quantile):
    logs = [0.01 * n for n in range(processes)]
    reach = quantile * statistics.stdev(logs) / math.sqrt(processes)
    low, high = interval(*of_processes(logs))
    assert math.log(low) == pytest.approx(statistics.fmean(logs) - reach, abs=1e-4)
    assert math.log(high) == pytest.approx(statistics.fmean(logs) + reach, abs=1e-4)


def test_rounds_of_one_process_are_no_further_evidence():
    logs = [0.0, 0.02, -0.01, 0.03, 0.01, -0.02, 0.0]
    assert interval(*of_processes(logs, rounds=9)) == pytest.approx(interval(*of_processes(logs)))
    assert interval(*of_processes(logs[: FEWEST_PROCESSES - 1], rounds=9)) is None


def test_interval_holds_the_true_ratio_in_about_95_of_100_runs():
    draw = random.Random(0)
    hits = 0
    for _ in range(1000):
        low, high = interval(*of_processes([draw.gauss(0.0, 0.03) for _ in range(8)]))
        hits += low <= 1.0 <= high
    assert 925 <= hits <= 975


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
