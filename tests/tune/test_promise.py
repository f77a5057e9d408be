"""How much of a script is trained for a promise, and what the pairs of processes then say."""

import math
import re

import pytest

from lightning_turbo.measure import new_row
from lightning_turbo.tune.candidates import Look
from lightning_turbo.tune.promise import FEWEST, MOST, Promise, Stretch, describe_epoch, plan, ratio_of, screening


def look(step=0.01, batches=100, seconds=1.0, period=None, **more):
    return Look(phases={"forward": step}, batches=batches, period=period or batches, seconds=seconds, **more)


UNKNOWN = Look(phases={"forward": 0.01})


@pytest.mark.parametrize(("found", "steps", "turns"), [
    (look(), 100, 4),  # one epoch of a second
    (look(0.01, 20, 0.2), 120, 4),  # six epochs
    (look(0.01, 20, 2.0), 20, 4),  # one, whose validation takes most of it
    (look(0.01, 1000, 10.0), 120, 4),  # a part
    (look(2.0, 1000, 2000.0), 1, 1),
    (look(0.01, 1000, 10.0, accumulate=50), 100, 4),
    (UNKNOWN, 120, 4),
])  # fmt: skip
def test_a_screening_takes_a_second_and_short_epochs_whole(found, steps, turns):
    stretch = screening(found)
    assert (stretch.steps, stretch.turns) == (steps, turns)


@pytest.mark.parametrize(("found", "seconds", "steps", "pairs", "is_whole"), [
    (look(), 300.0, 300, MOST, True),  # three epochs of a second in each process
    (look(), 80.0, 300, 5, True),
    (look(), 60.0, 200, 4, True),  # two fit
    (look(0.01, 2000, 20.0), 300.0, 2000, 6, True),
    (look(0.01, 2000, 20.0), 100.0, 750, FEWEST, False),
    (look(0.01, 2000, 20.0), 10.0, 100, FEWEST, False),  # as many as a promise needs at least
    (look(10.0, 20, 200.0), 10.0, 20, FEWEST, True),  # the whole epoch has fewer
    (look(0.01, 2000, 20.0, accumulate=8), 100.0, 752, FEWEST, False),
    (look(0.01, 1000, 30.0, period=3000), 500.0, 3000, 7, True),  # validates each third epoch
    (UNKNOWN, 100.0, 750, FEWEST, False),
])  # fmt: skip
def test_the_promise_is_of_whole_epochs_if_there_is_time_for_enough_pairs(found, seconds, steps, pairs, is_whole):
    stretch = plan(found, seconds, 5.0)
    assert (stretch.steps, stretch.pairs, stretch.is_whole) == (steps, pairs, is_whole)
    assert sum(stretch.rounds) == steps
    assert max(stretch.rounds) - min(stretch.rounds) <= 1
    assert max(stretch.rounds) * found.pace < 1.6 or stretch.turns == steps


@pytest.mark.parametrize(("found", "words"), [
    (look(is_seen=True), r"A whole epoch with its validation takes about 1\.00 s \(100 batches\): .* whole epochs\."),
    (look(0.01, 2000, 20.0, is_seen=True), r"20\.0 s .* of 750 steps, as 4 minutes .* whole epochs need --minutes 7\."),
    (look(0.01, 2000, 20.0), "A whole epoch without its validation, which was not seen, takes about 20.0 s"),
    (look(10.0, 20, 200.0), r"4 minutes may not be enough to promise anything; whole epochs need --minutes 55\."),
    (look(10.0, 2000, 2e4), "promise anything; stretches of 100 equal steps need --minutes 268, whole epochs need"),
    (UNKNOWN, "does not know how many batches an epoch has, and none ended so far: .* stretches of 750 steps"),
])  # fmt: skip
def test_at_the_start_it_is_said_what_a_whole_epoch_needs(found, words):
    text = describe_epoch(found, plan(found, 100.0, 5.0), 4.0, 5.0)
    assert re.search(words, text), text


def row(*seconds, skip=0):
    rounds = [{"sweep": n + skip, "process": 0, "seconds": each, "steps": 1} for n, each in enumerate(seconds)]
    return {**new_row(), "status": "ok", "rounds": rounds}


def test_two_processes_are_compared_over_the_turns_that_both_took():
    assert ratio_of(row(1.0, 3.0), row(4.0, 4.0)) == pytest.approx(math.log(0.5))
    assert ratio_of(row(1.0, 3.0), row(3.0, skip=1)) == pytest.approx(0.0)
    assert ratio_of(row(1.0), new_row()) is None


STRETCH = Stretch(steps=100, pairs=4, is_whole=True)


@pytest.mark.parametrize(("factors", "words", "is_kept"), [
    ((1.3, 1.25, 1.35, 1.3), "at least 1.24 and about 1.30 times as fast (95 % interval 1.24 to 1.37, 4 pairs", True),
    ((1.3, 0.9, 1.35, 1.3), "undecided: 1.20 times as fast (95 % interval 0.88 to 1.62, 4 pairs of whole", False),
    ((0.8, 0.81, 0.8, 0.79), "no gain: 0.80 times as fast (95 % interval 0.79 to 0.81, ", False),
    ((1.3, 1.3), "undecided: ", False),  # too few
    ((1.3,), "not measured", False),
    ((), "not measured", False),
])  # fmt: skip
def test_the_cautious_end_of_the_interval_is_promised(factors, words, is_kept):
    promise = Promise(("lean",), STRETCH, [-math.log(factor) for factor in factors])
    assert str(promise).startswith(words)
    assert promise.is_kept == is_kept


def test_nothing_is_promised_after_an_error():
    assert not Promise(("lean",), STRETCH, [-0.3, -0.3, -0.31, -0.3], error="failed: no data").is_kept
    assert str(Promise((), STRETCH, [-0.3] * 3)).endswith("3 pairs of whole epochs with their validation)")
    assert str(Promise((), Stretch(steps=120), [-0.3] * 3)).endswith("3 pairs of stretches of 120 equal steps)")
