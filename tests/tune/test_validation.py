"""The projected time of a validation that skips some batches."""

import math
from types import SimpleNamespace

import pytest

from lightning_turbo.measure import RoundTimer
from lightning_turbo.tune import validation
from lightning_turbo.tune.validation import TimedValidation

BATCH = 2.0  # seconds


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when the test advances it."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(validation.time, "perf_counter", lambda: now.seconds)
    return now


class Loop:
    """A validation loop over loaders of these lengths, whose batches take ``BATCH`` seconds each."""

    def __init__(self, clock, lengths):
        self.clock, self.lengths, self._max_batches = clock, lengths, []
        self.trainer = SimpleNamespace(sanity_checking=False)
        self._combined_loader = SimpleNamespace(flattened=[SimpleNamespace(num_workers=0) for _ in lengths])

    def setup_data(self):
        self._max_batches = list(self.lengths)

    def run(self):
        self.setup_data()
        for loader, batches in enumerate(self._max_batches):
            for _ in range(batches):
                self.clock.seconds += BATCH
                self.timed.end_batch(loader)
        return "metrics"


def validate(clock, *lengths):
    loop = Loop(clock, lengths)
    loop.timed = TimedValidation(loop, RoundTimer(lambda event: {}), whole=False)
    assert loop.run() == "metrics"
    return loop.timed


@pytest.mark.parametrize(("lengths", "took", "whole"), [
    ([50], 2 * BATCH, 50 * BATCH),
    ([1], BATCH, BATCH),
    ([50, 10], 4 * BATCH, 60 * BATCH),
    ([math.inf], 2 * BATCH, 2 * BATCH),  # of unknown length
])  # fmt: skip
def test_skipped_validation_batches_are_projected_if_their_number_is_known(clock, lengths, took, whole):
    timed = validate(clock, *lengths)
    assert timed.seconds == [pytest.approx(whole)]
    assert timed.since_step == pytest.approx(took), "what the steps around it exclude"


def test_a_validation_without_batches_does_not_count(clock):
    assert validate(clock, 0).seconds == []
