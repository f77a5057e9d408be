"""The Doctor in real Trainers: it changes nothing, ends well whatever happens, costs nothing afterwards."""

import cProfile
import gc
import io
import linecache
import os
import signal
import sys
import time
import weakref

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_turbo
from lightning_turbo import ApexAMP, Doctor, PrefetchDataModule
from tests.integration.doctor_runs import QUIET, SHORT, Noisy, equal, rules, trained, trainer

pytestmark = QUIET


class TwoOptimizers(Noisy):
    """Manual optimization, as a GAN has it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(36, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer, net in zip(self.optimizers(), (self.net, lambda x: self.other(x.flatten(1))), strict=True):
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for i in range(48):
            yield torch.randn(1, 6, 6, generator=generator), i % 4


class Streamed(Noisy):
    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=4)


class Count(TorchFunctionMode):
    """A mode of the user's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Moded(Noisy):
    def training_step(self, batch, batch_idx):
        with Count():
            return super().training_step(batch, batch_idx)


class Fed(Noisy):
    """Without its own data, and without any habit that a level of apex would refuse."""

    train_dataloader = LightningModule.train_dataloader


class Digits(LightningDataModule):
    def __init__(self, workers=0):
        super().__init__()
        self.workers = workers

    def train_dataloader(self):
        data = Noisy().train_dataloader().dataset
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=self.workers)


class FastDigits(PrefetchDataModule, Digits):
    """The same, with prefetching."""


RUNS = {
    "float32": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "accumulation": {"accumulate_grad_batches": 2},
    "two optimizers": {"model": TwoOptimizers},
    "stream": {"model": Streamed},
    "mode": {"model": Moded},
    **{level: {"model": Fed, "level": level, "data": Digits} for level in ("O0", "O1", "O2", "O3")},
    "prefetched": {"model": Fed, "level": "O2", "data": FastDigits},
    "workers": {"model": Fed, "level": "O1", "data": lambda: FastDigits(2), "max_epochs": 2},
}


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_weights_are_the_same_bit_for_bit(name):
    def run(*callbacks):
        settings = dict(RUNS[name])
        model, data, level = (settings.pop(key, None) for key in ("model", "data", "level"))
        plugins = [ApexAMP(level, dtype=torch.bfloat16)] if level else None
        torch.manual_seed(7)
        module = (model or Noisy)()
        trainer(*callbacks, plugins=plugins, **settings).fit(module, datamodule=data and data())
        return module

    doctor = Doctor(**SHORT)
    assert equal(run(), run(doctor))
    facts = doctor.report.facts
    assert (doctor.report.short, facts.timed, facts.watched) == ("", 2, 3)
    sites = [finding.site for finding in doctor.report.findings if finding.rule == "host-sync"]
    lines = "".join(linecache.getline(site.file, site.line) for site in sites)
    assert name == "mode" or "self.losses.append(loss.item())" in lines
    assert facts.phases["backward"] > 0
    assert len(facts.optimizers) == (2 if name == "two optimizers" else 1)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch 2.9 brought it")
@pytest.mark.parametrize(("set_to", "told"), [("tf32", True), ("ieee", False)])
def test_tf32_may_be_set_by_the_newer_interface(set_to, told):
    class Own(Noisy):
        def setup(self, stage):
            torch.backends.cuda.matmul.fp32_precision = set_to

    doctor = Doctor(**SHORT)
    try:
        trained(doctor, model=Own)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert doctor.report.facts.tf32 is told


# Runs that are timed and not watched


