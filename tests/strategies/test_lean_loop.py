"""The lean parts of the turbo strategies: the same calls, values, counters and bits as Lightning's own loop."""

import contextlib
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_turbo import ApexAMP, Doctor, ExactAccumulation, TurboStrategy
from lightning_turbo._trainer import supports_lean_loop
from lightning_turbo.errors import LightningMismatchError
from lightning_turbo.strategies.lean_loop import LeanOptimization, LeanResults
from tests.integration.resuming import assert_same
from tests.release.lean_sources import READ, digest
from tests.trainers import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`.*"),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*"),
    pytest.mark.filterwarnings("ignore:train_dataloader yielded None"),
    pytest.mark.filterwarnings("ignore:.*the value needs to be floating.*"),
]
if not supports_lean_loop():
    pytest.skip("the lean parts are not for this Lightning", allow_module_level=True)
MODULE_HOOKS = (
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "backward",
    "lr_scheduler_step", "on_train_epoch_start", "on_train_epoch_end", "on_validation_batch_end",
)  # fmt: skip
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
CALLBACK_HOOKS = tuple(name for name in dir(pl.Callback) if name.startswith("on_") and "checkpoint" not in name)


def recording(base, hooks, who):
    """Return a subclass that records each call of a hook: its name, the state of the module, and the counters."""

    def make(name):
        def hook(self, *args, **kwargs):
            trainer = self.trainer if isinstance(self, pl.LightningModule) else args[0]
            module = trainer.lightning_module
            loop = trainer.fit_loop.epoch_loop
            batch = args[-1] if name.endswith(("batch_start", "batch_end")) else None
            metrics = sorted(trainer.callback_metrics) if name.endswith("_end") else None  # which are computed then
            trainer.events.append(
                (who, name, module._current_fx_name, trainer.global_step, loop.batch_idx, loop.total_batch_idx, batch,
                 trainer.is_last_batch, metrics, torch.is_grad_enabled())
            )  # fmt: skip
            return getattr(super(cls, self), name)(*args, **kwargs)

        return hook

    cls = type(f"Recording{base.__name__}", (base,), {name: make(name) for name in hooks})
    return cls


class Stop(Exception):
    """Ends a run."""


class Net(pl.LightningModule):
    def __init__(self, scheduler="", skip=(), none=(), as_dict=False, log=True):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.scheduler, self.skip, self.none, self.as_dict, self.logs = scheduler, skip, none, as_dict, log
        self.losses = []

    def loss(self, batch):
        x, y = batch.values() if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(self.net(x).float(), y)

    def on_train_batch_start(self, batch, index):
        return -1 if index in self.skip else None

    def training_step(self, batch, index):
        if index in self.none:
            return None
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        if self.logs:
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            self.log("largest", next(self.parameters()).max(), reduce_fx="max", on_step=False, on_epoch=True)
            self.log("index", float(index), prog_bar=True)
            self.log("step only", loss, on_step=True, on_epoch=False, batch_size=index + 1)
            self.log("half", loss.half(), on_step=index >= 0)
            self.log("whole", torch.tensor(index))
            if index % 4 == 1:
                self.log("seldom", float(index))
            self.log("unlogged", loss, logger=False)
            self.log("graph", loss, enable_graph=True, on_step=True, on_epoch=index >= 0)
        return {"loss": loss, "extra": index} if self.as_dict else loss

    def on_train_batch_end(self, outputs, batch, index):
        if self.logs:
            self.log("step only", float(index))  # the name of another hook's value

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch))
        self.log("index", 100.0 + index, batch_size=4)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        if not self.scheduler:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.scheduler}}


class TwoOptimizers(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.detach().clone())
        self.log("loss", loss, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.Adam(self.net[4].parameters(), lr=1e-2)


class NoIndex(Net):
    def training_step(self, batch):
        return super().training_step(batch, 0)


class Raises(Net):
    """Raises an error in the middle of an epoch, after it has logged."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if index == 3:
            self.log("new", 1.0, prog_bar=True)
            raise Stop
        return loss


def without_hooks():
    model = Net()
    for hook in ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
                 "on_before_optimizer_step", "on_train_batch_end"):  # fmt: skip
        setattr(model, hook, None)
    return model


class Lbfgs(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=3)


class Notes(DummyLogger):
    """A logger that keeps the metrics of each call."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def log_metrics(self, metrics, step=None):
        self.notes.append((step, dict(metrics)))


class Read(pl.Callback):
    """Reads metrics as callbacks do, as rarely as a progress bar."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        loss = outputs["loss"].clone() if outputs and "loss" in outputs else None
        self.seen.append((index, loss, outputs and outputs.get("extra"), type(batch), module.training))
        if index % 3 == 1:
            self.seen.append((dict(trainer.progress_bar_metrics), dict(trainer.callback_metrics)))

    def note(self, trainer, module):
        metrics = trainer.callback_metrics, trainer.progress_bar_metrics, trainer.logged_metrics
        self.seen.append(tuple(map(dict, metrics)))

    on_train_epoch_end = on_validation_start = on_validation_end = note


class Logs(pl.Callback):
    """Logs before the batch that is skipped, too."""

    def on_train_batch_start(self, trainer, module, batch, index):
        module.log("started", float(index), prog_bar=True)


class Stops(pl.Callback):
    """Stops the run as Lightning's Timer does."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        trainer.should_stop = index == 5


class AccumulatesItself(TurboStrategy):
    """Its step is called for each batch of an accumulation window, as with DeepSpeed."""

    handles_gradient_accumulation = True

    def optimizer_step(self, optimizer, closure, model=None, **kwargs):
        if self.lightning_module.trainer.fit_loop._should_accumulate():
            return closure()
        return super().optimizer_step(optimizer, closure, model, **kwargs)


class Squares(torchmetrics.Metric):
    """A metric with a list and a tensor, whose value in a step is computed elsewhere."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value):
        self.seen.append(value.square())
        self.total += value

    def compute(self):
        return torch.stack(self.seen).sum() + self.total


class Metrics(Net):
    """Logs every kind of metric in training, and in the validation of several loaders."""

    def __init__(self):
        super().__init__(log=False)
        self.mean, self.lists, self.fresh = torchmetrics.MeanMetric(), Squares(), torchmetrics.SumMetric()
        self.validated = Squares()
        self.running = torchmetrics.RunningMean(window=3)  # holds another metric
        self.sum = self.mean + self.fresh
        self.wide = torchmetrics.MeanMetric().set_dtype(torch.float64)
        self.several = torchmetrics.MetricCollection([torchmetrics.MaxMetric(), torchmetrics.MinMetric()])
        self.with_weights = Weighted()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        value = loss.detach()
        self.lists(value)
        for metric in (self.mean, self.fresh, self.running, self.wide, self.several, self.with_weights):
            metric(value)
        self.log("mean", self.mean, on_step=True, on_epoch=True, prog_bar=True)
        self.log("lists", self.lists, on_step=True, on_epoch=index >= 0)
        self.log("epoch", self.fresh, on_step=False, on_epoch=True, batch_size=2)
        self.log("sum", self.sum, on_step=False, on_epoch=True)
        self.log("window", self.running, on_step=True)
        self.log("by hand", self.wide, metric_attribute="wide", on_epoch=True)
        self.log("weights", self.with_weights, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=True, on_epoch=True)
        self.log_dict({"a": value, "b": index / 3, "c": 7}, on_epoch=True, batch_size=index + 1)
        for how in ("sum", "min", torch.max):
            self.log(f"by {how}", value, reduce_fx=how, on_epoch=True)
        return loss

    def validation_step(self, batch, index, dataloader_idx=0):
        loss = self.loss(batch)
        self.validated.update(loss)
        self.log("val", loss, on_step=True, on_epoch=True)
        self.log("squares", self.validated, on_step=False, on_epoch=True)
        self.log(f"of loader {dataloader_idx}", loss * index, add_dataloader_idx=False, batch_size=3)


class Weighted(torchmetrics.MeanMetric):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))

    def update(self, value):
        super().update(value * self.factor)


def without_a_hook():
    callback = pl.Callback()
    callback.on_train_batch_start = callback.on_before_zero_grad = None
    return callback


def early():
    return EarlyStopping("loss_step", patience=0, mode="max", check_on_train_epoch_end=True)


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def batches(kind="list", count=38):
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(count, 6, generator=g), torch.randint(0, 3, (count,), generator=g))
    if kind == "some are None":
        return DataLoader(data, batch_size=4, collate_fn=none_or_batch)
    if kind == "stream of dicts":
        return DataLoader(Stream(data), batch_size=4, collate_fn=dict_of)
    return DataLoader(data, batch_size=4)


def dict_of(rows):
    x, y = zip(*rows, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


def none_or_batch(rows):
    x, y = map(torch.stack, zip(*rows, strict=True))
    return None if x[0, 0] > 0.5 else [x, y]


def fit(strategy, make=Net, data="list", hooks=MODULE_HOOKS, callbacks=(), resume=None, **settings):
    torch.manual_seed(1)
    notes, read = Notes(), Read()
    watch = recording(pl.Callback, CALLBACK_HOOKS, "callback")()
    model = make()
    model.__class__ = recording(type(model), hooks, "module")
    settings = {"max_epochs": 2, "log_every_n_steps": 2, **settings}
    trainer = quiet_trainer(strategy=strategy, logger=notes, callbacks=[watch, read, *callbacks], **settings)
    trainer.events = []
    validation = [batches(count=8)] * 2 if isinstance(model, Metrics) else batches(count=8)
    with contextlib.suppress(Stop):
        trainer.fit(model, batches(data), validation, ckpt_path=resume)
    return trainer, model, notes.notes, read.seen


def end_of(run):
    """Return everything that must be equal for both loops, bit for bit."""
    trainer, model, notes, seen = run
    return {
        "losses": model.losses, "module": dict(model.state_dict()), "notes": notes, "seen": seen,
        "loop": trainer.fit_loop.state_dict(), "callback": dict(trainer.callback_metrics),
        "bar": dict(trainer.progress_bar_metrics), "logged": dict(trainer.logged_metrics), "step": trainer.global_step,
    }  # fmt: skip


def compare(one, other):
    for left, right in zip(one[0].events, other[0].events, strict=True):
        assert left == right
    assert_same(end_of(one), end_of(other))


def stock(**settings):
    return TurboStrategy(lean=False, **settings)


lean = TurboStrategy  # on by default


def small_trainer(strategy, **settings):
    return quiet_trainer(strategy=strategy, **{"max_epochs": 1, "limit_val_batches": 0, **settings})


CASES = {
    "default": {},
    "transfer hooks": {"hooks": MODULE_HOOKS + TRANSFER_HOOKS},
    "no hook overridden": {"hooks": ()},
    "stream of dicts": {"data": "stream of dicts"},
    "accumulation": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
    "accumulated by the strategy": {"strategy": AccumulatesItself, "accumulate_grad_batches": 4},
    "some batches are None": {"data": "some are None"},
    "hooks of a callback set to None": {"callback": without_a_hook},
    "exact accumulation": {"accumulate_grad_batches": 4, "callback": ExactAccumulation},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "validation within the epoch": {"val_check_interval": 3},
    "validation by steps": {"val_check_interval": 7, "check_val_every_n_epoch": None},
    "scheduler per step": {"make": lambda: Net(scheduler="step"), "accumulate_grad_batches": 2},
    "skips the rest of the epoch": {"make": lambda: Net(skip=(6,)), "callback": Logs},
    "raises an error": {"make": Raises, "callback": Logs},
    "hooks set to None": {"make": without_hooks, "hooks": ()},
    "gradients stay": {"parts": {"release_gradients": False}},
    "returns None or a dict": {"make": lambda: Net(none=(0, 5), as_dict=True, scheduler="epoch")},
    "logs metrics": {"make": Metrics, "val_check_interval": 4},
    "logs metrics, accumulation": {"make": Metrics, "accumulate_grad_batches": 3, "precision": "bf16-mixed"},
    "two optimizers": {"make": TwoOptimizers},
    "no index": {"make": NoIndex},
    "closure called repeatedly": {"make": Lbfgs},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "max_steps": {"max_steps": 13, "max_epochs": -1},
    "limit": {"limit_train_batches": 3, "limit_val_batches": 1},
    "early stopping": {"callback": early, "max_epochs": 8},
    "should_stop": {"callback": Stops},
    "with the doctor": {"callback": lambda: Doctor(warmup=1, timed=2, watched=2)},
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
}


@pytest.mark.parametrize("name", CASES)
def test_the_lean_loop_calls_the_same_hooks_and_computes_the_same_values(name):
    runs = []
    for lean_or_not in ({"lean": False}, {}):
        case = dict(CASES[name])
        make = case.pop("strategy", TurboStrategy)
        parts = case.pop("parts", {})
        if callback := case.pop("callback", None):
            case["callbacks"] = [callback()]
        if level := case.pop("level", None):
            case["plugins"] = [ApexAMP(level, dtype=torch.bfloat16)]
        runs.append(fit(make(**lean_or_not, **parts), **case))
    assert len(runs[0][0].events) > 20
    compare(*runs)


@pytest.mark.parametrize(("first", "second", "at"), [(lean, stock, 5), (stock, lean, 5), (lean, lean, 10)])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, first, second, at):
    make = lambda: Net(scheduler="step", log=False)  # noqa: E731
    saved = {}
    for name, strategy in (("at", first), ("stock", stock)):
        fit(strategy(), make=make, max_epochs=3, max_steps=at)[0].save_checkpoint(tmp_path / name)
        saved[name] = torch.load(tmp_path / name, weights_only=False)
    for part in ("loops", "optimizer_states"):
        assert_same(saved["at"][part], saved["stock"][part])
    resumed, again = (fit(make_one(), make=make, max_epochs=3, resume=tmp_path / name)
                      for make_one, name in ((second, "at"), (stock, "stock")))  # fmt: skip
    assert resumed[0].events == again[0].events
    assert_same(resumed[1].losses, again[1].losses)
    assert resumed[0].global_step == again[0].global_step > at


def test_gradients_are_cleared_once_a_step(monkeypatch):
    cleared, clear = [], torch.optim.Optimizer.zero_grad
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda self: cleared.append(self) or clear(self))
    trainer = small_trainer(TurboStrategy(device_prefetch=False))
    trainer.fit(Net(), batches(), batches(count=8))
    assert len(cleared) == trainer.global_step - 1 > 5  # the last gradients stay, as in Lightning


def test_a_metric_that_is_in_place_is_not_moved_again(monkeypatch):
    moved, move = [], torchmetrics.Metric._apply
    monkeypatch.setattr(torchmetrics.Metric, "_apply", lambda self, *a, **k: moved.append(self) or move(self, *a, **k))

    class Logs(Net):
        def __init__(self):
            super().__init__(log=False)
            self.mean, self.lists = torchmetrics.MeanMetric(), Squares()

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            for metric in (self.mean, self.lists):
                metric.update(loss.detach())
                self.log(type(metric).__name__, metric, on_step=False, on_epoch=True)
            return loss

    counts = []
    for strategy in (stock(), lean()):
        moved.clear()
        small_trainer(strategy).fit(Logs(), batches(), batches(count=8))
        counts.append(len(moved))
    assert counts[0] - counts[1] >= 16  # ten steps
    assert counts[1] <= 8  # before the first step and after the last


class Fetches(TorchDispatchMode):
    """Counts the values that the host fetches."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class ShowsAll(Net):
    """Logs a value and a metric for the progress bar in each step."""

    def __init__(self):
        super().__init__(log=False)
        self.total = torchmetrics.SumMetric()  # its value is its state, which the next step changes in place

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.total(loss.detach())
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("total", self.total, prog_bar=True, on_step=True, on_epoch=True)
        return loss


class ReadsTwice(pl.Callback):
    """Reads the values of the bar after a batch, and before the next one has logged."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, index):
        if index in (3, 7):
            self.seen.append(dict(trainer.progress_bar_metrics))


def test_a_value_for_the_progress_bar_is_fetched_when_it_is_read():
    counts, seen = [], []
    for strategy in (stock, lean):
        for read in (pl.Callback(), ReadsTwice()):
            trainer, fetches = small_trainer(strategy(), callbacks=[read]), Fetches()
            with fetches:
                trainer.fit(ShowsAll(), batches(), batches(count=8))
            counts.append(fetches.count)
            shown = trainer.progress_bar_metrics
            assert {type(value) for value in shown.values()} == {float}
            seen.append((dict(shown), getattr(read, "seen", [])))
    assert seen[:2] == seen[2:]
    assert len(seen[3][1]) == 2
    stock_alone, _, lean_alone, lean_read = counts
    assert stock_alone - lean_alone >= 20  # ten steps, two values in each
    assert lean_read - lean_alone == 4  # two reads


@pytest.mark.parametrize("strategy", [stock, lean])
def test_a_metric_with_several_values_is_refused_for_the_progress_bar(strategy):
    class Pair(torchmetrics.MeanMetric):
        def compute(self):
            return super().compute().repeat(2)

    class LogsPair(Net):
        def __init__(self):
            super().__init__(log=False)
            self.pair = Pair()

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.pair(loss.detach())
            self.log("pair", self.pair, prog_bar=True)
            return loss

    with pytest.raises(ValueError, match="does not contain a single element"):
        small_trainer(strategy()).fit(LogsPair(), batches(), batches(count=8))


def on_meta(metric):
    metric.seen = [torch.zeros((), device="meta")]


@pytest.mark.parametrize("change", [
    lambda metric: metric.set_dtype(torch.float64),
    lambda metric: setattr(metric, "_forward_cache", {"a": torch.zeros(1)}),
    lambda metric: setattr(metric, "_computed", torch.zeros((), device="meta")),
    lambda metric: setattr(metric, "total", torch.zeros((), device="meta")),
    on_meta,
], ids=["dtype", "values", "cache", "state", "list"])  # fmt: skip
def test_a_metric_that_is_not_in_place_is_moved_as_in_lightning(change, monkeypatch):
    results, moved = [], []
    move = torchmetrics.Metric._apply
    monkeypatch.setattr(torchmetrics.Metric, "_apply", lambda self, *a, **k: moved.append(self) or move(self, *a, **k))
    for kind in (_ResultCollection, LeanResults):
        made = _ResultCollection(True)
        made.__class__ = kind
        metric = Squares()
        settings = {"on_step": True, "on_epoch": True, "batch_size": 1, "metric_attribute": "metric"}
        made.log("training_step", "metric", metric, **settings)
        change(metric)
        moved.clear()
        with contextlib.suppress(NotImplementedError):  # nothing can be moved from there
            made.log("training_step", "metric", metric, **settings)
        results.append([each is metric for each in moved])
    assert results == [[True]] * 2


def is_stock(trainer):
    return (
        type(trainer.fit_loop.epoch_loop) is _TrainingEpochLoop
        and type(trainer._logger_connector) is _LoggerConnector
        and type(trainer.fit_loop.epoch_loop._results) is _ResultCollection
        and not (trainer.strategy.transfer_is_plain or trainer.strategy.step_is_plain)
    )


def test_a_name_logged_with_changed_arguments_is_refused():
    class Changes(Net):
        def training_step(self, batch, index):
            self.log("value", 1.0, on_epoch=index == 3, reduce_fx=("mean", torch.mean)[index == 1])
            return super().training_step(batch, index)

    with pytest.raises(MisconfigurationException, match=r"self.log\(value, ...\)` twice in `training_step` with diff"):
        fit(lean(), make=Changes)


