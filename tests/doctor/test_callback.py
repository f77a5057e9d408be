"""The Doctor in real Trainers: it changes no result, always ends cleanly, and has no cost afterwards."""

import cProfile
import gc
import io
import linecache
import os
import sys
import time
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_turbo
from lightning_turbo import ApexAMP, Doctor, PrefetchDataModule
from lightning_turbo.doctor.report import as_text
from tests.integration.doctor_runs import QUIET, SHORT, Base, Noisy, equal, images, rules, trained, trainer

pytestmark = QUIET


class TwoOptimizers(Noisy):
    """Manual optimization, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[-1])]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(images(48))


class Streamed(Noisy):
    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=4)


class Moded(Noisy):
    """With a TorchFunctionMode of the user."""

    def training_step(self, batch, batch_idx):
        with BaseTorchFunctionMode():
            return super().training_step(batch, batch_idx)


class Fast(PrefetchDataModule):
    def train_dataloader(self):
        return DataLoader(images(48), batch_size=4, shuffle=True, num_workers=2)


RUNS = {
    "accumulation": {"accumulate_grad_batches": 2},
    "two optimizers": {"model": TwoOptimizers},
    "stream": {"model": Streamed},
    "turbo": {"strategy": "turbo"},
    "mode": {"model": Moded},
    "O1": {"level": "O1"},
    "prefetched by workers": {"level": "O2", "data": Fast, "max_epochs": 2},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_doctor_changes_no_loss_or_weight(name):
    doctor = Doctor(**SHORT)
    assert equal(trained(**RUNS[name]), trained(doctor, **RUNS[name]))
    facts = doctor.report.facts
    assert (doctor.report.short, facts.timed, facts.seen.watched) == ("", 2, 3)
    sites = [finding.site for finding in doctor.report.findings if finding.rule == "host-sync"]
    lines = "".join(linecache.getline(site.file, site.line) for site in sites)
    assert name == "mode" or "self.losses.append(loss.item())" in lines
    assert min(facts.phases[phase] for phase in ("forward", "backward", "optimizer")) > 0
    assert len(facts.optimizers) == (2 if name == "two optimizers" else 1)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="needs torch 2.9")
@pytest.mark.parametrize(("set_to", "enabled"), [("tf32", True), ("ieee", False)])
def test_tf32_set_by_the_newer_interface_is_recognized(set_to, enabled):
    torch.backends.cuda.matmul.fp32_precision = set_to
    try:
        trained(doctor := Doctor(**SHORT))
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert doctor.report.facts.run.tf32 is enabled


class Clipping(Noisy):
    """Clips where ApexAMP has already unscaled the gradients."""

    def on_before_optimizer_step(self, optimizer):
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")


class ClippingByHand(TwoOptimizers):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super(TwoOptimizers, self).training_step(batch, batch_idx))
            nn.utils.clip_grad_value_(self.parameters(), 1.0)
            optimizer.step()


@pytest.mark.parametrize("model", [Clipping, ClippingByHand])
@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_clipping_gradients_unscaled_by_apex_amp_is_not_reported(model, loss_scale):
    doctor = Doctor(**SHORT)
    trainer(doctor, plugins=[ApexAMP("O1", loss_scale=loss_scale)]).fit(model())
    assert doctor.report.facts.seen.watched == 3
    assert "clip-before-unscale" not in rules(doctor)


class Keeping(Noisy):
    """Keeps large graphs: of one step in ``last`` and ``both``, of all steps in ``kept`` and ``total``."""

    def __init__(self):
        super().__init__()
        self.kept, self.total = [], 0.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for _ in range(2000):
            loss = loss * 1.0
        self.last = loss.clone()
        self.both = {"last": [self.last, loss * 2.0]}
        self.kept.append(loss.clone())
        self.total = self.total + loss
        return loss


def test_a_kept_graph_is_reported_as_growing_only_if_it_grows():
    trained(doctor := Doctor(**SHORT), model=Keeping)
    kept = {part.name: part.growing for part in doctor.report.facts.seen.retained}
    assert kept == {"self.last": False, "self.both": False, "self.kept": True, "self.total": True}


class Unrolled(Noisy):
    """Keeps the graph of one step, whose size varies."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for _ in range((0, 0, 0, 9, 3, 6)[batch_idx % 6]):
            loss = loss * 1.0
        self.last = loss.clone()
        return loss