class Fast(Noisy):
    """A frozen encoder in eval mode, whose fast path a function mode would close."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(False)
        self.net = nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        self.encoder.eval()
        with torch.no_grad():
            x = self.encoder(batch[0])
        loss = self.net(x).square().mean()
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(32, 5, 8)), batch_size=4)


class Compiled(Noisy):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class CompiledInPlace(Noisy):
    def __init__(self):
        super().__init__()
        self.net.compile(backend="eager")


class CompiledFunction(Noisy):
    """Its first run has left compiled code in the process."""

    error = staticmethod(torch.compile(lambda out: out.square().mean(), backend="aot_eager"))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.error(batch[0])


@pytest.mark.parametrize(("model", "note"), [
    (Noisy, ""), (Fast, "fast path"), (Compiled, "the model is compiled"), (CompiledInPlace, "the model is compiled"),
    (CompiledFunction, "torch.compile has compiled code in this process"),
])  # fmt: skip
def test_what_watching_would_change_is_timed_only(model, note):
    doctor = Doctor(**SHORT if note else {"warmup": 1, "timed": 2, "watched": 0})
    assert equal(trained(model=model), trained(doctor, model=model))
    assert note in "".join(doctor.report.facts.notes)
    assert (doctor.report.short, doctor.report.facts.timed) == ("", 2)
    assert 0 < doctor.report.facts.waiting < 1
    assert "host-sync" not in rules(doctor)


def test_cprofile_sees_all_that_it_sees_without_the_doctor():
    doctor, profile = Doctor(**SHORT), cProfile.Profile()
    profile.enable()
    trained(doctor)
    profile.disable()
    calls = {code.co_name: count for code, count, *_ in profile.getstats() if not isinstance(code, str)}
    assert calls["training_step"] == 12
    # It is a profile function before Python 3.12, and of a kind of its own since.
    assert ("progress-bar-sync" in rules(doctor)) == (sys.version_info >= (3, 12))


class Probe(Callback):
    """Trains a layer of the module by itself, as online evaluation does."""

    def on_fit_start(self, trainer, module):
        module.probe, module.spare = nn.Linear(36, 4), nn.Linear(36, 4)
        self.optimizer = torch.optim.SGD(module.probe.parameters(), lr=0.1)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        F.cross_entropy(module.probe(batch[0].flatten(1)), batch[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_what_a_callback_trains_is_not_unused():
    trained(doctor := Doctor(**SHORT), Probe())
    assert [each.name for each in doctor.report.facts.unused] == ["spare.weight", "spare.bias"]


def test_recompilations_and_graph_breaks_are_counted():
    class Shapes(Noisy):
        def __init__(self):
            super().__init__()
            self.error = torch.compile(self.compute_error, backend="eager", dynamic=False)

        def compute_error(self, x):
            torch._dynamo.graph_break()
            return x.square().mean()

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.error(batch[0][0, 0, : 1 + batch_idx % 6])

    torch._dynamo.reset()
    trained(doctor := Doctor(**SHORT), model=Shapes)
    torch._dynamo.reset()
    assert {"recompiles", "graph-breaks"} <= rules(doctor)
    facts = doctor.report.facts
    assert sum(facts.recompilations.values()) >= 4
    assert all(__file__ in place for place in [*facts.recompilations, *facts.graph_breaks])
    trained(doctor := Doctor(**SHORT))
    assert not {"recompiles", "graph-breaks"} & rules(doctor), "another run's are not this one's"


# How it ends


def test_a_second_fit_and_a_second_doctor_are_left_alone():
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


def test_a_run_that_is_too_short_says_so(capsys):
    doctor = Doctor()
    trained(doctor, limit_train_batches=5)
    assert "ended after 5 of the 17 steps" in doctor.report.short
    assert "2 were timed and 0 watched" in doctor.report.short
    assert "5 of the 17" in capsys.readouterr().out


@pytest.mark.parametrize(("raised", "ends"), [
    (ZeroDivisionError, ZeroDivisionError), (KeyboardInterrupt, SystemExit), (None, ZeroDivisionError),
])  # fmt: skip
def test_a_run_that_fails_leaves_nothing_behind_and_its_findings_are_told(raised, ends):
    class Fails(Noisy):
        def training_step(self, batch, batch_idx):
            if raised and batch_idx == 5:
                raise raised("mine")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError("mine")

        def val_dataloader(self):
            return DataLoader(self.train_dataloader().dataset, batch_size=4)

    doctor, handler = Doctor(**SHORT), signal.getsignal(signal.SIGINT)
    with pytest.raises(ends):
        trained(doctor, model=Fails, val_check_interval=1.0 if raised else 5)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from there on
    name = (raised or ends).__name__
    assert f"was ended by {name} after 5 of the 6 steps" in doctor.report.short
    assert "host-sync" in rules(doctor)
    assert (sys.getprofile(), torch._C._len_torch_function_stack()) == (None, 0)


def test_validation_and_epochs_in_between_are_no_steps():
    class Validates(Noisy):
        def validation_step(self, batch, batch_idx):
            time.sleep(0.2)
            self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]).item())

        def val_dataloader(self):
            return DataLoader(self.train_dataloader().dataset, batch_size=4)

    doctor = Doctor(warmup=1, timed=4, watched=4)
    trained(doctor, model=Validates, max_epochs=3, limit_train_batches=5, val_check_interval=2, limit_val_batches=1)
    assert (doctor.report.short, doctor.report.facts.watched) == ("", 4)
    assert doctor.report.facts.step < 0.2
    lines = [f.site.function for f in doctor.report.findings if f.rule == "host-sync" and f.site]
    assert set(lines) == {"training_step"}


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    doctor = Doctor(html=tmp_path / "file" / "report.html", **SHORT)
    with pytest.warns(UserWarning, match="Doctor could not write its report"):
        module = trained(doctor)
    assert len(module.losses) == 12


class Tee:
    """A standard output of the user's own."""

    def __init__(self):
        self.told = ""

    def write(self, text):
        self.told += text

    def flush(self):
        pass