OWNERS = {
    "class": (lambda trainer: type(trainer.lightning_module), ("configure_gradient_clipping", "optimizer_zero_grad")),
    "class that moves": (lambda trainer: type(trainer.lightning_module), TRANSFER_HOOKS),
    "datamodule": (lambda trainer: trainer.datamodule, TRANSFER_HOOKS),
    "optimizer": (lambda trainer: trainer.optimizers[0], ("zero_grad",)),
    "strategy": (lambda trainer: trainer.strategy, ("batch_to_device", "training_step")),
    "plugin": (
        lambda trainer: trainer.precision_plugin,
        ("clip_gradients", "_clip_gradients", "optimizer_step", "pre_backward", "post_backward", "forward_context"),
    ),
}


@pytest.mark.filterwarnings("ignore:You have overridden `.*` in `LightningModule` but have passed in a")
@pytest.mark.parametrize("name", OWNERS)
def test_hooks_set_before_a_run_are_called(name):
    owner_of, hooks = OWNERS[name]

    class Sets(pl.Callback):
        def on_train_start(self, trainer, module):
            for hook in hooks:
                self.set(owner_of(trainer), hook)

        def set(self, owner, hook):
            found = getattr(owner, hook)
            setattr(owner, hook, lambda *args, **kwargs: called.append(hook) or found(*args, **kwargs))

    calls = []
    for strategy in (stock(), lean()):
        called = []
        trainer = small_trainer(strategy, callbacks=[Sets()], precision="bf16-mixed", limit_val_batches=1.0)
        datamodule = pl.LightningDataModule()
        datamodule.train_dataloader, datamodule.val_dataloader = batches, batches
        model = Net()
        model.__class__ = type("Fresh", (Net,), {})  # a class that is changed during this run
        trainer.fit(model, datamodule=datamodule)
        calls.append(called)
    assert set(calls[0]) == set(hooks)
    assert calls[0] == calls[1]


