"""The timeline: when a fit, an epoch, a step and a phase start and end, from Lightning's profiler actions."""

import copy
import time
from contextlib import contextmanager

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, SimpleProfiler
from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo.doctor import timeline
from lightning_turbo.doctor.guard import Guard
from lightning_turbo.doctor.timeline import (
    PARTS,
    Listener,
    Plan,
    Timeline,
    hooks_of,
    parts_of,
    phases_of,
    steps_of,
)
from tests.trainers import quiet_trainer


class Events(Listener):
    """Records what the timeline tells."""

    def __init__(self):
        self.events = []

    def begin_step(self, step):
        self.events.append(f"begin {step}")

    def fetched(self, step):
        self.events.append(f"fetched {step}")

    def end_step(self, step):
        self.events.append(f"end {step}")

    def drop_step(self, step):
        self.events.append(f"drop {step}")


def begun(events):
    return Timeline(Guard(lambda: None), events, Plan(1, 9, 0))


class Starts(Callback):
    """Starts a timeline when fit sets up, as the Doctor does."""

    def __init__(self):
        self.notes = Events()
        self.clock = begun(self.notes)

    def setup(self, trainer, module, stage):
        self.clock.begin(trainer)

    def on_train_end(self, trainer, module):
        self.clock.stop()


def heard(module=None, *callbacks, **settings):
    """Run a fit and return the events and the timeline."""
    starts = Starts()
    module = BoringModel() if module is None else module
    if "val_check_interval" not in settings and "limit_val_batches" not in settings:
        settings["limit_val_batches"] = 0
    quiet_trainer(callbacks=[starts, *callbacks], **{"limit_train_batches": 2, "max_epochs": 2, **settings}).fit(module)
    return starts.notes, starts.clock


STEPS = ["begin 0", "fetched 0", "end 0", "begin 1", "fetched 1", "end 1"]
LATER = ["begin 2", "fetched 2", "end 2", "begin 3", "fetched 3", "end 3"]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(2, 32))


class Streamed(BoringModel):
    def train_dataloader(self):
        return DataLoader(Stream())


@pytest.mark.parametrize(("module", "settings"), [
    (BoringModel, {}), (ManualOptimBoringModel, {}), (BoringModel, {"accumulate_grad_batches": 2}),
    (BoringModel, {"strategy": "turbo"}), (BoringModel, {"strategy": "turbo", "lean": True}),
    (BoringModel, {"limit_val_batches": 1, "num_sanity_val_steps": 0}),
    (BoringModel, {"limit_val_batches": 1, "val_check_interval": 1}),
])  # fmt: skip
def test_each_step_starts_and_ends_once(module, settings):
    settings = dict(settings)
    if settings.pop("lean", False):
        from lightning_turbo import TurboStrategy

        settings["strategy"] = TurboStrategy(lean=True)
    notes, clock = heard(module(), **settings)
    assert notes.events == STEPS + LATER
    assert [each.steps for each in clock.epochs] == [2, 2]
    assert [each.ended for each in clock.epochs] == [True, True]


def test_a_batch_fetched_before_an_epoch_is_not_a_step():
    notes, clock = heard(Streamed(), limit_train_batches=1.0)
    assert [each for each in notes.events if not each.startswith(("fetched", "drop"))] == [
        each for each in STEPS + LATER if not each.startswith("fetched") for _ in range(1 + (each == "begin 2"))
    ]
    assert [each.steps for each in clock.epochs] == [2, 2]


def test_the_parts_of_a_fit_are_timed_in_order(tmp_path):
    _, clock = heard(
        limit_val_batches=2, num_sanity_val_steps=1, logger=CSVLogger(tmp_path), enable_checkpointing=True,
        default_root_dir=tmp_path, log_every_n_steps=1,
    )  # fmt: skip
    parts = list(dict.fromkeys(mark.part for mark in clock.marks))
    first = [part for part in parts if part not in ("hooks", "metrics")]
    assert first == [
        "set-up", "first batch", "steps", "validation start", "validation", "checkpoints",
    ]  # fmt: skip
    assert set(parts) == set(PARTS)
    whole = clock.marks[-1].time - clock.marks[0].time
    assert sum(parts_of(clock.marks).values()) == pytest.approx(whole), "each moment counts once"
    assert {hook for _, hook in hooks_of(clock.marks, "checkpoints")} >= {"save_checkpoint"}
    assert [(each.validations, each.validated, each.saves) for each in clock.epochs] == [(1, 2, 1), (1, 2, 1)]


