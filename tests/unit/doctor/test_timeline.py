"""The time line: which action belongs to which phase, and how nested actions add up."""

import copy
from contextlib import contextmanager

import pytest
from lightning.pytorch.profilers import Profiler, SimpleProfiler

from lightning_turbo.doctor import timeline
from lightning_turbo.doctor.timeline import PHASE_NAMES, PHASES, Recorder, Timeline, middle_of, phase_of, phases_of

NEXT = "[_TrainingEpochLoop].train_dataloader_next"
STEP = "[Strategy]SingleDeviceStrategy.training_step"
BACKWARD = "[Strategy]SingleDeviceStrategy.backward"
OPTIMIZER = "[LightningModule]Model.optimizer_step"
END = "[LightningModule]Model.on_train_batch_end"


class Inner(Profiler):
    def __init__(self):
        super().__init__()
        self.actions = []

    def start(self, name):
        self.actions.append(("start", name))

    def stop(self, name):
        self.actions.append(("stop", name))


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: now[0])

    def forward(seconds):
        now[0] += seconds

    return forward


def recorder(**hooks):
    steps = {"on_step": lambda: None, "on_batch": lambda: None, "on_pause": lambda: None, **hooks}
    recorder = Recorder(Inner(), **steps)
    recorder.timeline = Timeline()
    return recorder


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
    clock(11)


@pytest.mark.parametrize(
    ("action", "phase"),
    [
        (NEXT, "data"),
        ("[LightningModule]Model.transfer_batch_to_device", "copy"),
        (STEP, "forward"),
        (BACKWARD, "backward"),
        (OPTIMIZER, "optimizer"),
        ("optimizer_step", "optimizer"),
        ("[Callback]TQDMProgressBar.on_train_batch_end", "logging"),
        ("[Callback]ModelCheckpoint{'monitor': None}.on_train_batch_end", "hooks"),
        (END, "hooks"),
        ("run_training_batch", None),
    ],
)
def test_actions_have_phases(action, phase):
    assert phase_of(action) == phase


def test_every_phase_has_a_name():
    assert tuple(PHASE_NAMES) == PHASES


def test_inner_actions_count_once(clock):
    watched = recorder()
    for _ in range(2):
        one_step(watched, clock)
    steps = watched.timeline.segments()
    assert len(steps) == 1, "the second step is not over"
    expected = {"data": 1, "copy": 2, "forward": 6, "backward": 7, "optimizer": 5 + 9, "hooks": 3 + 4 + 8 + 10,
                "logging": 11}  # fmt: skip
    assert phases_of(steps) == expected
    assert sum(segment.seconds for segment in steps[0]) == sum(range(1, 12))
    starts = [segment.start for segment in steps[0]]
    assert starts == sorted(starts)


def test_everything_is_passed_on_to_the_trainers_own_profiler(clock):
    watched = recorder()
    one_step(watched, clock)
    names = [name for kind, name in watched.inner.actions if kind == "start"]
    assert names[:2] == [NEXT, "[Strategy]SingleDeviceStrategy.batch_to_device"]
    assert sorted(names) == sorted(name for kind, name in watched.inner.actions if kind == "stop")


def test_a_step_with_validation_is_dropped(clock):
    paused = []
    watched = recorder(on_pause=lambda: paused.append(True))
    one_step(watched, clock)
    with watched.profile("[Callback]Other.on_validation_start"):
        clock(100)
    one_step(watched, clock)
    one_step(watched, clock)
    assert len(watched.timeline.segments()) == 1
    assert sum(phases_of(watched.timeline.segments()).values()) == sum(range(1, 12))
    assert paused


def test_the_hooks_come_between_the_steps(clock):
    seen = []
    watched = recorder(on_step=lambda: seen.append("step"), on_batch=lambda: seen.append("batch"))
    one_step(watched, clock)
    one_step(watched, clock)
    assert seen == ["step", "batch", "step", "batch"]


def test_a_stop_without_its_start_does_no_harm(clock):
    watched = recorder()
    watched.stop("begun before the doctor came")
    one_step(watched, clock)
    one_step(watched, clock)
    assert len(watched.timeline.segments()) == 1


def test_an_exception_within_an_action_leaves_the_stack_right(clock):
    watched = recorder()

    def fail():
        with watched.profile(STEP):
            watched.start("never stopped")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert watched._stack == []


def test_the_middle_step_is_the_one_of_median_length(clock):
    watched = recorder()
    for extra in (50, 0, 100):
        one_step(watched, clock)
        clock(extra)
    one_step(watched, clock)
    assert sum(segment.seconds for segment in middle_of(watched.timeline.segments())) == 66 + 50
    assert middle_of([]) == []
    assert phases_of([]) == {}


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
    stand_in = Recorder(inner, nothing, nothing, nothing)
    assert isinstance(stand_in, SimpleProfiler)
    assert stand_in.dirpath == tmp_path
    assert stand_in.peak() == "peak"
    with stand_in.profile("my part") as given:
        assert given == "mine"
    assert inner.seen == 1
    assert "my part" in stand_in.summary()
    stand_in.seen += 1
    stand_in.filename = "other"
    assert (inner.seen, inner.filename) == (2, "other")
    stand_in.describe()
    assert "my part" in (tmp_path / "other.txt").read_text()
    assert isinstance(copy.copy(stand_in), Own)
    with pytest.raises(StopIteration), stand_in.profile("the end of the data"):
        next(iter(()))
    with pytest.raises(AttributeError, match="absent"):
        stand_in.absent
