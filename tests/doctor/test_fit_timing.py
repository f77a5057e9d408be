"""The table of the fit: the time of each part, once or per epoch, projected from the measured steps."""

import math
from types import SimpleNamespace

import pytest

from lightning_turbo.doctor import fit_timing
from lightning_turbo.doctor.clock import EpochCount, Moment
from lightning_turbo.doctor.fit_timing import FitTiming, Length, Projection, fit_length


@pytest.fixture
def timing(monkeypatch):
    """A timing of two epochs, with a fake clock."""
    now = [0.0]
    monkeypatch.setattr(fit_timing.time, "perf_counter", lambda: now[0])
    timing = FitTiming()

    def run(part, seconds, action="", before=None):
        timing.enter(Moment(part, "hooks", action), None)
        now[0] += seconds
        timing.enter(Moment(part, "hooks", action), before)

    timing.begin_fit()
    run("set-up", 5.0)
    run("sanity check", 2.0)
    run("set-up", 4.0, before="start")
    timing.begin_epoch()
    run("first batch", 3.0)
    run("steps", 10.0)
    run("validation start", 1.0)
    run("validation", 2.0)
    run("metrics", 0.5)
    run("checkpoints", 6.0)
    run("hooks", 0.25, "[Callback]Mine.on_train_epoch_end")
    run("hooks", 9.0, "[Callback]Doctor.on_train_epoch_end")
    run("loggers", 0.75, "[Logger]CSVLogger.log_metrics")
    timing.begin_epoch()
    run("hooks", 1.5, before="start")
    run("first batch", 2.5)
    return timing


COUNTS = (EpochCount(steps=10, validations=1, validated=4, ended=True, saves=2), EpochCount())
LENGTH = Length(epochs=20, batches=100, validations=2.0, validated=40)


def test_each_part_of_a_fit_is_counted_once(timing):
    assert sum(seconds for epoch in timing.seconds for seconds in epoch.values()) == pytest.approx(47.5)
    assert (timing.part(0, "set-up"), timing.part(0, "start"), timing.part(2, "start")) == (5.0, 4.0, 1.5)


@pytest.mark.parametrize(("part", "once", "each"), [
    ("set-up", 5.0, 0.0), ("sanity check", 2.0, 0.0), ("start", 2.5, 1.5), ("first batch", 0.0, 2.5),
    ("steps", 0.0, 100 * 0.9), ("validation start", 0.0, 2.0), ("validation", 0.0, 40.0), ("metrics", 0.0, 1.0),
    ("checkpoints", 0.0, 6.0), ("hooks", 0.0, 9.25), ("loggers", 0.0, 0.75),
])  # fmt: skip
def test_a_part_is_projected_to_complete_epochs(part, once, each, timing):
    projection = Projection(timing, COUNTS, LENGTH, step=0.9, starts_again=True)
    assert (projection.once(part), projection.each(part)) == (pytest.approx(once), pytest.approx(each))


def test_without_an_epoch_end_persistent_workers_start_once(timing):
    del timing.seconds[2]
    stays = Projection(timing, COUNTS[:1], LENGTH, step=0.0, starts_again=False)
    again = Projection(timing, COUNTS[:1], LENGTH, step=0.0, starts_again=True)
    assert (stays.once("start"), stays.each("start")) == (4.0, 0.0)
    assert (again.once("start"), again.each("start")) == (0.0, 4.0)
    assert stays.each("steps") == 100 * 1.0, "the mean of all steps if none was timed"


def test_checkpoints_by_steps_are_projected_by_steps(timing):
    counts = (EpochCount(steps=10, ended=True, saves=3, saves_in_steps=2),)
    projection = Projection(timing, counts, LENGTH, step=0.0, starts_again=False)
    assert projection.saves == 2 * 10 + 1
    assert projection.each("checkpoints") == pytest.approx(21 * 6.0 / 3)


def test_hooks_are_listed_with_the_slowest_first(timing):
    facts = Projection(timing, COUNTS, LENGTH, 0.9, True).facts({"[LightningModule]Net.on_train_batch_end": 0.01}, str)
    assert [(hook.name, hook.seconds, hook.in_steps) for hook in facts.hooks] == [
        ("[LightningModule]Net.on_train_batch_end", 1.0, True),
        ("[Logger]CSVLogger.log_metrics", 0.75, False),
        ("[Callback]Mine.on_train_epoch_end", 0.25, False),
    ]
    assert facts.whole == pytest.approx(5.0 + 2.0 + 2.5 + 20 * facts.each())
    assert (facts.has_border, facts.watched_epochs, facts.watched_steps) == (True, 1, 10)


@pytest.mark.parametrize(("settings", "validations"), [
    ({}, 1.0), ({"check_val_every_n_epoch": 4}, 0.25), ({"val_check_batch": 25}, 4.0), ({"val_check_batch": 30}, 3.0),
    ({"check_val_every_n_epoch": None, "val_check_batch": 250}, 0.4), ({"val_check_batch": None}, 1.0),
    ({"val_check_batch": math.inf, "num_training_batches": math.inf}, 1.0), ({"enable_validation": False}, 0.0),
    ({"num_val_batches": [0]}, 0.0),
])  # fmt: skip
def test_the_number_of_validations_is_read_from_the_trainer(settings, validations):
    trainer = {"num_training_batches": 100, "check_val_every_n_epoch": 1, "val_check_batch": 100,
               "num_val_batches": [3, 5], "enable_validation": True}  # fmt: skip
    length = fit_length(SimpleNamespace(**{**trainer, **settings}), 7)
    assert length.validations == pytest.approx(validations)
    assert length.epochs == 7


@pytest.mark.parametrize(("batches", "steps", "ended", "known"), [
    (100, 10, True, True), (100, 5, False, True),
    (math.inf, 9, True, True),  # of a generator whose first epoch was complete
    (math.inf, 10, True, False),  # of an epoch that the Doctor may have shortened
    (math.inf, 9, False, False),
])  # fmt: skip
def test_whether_the_length_of_an_epoch_is_known(batches, steps, ended, known, timing):
    counts = [EpochCount(steps=steps, ended=ended)]
    projection = Projection(timing, counts, Length(20, batches), step=0.5, starts_again=False, most=10)
    facts = projection.facts({}, str)
    assert (facts.knows_length, facts.batches) == (known, steps if batches == math.inf else batches)