def test_steps_are_complete_with_a_validation_after_every_step():
    notes, clock = heard(limit_val_batches=1, val_check_interval=1, limit_train_batches=3, max_epochs=1)
    assert [each for each in notes.events if each.startswith("end")] == ["end 0", "end 1", "end 2"]
    assert clock.epochs[0].validations == 3


@pytest.mark.filterwarnings("ignore:.*")
def test_loops_within_a_hook_are_not_epochs(tmp_path):
    class Net(BoringModel):
        lr = 0.1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    finder = LearningRateFinder(num_training_steps=3)
    _, clock = heard(Net(), finder, default_root_dir=tmp_path, max_epochs=1)
    assert len(clock.epochs) == 1
    assert clock.step == 2


def test_the_timeline_can_be_stopped_after_an_error():
    class Fails(BoringModel):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    starts = Starts()
    trainer = quiet_trainer(callbacks=[starts], limit_val_batches=0, max_epochs=1)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails())
    starts.clock.stop()
    assert "start" not in vars(trainer.profiler)
    assert starts.notes.events == ["begin 0", "fetched 0"]


class Own(SimpleProfiler):
    """A profiler with its own ``profile`` method."""

    seen = 0

    @contextmanager
    def profile(self, action_name):
        self.seen += 1
        with super().profile(action_name):
            yield "mine"


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler, AdvancedProfiler, Own])
def test_the_users_profiler_is_kept(kind, tmp_path):
    kept = kind() if kind is PassThroughProfiler else kind(dirpath=tmp_path, filename="times")
    seen = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append((trainer.profiler is kept, type(copy.copy(trainer.profiler))))

    notes, _ = heard(BoringModel(), Looks(), profiler=kept)
    assert seen == [(True, kind)] * 4
    assert notes.events == STEPS + LATER
    assert not {"start", "stop"} & set(vars(kept))
    assert kind not in (SimpleProfiler, Own) or "training_step" in kept.summary()


class Waits(CSVLogger):
    """A logger that waits, as for a server."""

    def log_metrics(self, metrics, step=None):
        time.sleep(0.01)


