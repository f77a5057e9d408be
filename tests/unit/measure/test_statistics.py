import math
import statistics

import pytest

from lightning_turbo.measure import (
    Summary,
    interval,
    interval_of,
    log_quotients,
    ratio,
    step_seconds,
    summarise,
    three_digits,
)


def row(*seconds, steps=2, sweeps=None, rounds=10**6):
    """A row with these rounds, so many of them in each process."""
    sweeps = sweeps or range(len(seconds))
    parts = zip(sweeps, seconds, strict=True)
    return {"rounds": [{"sweep": w, "seconds": s, "steps": steps, "process": w // rounds} for w, s in parts]}


def of_processes(logs, rounds=1):
    """A row with one quotient a process, repeated, and the row of a second a step that it is divided by."""
    case = row(*[math.exp(value) for value in logs for _ in range(rounds)], steps=1, rounds=rounds)
    return case, row(*[1.0] * len(case["rounds"]), steps=1)


def test_median_and_quartiles_are_those_of_a_naive_count():
    assert summarise([5.0, 1.0, 4.0, 2.0, 3.0]) == Summary(3.0, 2.0, 4.0, 5)
    assert summarise([7.0]) == Summary(7.0, 7.0, 7.0, 1)
    assert summarise([]) is None
    assert step_seconds(row(2.0, 4.0, 6.0)).median == 2.0
    assert step_seconds(row()) is None


def test_a_drift_of_the_machine_cancels_in_the_ratio():
    drift = [1.0, 1.5, 2.0, 2.5, 3.0]
    value = ratio(row(*(1.5 * d for d in drift)), row(*drift))
    assert (value.low, value.median, value.high) == pytest.approx((1.5, 1.5, 1.5))


def test_only_rounds_of_the_same_sweep_are_paired():
    value = ratio(row(2.0, 3.0, sweeps=[0, 2]), row(1.0, 1.0, 1.0, sweeps=[0, 1, 3]))
    assert value == Summary(2.0, 2.0, 2.0, 1)
    assert ratio(row(1.0, sweeps=[0]), row(1.0, sweeps=[1])) is None


@pytest.mark.parametrize(
    ("processes", "quantile"), [(2, 12.706), (4, 3.182), (6, 2.571), (9, 2.306), (12, 2.201), (31, 2.042)]
)
def test_interval_is_that_of_student(processes, quantile):
    logs = [0.01 * n for n in range(processes)]
    reach = quantile * statistics.stdev(logs) / math.sqrt(processes)
    low, high = interval_of(log_quotients(*of_processes(logs)), fewest=2)
    assert math.log(low) == pytest.approx(statistics.fmean(logs) - reach, abs=1e-4)
    assert math.log(high) == pytest.approx(statistics.fmean(logs) + reach, abs=1e-4)


def test_rounds_of_one_process_are_no_further_evidence():
    logs = [0.0, 0.02, -0.01, 0.03, 0.01, -0.02]
    assert interval(*of_processes(logs, rounds=9)) == pytest.approx(interval(*of_processes(logs)))
    assert interval(*of_processes(logs[:5], rounds=9)) is None, "of fewer than six processes"


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (1.2345, "1.23"), (12.345, "12.3"), (123.45, "123"), (12345.6, "12346")]
)
def test_numbers_are_written_without_exponents(value, text):
    assert three_digits(value) == text
