"""The timed steps: which action belongs to which phase, and how nested actions add up."""

import pytest

from lightning_turbo.doctor import timing
from lightning_turbo.doctor.clock import FitClock, Plan
from lightning_turbo.doctor.guard import Guard
from lightning_turbo.doctor.timing import Segment, StepTiming, sum_phases

NEXT = "[_TrainingEpochLoop].train_dataloader_next"
STEP = "[Strategy]SingleDeviceStrategy.training_step"
BACKWARD = "[Strategy]SingleDeviceStrategy.backward"
OPTIMIZER = "[LightningModule]Model.optimizer_step"
BEFORE = "[LightningModule]Model.on_before_backward"
END = "[LightningModule]Model.on_train_batch_end"
WHOLE = sum(range(1, 13))  # seconds of one_step


class Told:
    """A clock that is told of actions as Lightning tells them, and of the seconds that they take."""

    def __init__(self, monkeypatch, plan):
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        self.clock, self.steps = FitClock(Guard(lambda: None)), StepTiming(plan)
        self.clock.subscribe([self.steps])
        self.clock.start("run_training_epoch")

    def run(self, action, *inside):
        """An action, with what is in it: seconds, or further actions."""
        self.clock.start(action)
        self.go(*inside)
        self.clock.end(action)

    def go(self, *inside):
        for each in inside:
            if isinstance(each, tuple):
                self.run(*each)
            else:
                self.now += each

    def phases(self):
        return {name: seconds for name, seconds in sum_phases(self.steps.mean_step()).items() if seconds}


@pytest.fixture
def told(monkeypatch):
    return Told(monkeypatch, Plan(0, 99, 0))


def one_step(told):
    told.run(NEXT, 1)
    told.run("[Strategy]SingleDeviceStrategy.batch_to_device", 2)
    told.run("[Callback]Other.on_train_batch_start", 3)
    backward = (BACKWARD, 7, ("[Callback]Other.on_after_backward", 8))
    told.run("run_training_batch", 4, (OPTIMIZER, 5, (STEP, 6), backward, 9))
    told.run(END, 10)
    told.run("[Callback]TQDMProgressBar.on_train_batch_end", 12)
    told.go(11)


def test_inner_actions_count_once(told):
    for _ in range(2):
        one_step(told)
    assert len(told.steps.steps) == 1, "the second step is not over"
    expected = {"data": 1, "copy": 2, "forward": 6, "backward": 7, "optimizer": 5 + 9, "hooks": 3 + 4 + 8 + 10,
                "logging": 12 + 11}  # fmt: skip
    assert told.phases() == expected
    segments = told.steps.mean_step()
    assert sum(segment.seconds for segment in segments) == WHOLE == told.steps.mean()
    assert [segment.start for segment in segments] == [
        sum(before.seconds for before in segments[:i]) for i in range(len(segments))
    ]


def test_a_batch_that_is_fetched_ahead_of_an_epoch_is_no_step(told):
    one_step(told)
    told.run("[LightningModule]Model.on_train_epoch_end", 20)
    told.run("[LightningModule]Model.on_train_epoch_start", 30)
    told.run(NEXT, 40)
    for _ in range(2):
        one_step(told)
    assert [sum(step.values()) for step in told.steps.each_step()] == [WHOLE, WHOLE]


def test_validation_ends_a_step_and_is_no_part_of_it(told):
    one_step(told)
    told.run("[LightningModule]Model.on_validation_model_zero_grad", 50)
    told.run("[LightningModule]Model.on_validation_model_eval", 60)
    told.run("[Strategy]SingleDeviceStrategy.validation_step", 70)
    for _ in range(2):
        one_step(told)
    assert [sum(step.values()) for step in told.steps.each_step()] == [WHOLE, WHOLE]


def test_manual_backward_is_backward(told):
    for _ in range(2):
        told.run(NEXT, 1)
        before = [("[Callback]Other.on_before_backward", 4), (BEFORE, 8)]
        after = [("[Callback]Other.on_after_backward", 32), ("[LightningModule]Model.on_after_backward", 32)]
        told.run(STEP, 2, *before, 16, *after, 64)  # backward itself is no action here
        told.run(END, 0)
    assert told.phases() == {"data": 1, "forward": 2 + 64, "backward": 16, "hooks": 4 + 8 + 32 + 32}


def test_the_mean_of_the_steps_is_shown(told):
    told.clock.end("begun before the doctor came")
    for extra in (60, 0, 90):
        one_step(told)
        told.go(extra)
    one_step(told)
    assert sum(segment.seconds for segment in told.steps.mean_step()) == WHOLE + 50
    nothing = StepTiming(Plan(0, 1, 0))
    assert (nothing.mean_step(), nothing.mean()) == ([], 0.0)
    assert sum_phases([]) == {}


def test_only_the_steps_of_the_plan_are_timed(monkeypatch):
    told = Told(monkeypatch, Plan(1, 2, 3))
    for _ in range(6):
        one_step(told)
    assert len(told.steps.steps) == 2


def test_what_writes_for_a_logger_within_a_step_is_logging(told):
    for _ in range(2):
        told.run(NEXT, 1)
        told.run(END, 0)
        told.run("[Logger]CSVLogger.log_metrics", 5)
    assert told.phases() == {"data": 1, "logging": 5}


@pytest.mark.parametrize(("mine", "named"), [(10.0, "Mine.on_train_batch_end (10000.00 ms)"), (1.0, "")])
def test_the_longest_hook_is_named_from_a_tenth_of_the_step(mine, named):
    segments = [
        Segment("[Callback]Doctor.on_before_optimizer_step", "hooks", 0.0, 40.0),
        Segment("", "hooks", 0.0, 40.0),
        Segment("[Callback]Mine.on_train_batch_end", "hooks", 0.0, mine),
        Segment("[LightningModule]Net.configure_optimizers", "optimizer", 0.0, 10.0),
    ]
    assert timing.longest_action(segments, ("hooks", "logging")) == named
    assert timing.longest_action([], ("hooks", "logging")) == ""


def test_a_step_that_was_interrupted_is_not_typical():
    steps = [{("[Callback]A.on", "hooks"): 1.0, ("b", "hooks"): 2.0}, {("b", "hooks"): 50.0}, {("b", "hooks"): 2.0}]
    assert timing.typical_seconds(steps, 0) == {"[Callback]A.on": 0.0, "b": 2.0}
    assert timing.typical_seconds(steps, 1) == {"hooks": 3.0}
    assert timing.typical_seconds([], 1) == {}
