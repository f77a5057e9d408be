"""Lightning's callbacks, schedulers and metrics that keep a state within an epoch: which of them resume exactly.

``docs/resume.md`` says the same of those that do not.
"""

import functools
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, callbacks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_turbo import Preemption, Prefetch
from lightning_turbo.errors import TurboWarning
from tests.integration.resuming import assert_same
from tests.promises.runs import end_of
from tests.promises.stopped_runs import Sends, stops
from tests.trainers import quiet_trainer
from tests.versions import KNOWS_WEIGHTS_ONLY, unpickling

pytestmark = [
    pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="needs the callbacks of Lightning 2.6"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists", "ignore:The dirpath has changed"),
]
MID_EPOCH = ("on_train_batch_start", 7)
AT_ITS_END = ("on_validation_start", 2)  # of an epoch


class Net(LightningModule):
    """Logs what callbacks read: a value of each epoch's validation, and means over the steps of an epoch."""

    def __init__(self, plateau=False):
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.metric = MeanMetric()
        self.plateau = plateau
        self.rates = []

    def training_step(self, batch, index):
        self.rates.append((self.global_step, self.optimizers().param_groups[0]["lr"]))
        self.metric.update(10.0 - index)
        self.log("train_metric", self.metric, on_step=False, on_epoch=True)
        self.log("train_mean", 10.0 - 2 * index + self.current_epoch, on_step=False, on_epoch=True)
        return (self.head(self.backbone(batch[0])) - 1).square().mean()

    def validation_step(self, batch, index):
        self.head(self.backbone(batch[0]))
        self.log("val", abs(self.current_epoch - 1.0))  # best in epoch 1

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05, momentum=0.9)
        if not self.plateau:
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


class UnfreezesAgain(callbacks.BackboneFinetuning):
    """What ``docs/resume.md`` advises."""

    def on_fit_start(self, trainer, pl_module):
        super().on_fit_start(trainer, pl_module)
        if len(trainer.optimizers[0].param_groups) > 1:
            self.make_trainable(pl_module.backbone)


def fit(folder, make, *more, path=None, plateau=False, **settings):
    """Train 4 epochs of 5 steps, and return what must be the same in a run that was stopped."""
    torch.manual_seed(0 if path is None else 1)
    own = make(folder)
    settings = {"max_epochs": 4, "strategy": "turbo", "num_sanity_val_steps": 0, "log_every_n_steps": 1, **settings}
    trainer = quiet_trainer(
        callbacks=[Prefetch(), *own, *more], default_root_dir=folder, **settings,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in own),
    )  # fmt: skip
    net, data = Net(plateau), TensorDataset(torch.arange(40.0).sin().view(10, 4))
    trainer.fit(
        net, DataLoader(data, 2, shuffle=True), DataLoader(data, 5), ckpt_path=path,
        **unpickling(False if path else None),
    )  # fmt: skip
    return {
        **end_of(trainer, "*=*.ckpt"),
        "rates": net.rates[-5:],
        "metrics": {name: trainer.callback_metrics[name] for name in ("val", "train_metric", "train_mean")},
        "callbacks": [_state(each) for each in own],
    }


def _state(callback):
    """Return a callback's state without the folder of its run."""
    state = dict(callback.state_dict())
    for name in ("dirpath", "current_score"):  # Lightning does not read these of a checkpoint
        state.pop(name, None)
    for name in ("best_model_path", "last_model_path", "kth_best_model_path"):
        if name in state:
            state[name] = Path(state[name]).name
    if "best_k_models" in state:
        state["best_k_models"] = {Path(each).name: score for each, score in state["best_k_models"].items()}
    return state


class Row(NamedTuple):
    """A row of the table: what resumes exactly, or why not."""

    make: object  # the callbacks of a run in a folder
    exact: tuple = (MID_EPOCH, AT_ITS_END)  # stops after which the resumed run is the same
    differs: tuple = ()  # stops after which it is not
    reason: str = ""
    warning: str = ""  # what is said then
    plateau: bool = False