def test_values_are_logged_from_a_compiled_function():
    results = _ResultCollection(True)
    results.__class__ = LeanResults

    def step(value):
        results.log("training_step", "value", value, on_step=True, on_epoch=True, batch_size=2)
        return value + 1

    compiled = torch.compile(step, backend="eager")
    values = [torch.tensor(float(number)) for number in range(3)]
    assert [compiled(value).item() for value in values] == [1, 2, 3]
    assert {name: value.item() for name, value in results.metrics(False)["callback"].items()}["value_epoch"] == 1


@pytest.mark.parametrize("ends", ["well", "error", "error in on_exception"])
def test_the_lean_loop_is_removed_after_a_run_and_used_again_in_the_next(ends):
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            assert type(trainer.fit_loop.epoch_loop).__name__ == "LeanEpochLoop"
            if index == 3 and ends != "well":
                raise ValueError("stop here")

        def on_exception(self, trainer, module, exception):
            if ends == "error in on_exception":  # Lightning then skips teardown
                raise RuntimeError("stop here too")

    trainer, model = small_trainer(lean(), callbacks=[Fails()]), Net()
    with contextlib.nullcontext() if ends == "well" else pytest.raises((ValueError, RuntimeError), match="stop here"):
        trainer.fit(model, batches(), batches(count=8))
    assert is_stock(trainer) == (ends != "error in on_exception")
    ends = "well"
    trainer.fit(model, batches(), batches(count=8))
    trainer.validate(model, batches(count=8), verbose=False)
    assert is_stock(trainer)


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr("lightning_turbo.strategies.turbo.rank_zero_info", lines.append)
    return lines


