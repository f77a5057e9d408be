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


class Actions:
    """A clock that gets profiler actions as from Lightning, with given durations."""

    def __init__(self, monkeypatch, plan):
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        self.clock, self.steps = FitClock(Guard(lambda: None)), StepTiming(plan)
        self.clock.subscribe([self.steps])
        self.clock.start("run_training_epoch")

    def run(self, action, *inside):
        """Run an action that contains seconds or nested actions."""
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
def actions(monkeypatch):
    return Actions(monkeypatch, Plan(0, 99, 0))


def one_step(actions):
    actions.run(NEXT, 1)
    actions.run("[Strategy]SingleDeviceStrategy.batch_to_device", 2)
    actions.run("[Callback]Other.on_train_batch_start", 3)
    backward = (BACKWARD, 7, ("[Callback]Other.on_after_backward", 8))
    actions.run("run_training_batch", 4, (OPTIMIZER, 5, (STEP, 6), backward, 9))
    actions.run(END, 10)
    actions.run("[Callback]TQDMProgressBar.on_train_batch_end", 12)
    actions.go(11)


def test_nested_actions_count_once(actions):
    for _ in range(2):
        one_step(actions)
    assert len(actions.steps.steps) == 1, "the second step has not ended"
    expected = {"data": 1, "copy": 2, "forward": 6, "backward": 7, "optimizer": 5 + 9, "hooks": 3 + 4 + 8 + 10,
                "logging": 12 + 11}  # fmt: skip
    assert actions.phases() == expected
    segments = actions.steps.mean_step()
    assert sum(segment.seconds for segment in segments) == WHOLE == actions.steps.mean()
    assert [segment.start for segment in segments] == [
        sum(before.seconds for before in segments[:i]) for i in range(len(segments))
    ]


def test_a_batch_fetched_before_an_epoch_is_not_a_step(actions):
    one_step(actions)
    actions.run("[LightningModule]Model.on_train_epoch_end", 20)
    actions.run("[LightningModule]Model.on_train_epoch_start", 30)
    actions.run(NEXT, 40)
    for _ in range(2):
        one_step(actions)
    assert [sum(step.values()) for step in actions.steps.each_step()] == [WHOLE, WHOLE]


def test_validation_ends_a_step_and_is_not_part_of_it(actions):
    one_step(actions)
    actions.run("[LightningModule]Model.on_validation_model_zero_grad", 50)
    actions.run("[LightningModule]Model.on_validation_model_eval", 60)
    actions.run("[Strategy]SingleDeviceStrategy.validation_step", 70)
    for _ in range(2):
        one_step(actions)
    assert [sum(step.values()) for step in actions.steps.each_step()] == [WHOLE, WHOLE]


def test_manual_backward_counts_as_backward(actions):
    for _ in range(2):
        actions.run(NEXT, 1)
        before = [("[Callback]Other.on_before_backward", 4), (BEFORE, 8)]
        after = [("[Callback]Other.on_after_backward", 32), ("[LightningModule]Model.on_after_backward", 32)]
        actions.run(STEP, 2, *before, 16, *after, 64)  # backward is not an action here
        actions.run(END, 0)
    assert actions.phases() == {"data": 1, "forward": 2 + 64, "backward": 16, "hooks": 4 + 8 + 32 + 32}


def test_the_report_shows_the_mean_step(actions):
    actions.clock.end("begun before the doctor came")
    for extra in (60, 0, 90):
        one_step(actions)
        actions.go(extra)
    one_step(actions)
    assert sum(segment.seconds for segment in actions.steps.mean_step()) == WHOLE + 50
    nothing = StepTiming(Plan(0, 1, 0))
    assert (nothing.mean_step(), nothing.mean()) == ([], 0.0)
    assert sum_phases([]) == {}


def test_only_the_steps_of_the_plan_are_timed(monkeypatch):
    actions = Actions(monkeypatch, Plan(1, 2, 3))
    for _ in range(6):
        one_step(actions)
    assert len(actions.steps.steps) == 2


def test_logger_calls_within_a_step_count_as_logging(actions):
    for _ in range(2):
        actions.run(NEXT, 1)
        actions.run(END, 0)
        actions.run("[Logger]CSVLogger.log_metrics", 5)
    assert actions.phases() == {"data": 1, "logging": 5}


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


def test_an_interrupted_step_does_not_count():
    steps = [{("[Callback]A.on", "hooks"): 1.0, ("b", "hooks"): 2.0}, {("b", "hooks"): 50.0}, {("b", "hooks"): 2.0}]
    assert timing.typical_seconds(steps, 0) == {"[Callback]A.on": 0.0, "b": 2.0}
    assert timing.typical_seconds(steps, 1) == {"hooks": 3.0}
    assert timing.typical_seconds([], 1) == {}