TABLE = {
    "EarlyStopping": Row(lambda folder: [EarlyStopping("val", patience=2)]),
    "EarlyStopping of a training metric": Row(
        lambda folder: [EarlyStopping("train_metric", patience=9)], (AT_ITS_END,), (MID_EPOCH,),
        "the metric is the mean of the steps after the stop",
    ),
    "ModelCheckpoint of the best two": Row(
        lambda folder: [ModelCheckpoint(folder, "{epoch}", monitor="val", save_top_k=2)]
    ),
    "ModelCheckpoint by steps": Row(
        lambda folder: [ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)]
    ),
    "ModelCheckpoint of a mean over steps": Row(
        lambda folder: [ModelCheckpoint(folder, "{epoch}", monitor="train_mean")], (AT_ITS_END,), (MID_EPOCH,),
        "the mean is that of the steps after the stop",
    ),
    "StochasticWeightAveraging": Row(
        lambda folder: [callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=3)],
        (AT_ITS_END,), (MID_EPOCH,), "its scheduler loses an epoch of annealing",
    ),
    "WeightAveraging": Row(lambda folder: [callbacks.WeightAveraging()]),
    "EMAWeightAveraging": Row(lambda folder: [callbacks.EMAWeightAveraging(decay=0.7)]),
    "BackboneFinetuning": Row(
        lambda folder: [callbacks.BackboneFinetuning(1)], (), (MID_EPOCH, AT_ITS_END),
        "Lightning leaves the backbone frozen", "BackboneFinetuning: the optimizer has frozen parameters",
    ),
    "BackboneFinetuning that unfreezes again": Row(lambda folder: [UnfreezesAgain(1)]),
    "BackboneFinetuning before it unfreezes": Row(lambda folder: [callbacks.BackboneFinetuning(3)]),
    "GradientAccumulationScheduler": Row(lambda folder: [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]),
    "ReduceLROnPlateau": Row(lambda folder: [], plateau=True),
}  # fmt: skip
STOPS = [
    pytest.param(name, stop, id=f"{name}-{'mid-epoch' if stop is MID_EPOCH else 'end of epoch'}")
    for name, row in TABLE.items()
    for stop in (*row.exact, *row.differs)
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that returns the end of a row's run that never stopped."""

    @functools.cache
    def ended(name):
        return fit(tmp_path_factory.mktemp("whole"), TABLE[name].make, plateau=TABLE[name].plateau)

    return ended


@pytest.mark.parametrize(("name", "stop"), STOPS)
def test_a_state_within_an_epoch_resumes_as_the_table_says(name, stop, whole, tmp_path):
    row, expected = TABLE[name], whole(name)
    stops(fit, tmp_path, row.make, Preemption(), Sends(*stop), plateau=row.plateau)
    said = pytest.warns(TurboWarning, match=row.warning) if row.warning and stop in row.differs else nullcontext()
    with said:
        resumed = fit(tmp_path, row.make, path=Preemption.resume_path(tmp_path), plateau=row.plateau)
    with nullcontext() if stop in row.exact else pytest.raises(AssertionError):
        assert_same(resumed, expected)


class StopsIn(Callback):
    """Raises an error in a validation, and saves a checkpoint on it."""

    def __init__(self, path, hook):
        def fail(*_):
            raise RuntimeError("stopped")

        setattr(self, hook, fail)
        self.path = path

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("hook", "warns"), [("on_validation_batch_end", True), ("on_validation_end", False)])
def test_a_save_within_a_validation_of_averaged_weights_is_warned_of(hook, warns, tmp_path):
    def make(folder):
        return [callbacks.EMAWeightAveraging(decay=0.7)]

    path = tmp_path / "stopped.ckpt"
    warning = "EMAWeightAveraging has put the average in the place of the weights"
    with (
        pytest.warns(TurboWarning, match=warning) if warns else nullcontext(),
        pytest.raises(RuntimeError, match="stopped"),
    ):
        fit(tmp_path, make, StopsIn(path, hook))
    resumed, whole = (fit(tmp_path, make, path=each)["weights"] for each in (path, None))
    assert torch.equal(resumed["head.weight"], whole["head.weight"]) is not warns