def test_a_profiler_sees_the_same_actions_as_in_lightnings_loop(monkeypatch, said):
    actions = []
    for settings in ({"lean": False}, {}, {"lean": True}):
        profiler = SimpleProfiler()
        monkeypatch.setattr(profiler, "describe", lambda: None)
        fit(TurboStrategy(**settings), profiler=profiler)
        actions.append({name: len(times) for name, times in profiler.recorded_durations.items()})
    assert actions[0] == actions[1] == actions[2]
    assert sum("lean off: a profiler names every call" in text for text in said) == 2


class OwnLoop(_TrainingEpochLoop):
    def advance(self, data_fetcher):
        self.trainer.events.append("advance")
        return super().advance(data_fetcher)


class OwnOptimization(_AutomaticOptimization):
    def run(self, *args, **kwargs):
        self.trainer.events.append("run")
        return super().run(*args, **kwargs)


@pytest.mark.parametrize("own", [OwnLoop, OwnOptimization])
def test_a_custom_loop_is_not_replaced(own, said):
    strategy = TurboStrategy(device_prefetch=False)
    trainer = small_trainer(strategy)
    trainer.events = []
    if own is OwnLoop:
        trainer.fit_loop.epoch_loop = OwnLoop(trainer, trainer.min_steps, trainer.max_steps)
    else:
        trainer.fit_loop.epoch_loop.automatic_optimization = OwnOptimization(trainer)
    found = trainer.fit_loop.epoch_loop, trainer._signal_connector
    model = Net()
    model.on_train_start = lambda: trainer.events.append((trainer.fit_loop.epoch_loop, trainer._signal_connector))
    trainer.fit(model, batches(count=8), batches(count=8))
    assert trainer.events == [found, *["advance" if own is OwnLoop else "run"] * 2]
    assert said == [f"turbo: lean off: {own.__name__} replaces Lightning's training loop."]