def test_a_kept_graph_is_reported_as_growing_only_if_it_grows_in_each_step():
    trained(doctor := Doctor(**SHORT), model=Unrolled)
    assert [(part.name, part.growing) for part in doctor.report.facts.seen.retained] == [("self.last", False)]


INSTALLED = """
class Net(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("one", loss, prog_bar=True)
        self.log_dict({"two": loss, "three": 2 * loss}, prog_bar=True)
        return loss
"""


def test_a_value_that_an_installed_module_logs_has_its_line_and_not_that_of_the_script():
    file = "/environment/site-packages/some_package/net.py"
    exec(compile(INSTALLED, file, "exec"), names := {"__name__": "some_package.net", "Base": Base})
    trained(doctor := Doctor(**SHORT), model=names["Net"])
    (found,) = (each for each in doctor.report.findings if each.rule == "progress-bar-sync")
    assert {(place.site.file, place.site.line) for place in found.places} == {(file, 5), (file, 6)}


# Runs that are timed but not watched


class Frozen(Noisy):
    """An encoder in eval mode, whose fast path a TorchFunctionMode would disable."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(False)
        self.net = nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            x = self.encoder.eval()(batch[0])
        loss = self.net(x).square().mean()
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(32, 5, 8)), batch_size=4)


def compiled():
    module = Noisy()
    module.net = torch.compile(module.net, backend="eager")
    return module


def compiled_in_place():
    module = Noisy()
    module.net.compile(backend="eager")
    return module


class CompiledFunction(Noisy):
    """A compiled function whose first run leaves compiled code in the process."""

    error = staticmethod(torch.compile(lambda out: out.square().mean(), backend="aot_eager"))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.error(batch[0])


@pytest.mark.parametrize(("model", "note"), [
    (Noisy, ""), (Frozen, "fast path"), (compiled, "the model is compiled"),
    (compiled_in_place, "the model is compiled"),
    (CompiledFunction, "torch.compile has compiled code in this process"),
])  # fmt: skip
def test_models_that_watching_would_change_are_only_timed(model, note):
    doctor = Doctor(**SHORT if note else {"warmup": 1, "timed": 2, "watched": 0})
    assert equal(trained(model=model), trained(doctor, model=model))
    assert note in "".join(doctor.report.facts.notes)
    assert (doctor.report.short, doctor.report.facts.timed) == ("", 2)
    assert 0 < doctor.report.facts.waiting < 1
    assert "host-sync" not in rules(doctor)


class Sharded(SingleDeviceStrategy):
    """Stands for DeepSpeed's strategy, which inherits from a plain one and shards tensors."""

    __module__ = "lightning.pytorch.strategies.sharded"


def test_a_sharding_strategy_is_only_timed():
    trained(doctor := Doctor(**SHORT), strategy=Sharded("cpu"))
    assert "Sharded may split tensors over devices: the run was timed" in "".join(doctor.report.facts.notes)
    assert "host-sync" not in rules(doctor)


class Fetching(Noisy):
    """Fetches two batches in a step from ``dataloader_iter``."""

    def training_step(self, dataloader_iter):
        (batch, _, _), _ = next(dataloader_iter), next(dataloader_iter)
        with warnings.catch_warnings():
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_with_dataloader_iter_is_only_timed():
    doctor = Doctor(warmup=1, timed=2, watched=2)
    assert equal(trained(model=Fetching, max_steps=5), trained(doctor, model=Fetching, max_steps=5))
    facts = doctor.report.facts
    assert (doctor.report.short, facts.timed, facts.seen.watched) == ("", 2, 0)
    assert min(facts.phases[phase] for phase in ("data", "forward", "backward", "optimizer")) > 0
    assert "training_step(dataloader_iter) fetches its batches itself: the run was timed" in "".join(facts.notes)
    assert facts.batch > 0


