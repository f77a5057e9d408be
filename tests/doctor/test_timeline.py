"""The time line: which action belongs to which phase, and how nested actions add up."""

import copy
from contextlib import contextmanager

import pytest
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from lightning_turbo.doctor import timeline
from lightning_turbo.doctor.timeline import Recorder, Segment, Timeline, sum_phases

NEXT = "[_TrainingEpochLoop].train_dataloader_next"
STEP = "[Strategy]SingleDeviceStrategy.training_step"
BACKWARD = "[Strategy]SingleDeviceStrategy.backward"
OPTIMIZER = "[LightningModule]Model.optimizer_step"
BEFORE = "[LightningModule]Model.on_before_backward"
END = "[LightningModule]Model.on_train_batch_end"
WHOLE = sum(range(1, 13))  # seconds of one_step


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: now[0])

    def forward(seconds):
        now[0] += seconds

    return forward


def recorder(**hooks):
    steps = {"on_step": lambda: None, "on_batch": lambda: None, "on_pause": lambda: None, **hooks}
    recorder = Recorder(PassThroughProfiler(), Timeline(), **steps)
    recorder.timeline.recording = True
    return recorder


def phases(recorder):
    return {name: seconds for name, seconds in sum_phases(recorder.timeline.mean_step()).items() if seconds}


def one_step(recorder, clock):
    with recorder.profile(NEXT):
        clock(1)
    with recorder.profile("[Strategy]SingleDeviceStrategy.batch_to_device"):
        clock(2)
    with recorder.profile("[Callback]Other.on_train_batch_start"):
        clock(3)
    with recorder.profile("run_training_batch"):
        clock(4)
        with recorder.profile(OPTIMIZER):
            clock(5)
            with recorder.profile(STEP):
                clock(6)
            with recorder.profile(BACKWARD):
                clock(7)
                with recorder.profile("[Callback]Other.on_after_backward"):
                    clock(8)
            clock(9)
    with recorder.profile(END):
        clock(10)
    with recorder.profile("[Callback]TQDMProgressBar.on_train_batch_end"):
        clock(12)
    clock(11)


def test_inner_actions_count_once(clock):
    watched = recorder()
    for _ in range(2):
        one_step(watched, clock)
    assert len(watched.timeline.steps) == 1, "the second step is not over"
    expected = {"data": 1, "copy": 2, "forward": 6, "backward": 7, "optimizer": 5 + 9, "hooks": 3 + 4 + 8 + 10,
                "logging": 12 + 11}  # fmt: skip
    assert phases(watched) == expected
    segments = watched.timeline.mean_step()
    assert sum(segment.seconds for segment in segments) == WHOLE
    assert [segment.start for segment in segments] == [
        sum(before.seconds for before in segments[:i]) for i in range(len(segments))
    ]


def test_a_batch_that_is_fetched_ahead_of_an_epoch_is_no_step(clock):
    watched = recorder()
    one_step(watched, clock)
    with watched.profile("[LightningModule]Model.on_train_epoch_end"):
        clock(20)
    with watched.profile(NEXT):
        clock(40)
    for _ in range(2):
        one_step(watched, clock)
    assert [sum(step.values()) for step in watched.timeline.each_step()] == [WHOLE, WHOLE]


def test_manual_backward_is_backward(clock):
    watched = recorder()
    for _ in range(2):
        with watched.profile(NEXT):
            clock(1)
        with watched.profile(STEP):
            clock(2)
            for hook, seconds in (("[Callback]Other.on_before_backward", 4), (BEFORE, 8)):
                with watched.profile(hook):
                    clock(seconds)
            clock(16)  # backward itself is no action here
            for hook in ("[Callback]Other.on_after_backward", "[LightningModule]Model.on_after_backward"):
                with watched.profile(hook):
                    clock(32)
            clock(64)
        with watched.profile(END):
            clock(0)
    assert phases(watched) == {"data": 1, "forward": 2 + 64, "backward": 16, "hooks": 4 + 8 + 32 + 32}


def test_the_mean_of_the_steps_is_shown(clock):
    watched = recorder()
    watched.stop("begun before the doctor came")
    for extra in (60, 0, 90):
        one_step(watched, clock)
        clock(extra)
    one_step(watched, clock)
    assert sum(segment.seconds for segment in watched.timeline.mean_step()) == WHOLE + 50
    assert Timeline().mean_step() == []
    assert sum_phases([]) == {}


@pytest.mark.parametrize(("mine", "named"), [(10.0, "Mine.on_train_batch_end (10000.00 ms)"), (1.0, "")])
def test_the_longest_hook_is_named_from_a_tenth_of_the_step(mine, named):
    segments = [
        Segment("[Callback]Doctor.on_before_optimizer_step", "hooks", 0.0, 40.0),
        Segment("", "hooks", 0.0, 40.0),
        Segment("[Callback]Mine.on_train_batch_end", "hooks", 0.0, mine),
        Segment("[LightningModule]Net.configure_optimizers", "optimizer", 0.0, 10.0),
    ]
    assert timeline.longest_action(segments, ("hooks", "logging")) == named
    assert timeline.longest_action([], ("hooks", "logging")) == ""


def test_the_stand_in_is_the_profiler_to_everybody_else(tmp_path):
    class Own(SimpleProfiler):
        seen = 0

        def peak(self):
            return "peak"

        @contextmanager
        def profile(self, action_name):
            self.seen += 1
            with super().profile(action_name):
                yield "mine"

    inner = Own(dirpath=tmp_path, filename="times")
    nothing = lambda: None  # noqa: E731
    stand_in = Recorder(inner, Timeline(), nothing, nothing, nothing)
    assert isinstance(stand_in, SimpleProfiler)
    assert stand_in.dirpath == tmp_path
    assert stand_in.peak() == "peak"
    with stand_in.profile("my part") as given:
        assert given == "mine"
    assert inner.seen == 1
    assert "my part" in stand_in.summary()
    stand_in.describe()
    assert "my part" in (tmp_path / "times.txt").read_text()
    assert isinstance(copy.copy(stand_in), Own)
    with pytest.raises(StopIteration), stand_in.profile("the end of the data"):
        next(iter(()))
    with pytest.raises(AttributeError, match="absent"):
        stand_in.absent