@pytest.mark.parametrize("encoding", [None, "ascii"])
def test_any_terminal_gets_the_report(encoding, monkeypatch):
    class Named(Noisy):
        def training_step(self, batch, batch_idx):
            self.log("Größe", 1.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

    out = io.TextIOWrapper(io.BytesIO(), encoding) if encoding else Tee()
    monkeypatch.setattr(sys, "stdout", out)
    module = trained(Doctor(**SHORT), model=Named)
    out.flush()
    assert len(module.losses) == 12
    told = out.buffer.getvalue().decode() if encoding else out.told
    assert "The mean step takes" in told
    name = r"Gr\xf6\xdfe" if encoding else "Größe"
    assert f"self.log('{name}', prog_bar=True)" in told


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"warmup": 0}, ValueError, "warmup: expected 1 steps or more, got 0"),
        ({"watched": 1}, ValueError, "watched: expected 2 steps or more, or 0, got 1"),
        ({"timed": True}, TypeError, "timed: expected a number of steps, got True"),
        ({"fix": True}, TypeError, r"Doctor\(fix=True\): there is no such argument. It was removed: make the change"),
        ({"patience": 3}, TypeError, r"Doctor\(patience=3\): there is no such argument\.$"),
        ({"json": 3}, TypeError, r"Doctor\(json=3\): expected the path of the file to write, or None"),
    ],
)
def test_wrong_arguments_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        Doctor(**given)


# What it costs afterwards


HERE = os.path.join(os.path.dirname(lightning_turbo.__file__), "doctor") + os.sep
HEAVY = {"Session", "Watch", "CallTable", "Sources", "Origins", "_Functions"}


class Looks(Callback):
    """Looks at the Trainer, at the objects that are alive and at the calls of the doctor's functions in each step."""

    def __init__(self):
        self.seen, self.alive, self.calls, self.batches = [], [], [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.stop()
        if trainer.global_step in (4, 7, 11):
            gc.collect()
            own = {type(each) for each in gc.get_objects() if "turbo.doctor." in str(type(each).__module__)}
            self.alive.append(len({cls.__name__ for cls in own} & HEAVY))
        self.batches.append(weakref.ref(batch[0]))
        if trainer.global_step >= 8:  # with the step in which the epoch ends, to which Lightning holds the profiler
            self.calls.append(set())
            sys.setprofile(self.note)

    def on_before_backward(self, trainer, module, loss):
        doctor = any(isinstance(each, Doctor) for each in trainer.callbacks)
        modes = torch._C._len_torch_function_stack()
        profiled = sys.getprofile() not in (None, self.note)
        self.seen.append((doctor, modes, profiled, type(trainer.profiler).__name__))

    def on_train_end(self, trainer, module):
        self.stop()

    def stop(self):
        if sys.getprofile() == self.note:  # and not the doctor's
            sys.setprofile(None)

    def note(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(HERE):
            self.calls[-1].add(frame.f_code.co_name)


def test_it_leaves_the_trainer_after_its_steps_with_all_that_it_measured_with():
    looks, doctor, before = Looks(), Doctor(**SHORT), sys.getprofile()
    try:
        module = trained(looks, doctor, max_epochs=2)
    finally:
        looks.stop()
    assert sys.getprofile() is before
    assert set(looks.seen[:3]) == {(True, 0, False, "Recorder")}
    assert set(looks.seen[3:6]) == {(True, 1, True, "Recorder")}
    assert set(looks.seen[6:]) == {(False, 0, False, "PassThroughProfiler")}
    assert looks.alive[0] >= 6
    assert looks.alive[1:] == [0, 0]
    last = {"profile", "_end", "mark", "<listcomp>", "_current"}
    assert looks.calls == [set()] * 3 + [last] + [set()] * 12
    reference, batches = weakref.ref(module), looks.batches
    del module, looks  # Lightning gives callbacks a method of the module
    gc.collect()
    assert doctor.report is not None
    assert reference() is None
    assert [each for each in batches if each() is not None] == []