def test_cprofile_records_the_same_calls_with_the_doctor():
    doctor, profile = Doctor(**SHORT), cProfile.Profile()
    profile.enable()
    trained(doctor)
    profile.disable()
    calls = {code.co_name: count for code, count, *_ in profile.getstats() if not isinstance(code, str)}
    assert calls["training_step"] == 12
    # cProfile uses a profile function before Python 3.12, and sys.monitoring since.
    assert ("progress-bar-sync" in rules(doctor)) == (sys.version_info >= (3, 12))


# How a run ends. The tests of the command have runs that fail, are interrupted, or are too short.


def test_a_second_fit_or_a_second_doctor_has_no_report():
    torch.manual_seed(7)
    first, second = Doctor(**SHORT), Doctor(**SHORT)
    runs, module = trainer(first, second), Noisy()
    runs.fit(module)
    report = first.report
    assert report is not None
    assert (second.report, second.superseded) == (None, True)
    runs.fit_loop.max_epochs = 2
    runs.fit(module)
    assert len(module.losses) == 24
    assert first.report is report
    assert runs.callbacks == []


class Validated(Noisy):
    def validation_step(self, batch, batch_idx):
        time.sleep(0.2)
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]).item())

    def val_dataloader(self):
        return DataLoader(images(48), batch_size=4)


def test_validation_and_epoch_ends_do_not_count_as_steps():
    doctor = Doctor(warmup=1, timed=4, watched=4)
    trained(doctor, model=Validated, max_epochs=3, limit_train_batches=5, val_check_interval=2, limit_val_batches=1)
    assert (doctor.report.short, doctor.report.facts.seen.watched) == ("", 4)
    assert doctor.report.facts.step < 0.2
    lines = [f.site.function for f in doctor.report.findings if f.rule == "host-sync" and f.site]
    assert set(lines) == {"training_step"}


def test_an_error_in_validation_ends_the_doctor():
    class Fails(Validated):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError("mine")

    doctor = Doctor(**SHORT)
    with pytest.raises(ZeroDivisionError):
        trained(doctor, model=Fails, val_check_interval=5)
    assert "was ended by ZeroDivisionError after 5 of the 6 steps" in doctor.report.short
    assert "host-sync" in rules(doctor)
    assert (sys.getprofile(), torch._C._len_torch_function_stack()) == (None, 0)


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    doctor = Doctor(json=tmp_path / "file" / "report.json", **SHORT)
    with pytest.warns(UserWarning, match="Doctor could not write its report"):
        module = trained(doctor)
    assert len(module.losses) == 12


class Named(Noisy):
    def training_step(self, batch, batch_idx):
        self.log("Größe", 1.0, prog_bar=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("encoding", "name"), [(None, "Größe"), ("ascii", r"Gr\xf6\xdfe")])
def test_the_report_is_printed_in_any_encoding(encoding, name, monkeypatch):
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding or "utf-8", write_through=True)
    # An object that replaces the standard output may have no encoding.
    monkeypatch.setattr(sys, "stdout", out if encoding else SimpleNamespace(write=out.write, flush=out.flush))
    trained(Doctor(**SHORT), model=Named)
    text = written.getvalue().decode()
    assert "The mean step takes" in text
    assert f"self.log('{name}', prog_bar=True)" in text


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"warmup": 0}, ValueError, "warmup: expected 1 steps or more, got 0"),
    ({"watched": 1}, ValueError, "watched: expected 2 steps or more, or 0, got 1"),
    ({"timed": True}, TypeError, "timed: expected a number of steps, got True"),
    ({"json": 3}, TypeError, r"Doctor\(json=3\): expected the path of the file to write, or None"),
    ({"minutes": -1}, ValueError, "minutes: expected a number of minutes, 0 or more, got -1"),
    ({"minutes": None}, ValueError, "minutes: expected a number of minutes, 0 or more, got None"),
])  # fmt: skip
def test_wrong_arguments_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        Doctor(**given)


