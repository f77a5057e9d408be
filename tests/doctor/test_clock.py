"""The clock: when a fit, an epoch, a step and a phase start and end, from Lightning's profiler actions."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, SimpleProfiler
from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo.doctor.clock import PARTS, FitClock, Listener, Plan
from lightning_turbo.doctor.guard import Guard
from tests.trainers import quiet_trainer


class Events(Listener):
    """Records the events of the clock."""

    def __init__(self):
        self.events, self.parts = [], []

    def begin_epoch(self):
        self.events.append("epoch")

    def begin_step(self, step):
        self.events.append(f"begin {step}")

    def fetched(self, step):
        self.events.append(f"fetched {step}")

    def end_step(self, step):
        self.events.append(f"end {step}")

    def drop_step(self, step):
        self.events.append(f"drop {step}")

    def enter(self, moment, before):
        for part in [before, moment.part]:
            if part and self.parts[-1:] != [part]:
                self.parts.append(part)


class Starts(Callback):
    """Starts a clock when fit starts, as the Doctor does."""

    def __init__(self):
        self.notes, self.clock = Events(), FitClock(Guard(lambda: None))

    @property
    def log(self):
        return None

    @log.setter
    def log(self, log):
        self.clock.begin(log.__self__.trainer, [self.notes])

    def on_train_end(self, trainer, module):
        self.clock.stop()


def heard(module=None, *callbacks, **settings):
    """Run a fit and return the events and counts of the clock."""
    starts = Starts()
    module = BoringModel() if module is None else module
    if "val_check_interval" not in settings and "limit_val_batches" not in settings:
        settings["limit_val_batches"] = 0
    quiet_trainer(callbacks=[starts, *callbacks], **{"limit_train_batches": 2, "max_epochs": 2, **settings}).fit(module)
    return starts.notes, starts.clock


STEPS = ["epoch", "begin 0", "fetched 0", "end 0", "begin 1", "fetched 1", "end 1"]
LATER = ["epoch", "begin 2", "fetched 2", "end 2", "begin 3", "fetched 3", "end 3"]


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
    notes, clock = heard(
        limit_val_batches=2, num_sanity_val_steps=1, logger=CSVLogger(tmp_path), enable_checkpointing=True,
        default_root_dir=tmp_path, log_every_n_steps=1,
    )  # fmt: skip
    first = [part for part in dict.fromkeys(notes.parts) if part not in ("hooks", "metrics", "loggers")]
    assert first == [
        "set-up", "sanity check", "start", "first batch", "steps", "validation start", "validation", "checkpoints",
    ]  # fmt: skip
    assert set(notes.parts) == set(PARTS)
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


def test_the_clock_can_be_stopped_after_an_error():
    class Fails(BoringModel):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    starts = Starts()
    trainer = quiet_trainer(callbacks=[starts], limit_val_batches=0, max_epochs=1)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails())
    starts.clock.stop()
    assert "start" not in vars(trainer.profiler)
    assert starts.notes.events == ["epoch", "begin 0", "fetched 0"]


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


def test_loggers_are_timed_and_write_as_usual(tmp_path):
    class Logs(BoringModel):
        def on_train_epoch_end(self):
            self.log("epoch", 1.0)

    logger = CSVLogger(tmp_path)
    notes, _ = heard(Logs(), logger=logger, log_every_n_steps=1)
    assert "loggers" in notes.parts
    assert "log_metrics" not in vars(logger)
    assert "epoch" in (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()


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


class Actions(Listener):
    """Records the part of the fit to which each action belongs."""

    def __init__(self):
        self.parts = {}

    def enter(self, moment, before):
        self.parts.setdefault(moment.action.rpartition(".")[2], set()).add(moment.part)


@pytest.mark.parametrize("module", [Plateau, Restoring])
def test_a_scheduler_step_after_the_validation_is_not_timed_as_validation(module):
    starts = Starts()
    starts.notes = Actions()
    quiet_trainer(callbacks=[starts], limit_train_batches=2, limit_val_batches=1, max_epochs=2).fit(module())
    parts = starts.notes.parts
    assert parts["lr_scheduler_step"] == {"hooks"}
    assert parts["on_train_epoch_end"] == {"hooks"}
    assert parts["validation_step"] == {"sanity check", "validation"}


def test_a_logger_without_all_methods_is_timed():
    written = []
    logger = SimpleNamespace(log_metrics=written.append, save=None)
    before = dict(vars(logger))
    notes, clock = Events(), FitClock(Guard(lambda: None))
    clock.begin(SimpleNamespace(profiler=PassThroughProfiler(), loggers=[logger]), [notes])
    clock._begin_epoch()
    logger.log_metrics({"loss": 1.0})
    clock.stop()
    assert written == [{"loss": 1.0}]
    assert "loggers" in notes.parts
    assert vars(logger) == before