def test_what_a_logger_writes_counts_as_logging(tmp_path):
    class Logs(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("loss", 1.0)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            self.log("epoch", 1.0)

    _, clock = heard(Logs(), logger=Waits(tmp_path), log_every_n_steps=1)
    assert phases_of(steps_of(clock.marks, lambda step: True))["logging"] >= 0.01
    assert parts_of(clock.marks)[1, "metrics"] >= 0.01


def test_a_plan_divides_steps_into_warmup_timed_and_watched():
    plan = Plan(2, 3, 2)
    assert [step for step in range(9) if plan.times(step)] == [2, 3, 4]
    assert [step for step in range(9) if plan.watches(step)] == [5, 6]
    assert plan.needed == 7


class Plateau(BoringModel):
    """Its scheduler steps at the end of an epoch, after the validation."""

    def validation_step(self, batch, batch_idx):
        self.log("val", 1.0)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


class Restoring(Plateau):
    """Restores train mode itself. Lightning calls this hook only if it is overridden."""

    def on_validation_model_train(self):
        self.train()


@pytest.mark.parametrize("module", [Plateau, Restoring])
def test_a_scheduler_step_after_the_validation_is_not_timed_as_validation(module):
    _, clock = heard(module(), limit_val_batches=1)
    parts = {}
    for mark in clock.marks:
        parts.setdefault(mark.hook.rpartition(".")[2], set()).add(mark.part)
    assert parts["lr_scheduler_step"] == {"hooks"}
    assert parts["on_train_epoch_end"] == {"hooks"}
    assert parts["validation_step"] == {"set-up", "validation"}


NEXT = "[_TrainingEpochLoop].train_dataloader_next"
STEP = "[Strategy]SingleDeviceStrategy.training_step"
BACKWARD = "[Strategy]SingleDeviceStrategy.backward"
OPTIMIZER = "[LightningModule]Model.optimizer_step"
BEFORE = "[LightningModule]Model.on_before_backward"
END = "[LightningModule]Model.on_train_batch_end"
WHOLE = sum(range(1, 13))  # seconds of one_step


class Actions:
    """A timeline that gets profiler actions as from Lightning, with given durations."""

    def __init__(self, monkeypatch, plan):
        self.now = 0.0
        monkeypatch.setattr(timeline.time, "perf_counter", lambda: self.now)
        self.plan = plan
        self.clock = begun(Listener())
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

    def steps(self):
        """Return the seconds of each complete step."""
        return [sum(step.values()) for step in steps_of(self.clock.marks, self.counts)]

    def counts(self, step):
        return self.plan.times(step) and step < self.clock.step

    def phases(self):
        phases = phases_of(steps_of(self.clock.marks, self.counts))
        return {name: seconds for name, seconds in phases.items() if seconds}


@pytest.fixture
def actions(monkeypatch):
    return Actions(monkeypatch, Plan(0, 99, 0))


def one_step(actions):
    actions.run(NEXT, 1)
    actions.run(
        "[Strategy]SingleDeviceStrategy.batch_to_device", 2, ("[LightningModule]Model.on_after_batch_transfer", 3)
    )
    backward = (BACKWARD, 7, ("[Callback]Other.on_after_backward", 8))
    actions.run("run_training_batch", 4, (OPTIMIZER, 5, (STEP, 6), backward, 9))
    actions.run(END, 10)
    actions.run("[Callback]TQDMProgressBar.on_train_batch_end", 12)
    actions.go(11)


def test_nested_actions_count_once(actions):
    for _ in range(2):
        one_step(actions)
    assert actions.steps() == [WHOLE], "the second step has not ended"
    expected = {"data": 1, "copy": 2, "forward": 6, "backward": 7, "optimizer": 5 + 9, "hooks": 3 + 4 + 8 + 10,
                "logging": 12 + 11}  # fmt: skip
    assert actions.phases() == expected


def test_what_is_fetched_before_an_epoch_is_not_timed_as_a_step(actions):
    one_step(actions)
    actions.run("[LightningModule]Model.on_train_epoch_end", 20)
    actions.run("[LightningModule]Model.on_train_epoch_start", 30)
    actions.run(NEXT, 40)
    for _ in range(2):
        one_step(actions)
    assert actions.steps() == [WHOLE, WHOLE]


def test_validation_ends_a_step_and_is_not_part_of_it(actions):
    one_step(actions)
    actions.run("[LightningModule]Model.on_validation_model_zero_grad", 50)
    actions.run("[LightningModule]Model.on_validation_model_eval", 60)
    actions.run("[Strategy]SingleDeviceStrategy.validation_step", 70)
    for _ in range(2):
        one_step(actions)
    assert actions.steps() == [WHOLE, WHOLE]


def test_manual_backward_counts_as_backward(actions):
    for _ in range(2):
        actions.run(NEXT, 1)
        before = [("[Callback]Other.on_before_backward", 4), (BEFORE, 8)]
        after = [("[Callback]Other.on_after_backward", 32), ("[LightningModule]Model.on_after_backward", 32)]
        actions.run(STEP, 2, *before, 16, *after, 64)  # backward is not an action here
        actions.run(END, 0)
    assert actions.phases() == {"data": 1, "forward": 2 + 64, "backward": 16, "hooks": 4 + 8 + 32 + 32}


def test_an_action_that_had_begun_before_changes_nothing(actions):
    actions.clock.end("begun before the doctor came")
    for extra in (60, 0, 90):
        one_step(actions)
        actions.go(extra)
    one_step(actions)
    assert actions.steps() == [WHOLE + 60, WHOLE, WHOLE + 90]
    assert phases_of([]) == {}


def test_only_the_steps_of_the_plan_are_timed(monkeypatch):
    actions = Actions(monkeypatch, Plan(1, 2, 3))
    for _ in range(6):
        one_step(actions)
    assert actions.steps() == [WHOLE, WHOLE]


def test_the_hooks_of_later_steps_are_not_kept(monkeypatch, actions):
    monkeypatch.setattr(timeline, "MOST", 3)
    for _ in range(6):
        one_step(actions)
    assert {mark.step for mark in actions.clock.marks} == {0, 1, 2}
    actions.run("[LightningModule]Model.on_train_epoch_end", 20)
    assert sum(parts_of(actions.clock.marks).values()) == 6 * WHOLE + 20
    assert actions.clock.epochs[0].steps == 6


def test_the_median_step_ignores_an_interrupted_one():
    steps = [{("[Callback]A.on", "hooks"): 1.0, ("b", "hooks"): 2.0}, {("b", "hooks"): 50.0}, {("b", "hooks"): 2.0}]
    assert phases_of(steps, typical=True)["hooks"] == 3.0
    assert phases_of(steps)["hooks"] == pytest.approx(55 / 3)