# Cost after the report


HERE = os.path.join(os.path.dirname(lightning_turbo.__file__), "doctor") + os.sep
HEAVY = {"Session", "Timeline", "StepWatch", "CallTable", "Sources", "_Functions", "Sampler", "WorkerSamples"}


class Looks(Callback):
    """Checks the Trainer in each step, live objects, and the calls of the second epoch."""

    def __init__(self):
        self.seen, self.alive, self.batches, self.profile = [], [], [], cProfile.Profile()

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            self.profile.enable()

    def on_train_end(self, trainer, module):
        self.profile.disable()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches.append(weakref.ref(batch[0]))
        if trainer.global_step in (4, 7):
            gc.collect()
            own = {type(each) for each in gc.get_objects() if "turbo.doctor." in str(type(each).__module__)}
            self.alive.append({cls.__name__ for cls in own} & HEAVY)

    def on_before_backward(self, trainer, module, loss):
        doctor = any(isinstance(each, Doctor) for each in trainer.callbacks)
        modes, profiled = torch._C._len_torch_function_stack(), sys.getprofile() is not None
        self.seen.append((doctor, modes, profiled, type(trainer.profiler).__name__))


def test_the_doctor_removes_everything_from_the_trainer_after_its_steps():
    looks, doctor = Looks(), Doctor(**SHORT, minutes=0)
    module = trained(looks, doctor, max_epochs=2)
    assert set(looks.seen[:3]) == {(True, 0, False, "PassThroughProfiler")}
    assert set(looks.seen[3:6]) == {(True, 1, True, "PassThroughProfiler")}
    assert set(looks.seen[6:12]) == {(False, 0, False, "PassThroughProfiler")}
    assert looks.alive == [HEAVY, set()]
    codes = [code for code, *_ in looks.profile.getstats() if not isinstance(code, str)]
    assert "training_step" in {code.co_name for code in codes}
    assert [code.co_name for code in codes if code.co_filename.startswith(HERE)] == []
    reference, batches = weakref.ref(module), looks.batches
    del module, looks  # Lightning sets a method of the module on callbacks
    gc.collect()
    assert doctor.report is not None
    assert reference() is None
    assert [each for each in batches if each() is not None] == []