class OwnConnector(_LoggerConnector):
    pass


def test_the_lean_loop_works_with_a_custom_logger_connector():
    runs = []
    for strategy in (stock(), lean()):
        trainer, model = small_trainer(strategy), Net()
        trainer._logger_connector = OwnConnector(trainer)
        loops = []
        model.on_train_end = lambda loops=loops, trainer=trainer: loops.append(type(trainer.fit_loop.epoch_loop))
        trainer.fit(model, batches(count=8), batches(count=8))
        runs.append((loops[0].__name__, type(trainer._logger_connector), dict(trainer.callback_metrics)))
    assert [loop for loop, *_ in runs] == ["_TrainingEpochLoop", "LeanEpochLoop"]
    assert runs[0][1] is runs[1][1] is OwnConnector
    assert_same(runs[0][2], runs[1][2])
    assert runs[0][2]


def test_a_step_without_a_loss_is_an_error_with_ddp():
    strategy = SimpleNamespace(training_step=lambda batch: None, post_training_step=lambda: None)
    trainer = SimpleNamespace(strategy=strategy, lightning_module=Net(), world_size=2, accumulate_grad_batches=1)
    optimization = LeanOptimization(trainer)
    with pytest.raises(RuntimeError, match="training_step returned None on one of several ranks; expected a loss"):
        optimization._forward({"batch": 1})
    trainer.world_size = 1
    assert optimization._forward({"batch": 1}).closure_loss is None


def test_an_untested_version_of_lightning_keeps_its_loop_and_refuses_lean_arguments(monkeypatch, said):
    monkeypatch.setattr(pl, "__version__", "2.6.7")  # a version that has not been compared
    with pytest.raises(LightningMismatchError, match=r"lean=True: expected Lightning 2\.6\.0, .* got 2\.6\.7\. Leave"):
        TurboStrategy(lean=True)
    trainer, model = small_trainer(TurboStrategy(device_prefetch=False)), Net()
    model.on_train_start = lambda: model.losses.append(is_stock(trainer))
    for _ in range(2):
        trainer.fit(model, batches(count=8), batches(count=8))
    assert model.losses[0] is True
    assert said == ["turbo: lean off: the training loop of Lightning 2.6.7 was not compared with the lean one."] * 2


def test_the_installed_version_of_lightning_is_one_that_the_lean_loop_supports():
    assert digest() in READ, "see tests/release/lean_sources.py"
