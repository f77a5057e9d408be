"""Medians, quartiles, paired ratios and confidence intervals."""

import math

import pytest

from benchmarks.figures import Summary, interval, ratio, step_seconds, summarize


def row(*seconds, steps=2, sweeps=None):
    """A row with rounds of these seconds, each in its own process."""
    sweeps = sweeps or range(len(seconds))
    parts = zip(sweeps, seconds, strict=True)
    return {"rounds": [{"sweep": w, "seconds": s, "steps": steps, "process": w} for w, s in parts]}


def test_median_and_quartiles():
    assert summarize([5.0, 1.0, 4.0, 2.0, 3.0]) == Summary(3.0, 2.0, 4.0, 5)
    assert summarize([7.0]) == Summary(7.0, 7.0, 7.0, 1)
    assert summarize([]) is None
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


def test_an_interval_needs_six_processes():
    case, base = row(*[2.0, 2.1, 1.9, 2.0, 2.2, 1.8]), row(*[1.0] * 6)
    low, high = interval(case, base)
    assert low < math.sqrt(4.0) < high
    assert interval(row(*[2.0] * 5), base) is None