class Rollouts(IterableDataset):
    """Generates data before each epoch, whose length is not known in advance."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        time.sleep(0.5)
        yield from (images(1)[0] for _ in range(self.batches))


@pytest.mark.parametrize(("batches", "known"), [(4, True), (10**9, False)], ids=["short", "endless"])
def test_costs_of_an_epoch_of_unknown_length_are_reported_with_its_length(batches, known):
    class Generated(Noisy):
        def train_dataloader(self):
            return DataLoader(Rollouts(batches), batch_size=1)

        def on_train_batch_end(self, *args):
            self.trainer.should_stop = doctor.report is not None

    doctor = Doctor(warmup=1, timed=5, watched=2)
    trained(doctor, model=Generated, max_epochs=3)
    found = [each.level for each in doctor.report.findings if each.rule == "slow-first-batch"]
    assert found == (["warning"] if known else [])
    said = " ".join(as_text(doctor.report).split())
    assert ("What was seen of the fit, no whole epoch, takes" in said) == (not known)
    assert ("the end of the epoch, unknown, was not waited for" in said) == (not known)


def test_hooks_of_the_doctor_can_log():
    class Logs(Doctor):
        def on_train_batch_end(self, trainer, pl_module, *args):
            self.log("seen", 1.0)

    runs = trainer(doctor := Logs(**SHORT))
    runs.fit(Noisy())
    assert doctor.report is not None
    assert runs.logged_metrics["seen"] == 1.0
    assert not hasattr(doctor, "log"), "the module is not kept alive"


def test_an_error_before_training_is_raised_unchanged_without_a_report(tmp_path):
    class Fails(Validated):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError("mine")

    doctor, second = Doctor(**SHORT, json=tmp_path / "report.json"), Doctor(**SHORT)
    with pytest.raises(ZeroDivisionError):
        trained(doctor, second, model=Fails, num_sanity_val_steps=1)
    assert (doctor.report, second.report) == (None, None)
    assert list(tmp_path.iterdir()) == []
    assert (sys.getprofile(), torch._C._len_torch_function_stack()) == (None, 0)


def test_an_error_after_the_report_is_raised_unchanged():
    class Fails(Noisy):
        def on_train_end(self):
            raise ZeroDivisionError("mine")

    second = Doctor(**SHORT)
    with pytest.raises(ZeroDivisionError):
        trained(doctor := Doctor(**SHORT), second, model=Fails)
    assert doctor.report.short == ""
    assert second.report is None


# What the report waits for


class Late(Noisy):
    """An epoch of 12 steps, with a validation after each 8."""

    def validation_step(self, batch, batch_idx):
        time.sleep(0.02)

    def val_dataloader(self):
        return DataLoader(images(8), batch_size=4)


def seen_of(**more):
    doctor = Doctor(**SHORT, **{"minutes": 5, **more.pop("doctor", {})})
    trained(doctor, model=Late, max_epochs=2, **more)
    return doctor.report.facts.fit


def test_the_report_waits_for_the_border_of_an_epoch():
    fit = seen_of()
    assert (fit.is_epoch, fit.batches, fit.validations, fit.validated) == (True, 12, 1, 2)
    assert min(fit.of("steps"), fit.of("validation"), fit.of("hooks"), fit.of("first batch")) > 0
    assert fit.of("validation") > 0.04


def test_a_report_that_waits_for_nothing_comes_after_the_watched_steps():
    fit = seen_of(doctor={"minutes": 0})
    assert (fit.is_epoch, fit.batches, fit.validations) == (False, 6, 0)


def test_a_validation_is_waited_for_where_the_border_is_far(monkeypatch):
    # The validation after two more steps is 200 seconds away, and the end of the epoch 600.
    monkeypatch.setattr("lightning_turbo.doctor.session.Session.step_seconds", lambda self: 100.0)
    fit = seen_of(val_check_interval=8)
    assert (fit.is_epoch, fit.batches, fit.validations) == (False, 8, 1)


def test_the_report_comes_when_the_minutes_are_over():
    class Slow(Noisy):
        def training_step(self, batch, batch_idx):
            time.sleep(0.1)
            return super().training_step(batch, batch_idx)

    trained(doctor := Doctor(warmup=1, timed=8, watched=2, minutes=0.005), model=Slow)
    assert "The run was ended by the limit of minutes after" in doctor.report.short
    assert "the 0.005 minutes were over before everything was seen" in doctor.report.facts.notes


def test_the_lines_of_a_validation_are_seen_with_its_part():
    doctor = Doctor(**SHORT)
    trained(doctor, model=Late, max_epochs=2)
    lines = [each for each in doctor.report.facts.lines if each.part == "validation"]
    assert "time.sleep(0.02)" in {each.text for each in lines}


def test_a_loader_and_its_workers_are_as_they_were():
    loader = DataLoader(images(48), batch_size=4, num_workers=1, persistent_workers=True)
    before = dict(vars(loader))
    torch.manual_seed(7)
    runs = trainer(Doctor(**SHORT), max_epochs=2)
    runs.fit(Noisy(), loader)
    after = {name: value for name, value in vars(runs.train_dataloader).items() if name in before}
    assert "_get_iterator" not in vars(runs.train_dataloader)
    assert after["worker_init_fn"] is before["worker_init_fn"]