class Records(Logger):
    """Keeps the values that are logged at each step."""

    name, version = "records", 0

    def __init__(self):
        super().__init__()
        self.steps = {}

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step):
        self.steps.setdefault(step, {}).update(metrics)


def test_the_rates_that_learning_rate_monitor_logs_go_on(tmp_path):
    def make(folder):
        return [callbacks.LearningRateMonitor("step")]

    whole, stopped, resumed = Records(), Records(), Records()
    fit(tmp_path, make, logger=whole)
    stops(fit, tmp_path, make, Preemption(), Sends(*MID_EPOCH), logger=stopped)
    fit(tmp_path, make, logger=resumed, path=Preemption.resume_path(tmp_path))
    rates = [{step: row["lr-SGD"] for step, row in each.steps.items() if "lr-SGD" in row}
             for each in (whole, stopped, resumed)]  # fmt: skip
    assert {**rates[1], **rates[2]} == rates[0]
    assert len(rates[0]) == 20
    assert not rates[1].keys() & rates[2].keys()


def test_timer_counts_the_time_before_the_stop(tmp_path):
    timers = [callbacks.Timer(timedelta(hours=1)) for _ in range(2)]
    stops(fit, tmp_path, lambda folder: timers[:1], Preemption(), Sends(*MID_EPOCH))
    path = Preemption.resume_path(tmp_path)
    fit(tmp_path, lambda folder: timers[1:], path=path)
    before = torch.load(path, weights_only=False)["callbacks"]["Timer"]["time_elapsed"]["train"]
    assert timers[1].time_elapsed("train") > before > 0


def test_learning_rate_finder_makes_a_resumed_run_begin_again(tmp_path, monkeypatch):
    """Lightning forgets the checkpoint in its search, but for the weights. Without the finder the run resumes."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    begins, first = Callback(), []
    begins.on_train_start = lambda trainer, module: first.append(trainer.global_step)

    def make(folder):
        return [callbacks.LearningRateFinder(num_training_steps=3, update_attr=False), begins]

    whole = fit(tmp_path, make)
    stops(fit, tmp_path, make, Preemption(), Sends(*MID_EPOCH))
    path = Preemption.resume_path(tmp_path)
    fit(tmp_path, make, path=path)
    resumed = fit(tmp_path, lambda folder: [begins], path=path)
    assert first == [0, 0, 0, 7]
    assert_same(resumed["weights"], whole["weights"])


@pytest.mark.parametrize("interval", [5, 2])
def test_reduce_lr_on_plateau_after_a_save_in_the_last_step_of_an_epoch(interval, tmp_path):
    """With ``val_check_interval=2``, no validation follows the fifth and last step of an epoch."""

    def make(folder):
        return [ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)]

    settings = {"plateau": True, "val_check_interval": interval}
    whole = fit(tmp_path, make, **settings)
    resumed = fit(tmp_path, make, path=tmp_path / "step=15.ckpt", **settings)
    assert_same(resumed["weights"], whole["weights"])
    assert resumed["rates"] == whole["rates"]


def test_model_checkpoint_by_steps_of_a_value_of_the_last_validation(tmp_path):
    def make(folder):
        return [ModelCheckpoint(folder, "{step}", monitor="val", every_n_train_steps=2, save_top_k=-1)]

    settings = {"val_check_interval": 4}
    whole = fit(tmp_path / "whole", make, **settings)
    folder = tmp_path / "stopped"
    stops(fit, folder, make, Preemption(), Sends("on_train_batch_start", 6), **settings)
    assert fit(folder, make, path=Preemption.resume_path(folder), **settings)["files"] == whole["files"]
