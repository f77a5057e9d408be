import math
import statistics

import pytest

from lightning_turbo.measure import interval_of, log_quotients


def row(*seconds, steps=2, sweeps=None, rounds=10**6):
    """Return a row with these rounds, divided among processes."""
    sweeps = sweeps or range(len(seconds))
    parts = zip(sweeps, seconds, strict=True)
    return {"rounds": [{"sweep": w, "seconds": s, "steps": steps, "process": w // rounds} for w, s in parts]}


def of_processes(logs, rounds=1):
    """A row with one quotient a process, repeated, and the row of a second a step that it is divided by."""
    case = row(*[math.exp(value) for value in logs for _ in range(rounds)], steps=1, rounds=rounds)
    return case, row(*[1.0] * len(case["rounds"]), steps=1)


@pytest.mark.parametrize(
    ("processes", "quantile"), [(2, 12.706), (4, 3.182), (6, 2.571), (9, 2.306), (12, 2.201), (31, 2.042)]
)
def test_the_confidence_interval_is_that_of_student(processes, quantile):
    logs = [0.01 * n for n in range(processes)]
    reach = quantile * statistics.stdev(logs) / math.sqrt(processes)
    low, high = interval_of(log_quotients(*of_processes(logs)))
    assert math.log(low) == pytest.approx(statistics.fmean(logs) - reach, abs=1e-4)
    assert math.log(high) == pytest.approx(statistics.fmean(logs) + reach, abs=1e-4)


def test_rounds_of_one_process_are_not_independent():
    logs = [0.0, 0.02, -0.01, 0.03, 0.01, -0.02]
    assert log_quotients(*of_processes(logs, rounds=9)) == pytest.approx(logs)
    assert interval_of(logs[:1]) is None


def test_a_ratio_of_separate_measurements_has_the_spread_of_both():
    logs, others = [0.10, 0.12, 0.14], [0.0, 0.03, -0.03, 0.0]
    # Variances 0.0004 of three and 0.0006 of four; 4.303 is the quantile for two degrees of freedom.
    reach = 4.303 * math.sqrt(0.0004 / 3 + 0.0006 / 4)
    low, high = interval_of(logs, others)
    assert (math.log(low), math.log(high)) == (pytest.approx(0.12 - reach), pytest.approx(0.12 + reach))
    assert interval_of(logs, [0.0]) is None


def test_ratios_may_use_other_times_than_those_of_steps():
    double = {"rounds": row(2.0, 4.0)["rounds"]}
    (log,) = log_quotients(double, row(1.0, 2.0), lambda each: {0: 3.0 if each is double else 1.0, 1: 1.0})
    assert log == pytest.approx(math.log(3.0) / 2)
