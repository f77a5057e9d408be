"""The Doctor in real Trainers: it changes nothing, and ends well whatever happens."""

import cProfile
import io
import linecache
import signal
import sys
import time

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_turbo import ApexAMP, Doctor, PrefetchDataModule
from tests.integration import doctor_runs
from tests.integration.doctor_runs import QUIET, SHORT, Noisy, equal, rules, trained, trainer

pytestmark = QUIET
RUNS = doctor_runs.__file__


@pytest.mark.parametrize("more", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}], ids=str)
def test_losses_and_weights_are_the_same_bit_for_bit(more):
    doctor = Doctor(**SHORT)
    assert equal(trained(**more), trained(doctor, **more))
    assert doctor.report.facts.watched == 3
    assert "host-sync" in rules(doctor)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch 2.9 brought it")
@pytest.mark.parametrize(("set_to", "told"), [("tf32", True), ("ieee", False)])
def test_tf32_may_be_set_by_either_interface(set_to, told):
    class Own(Noisy):
        def setup(self, stage):
            torch.backends.cuda.matmul.fp32_precision = set_to

    doctor = Doctor(**SHORT)
    try:
        trained(doctor, model=Own)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert doctor.report.facts.tf32 is told
    torch.set_float32_matmul_precision("high")
    try:
        trained(doctor := Doctor(**SHORT))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert doctor.report.facts.tf32


class Fed(Noisy):
    """Without its own data, and without any habit that a level of apex would refuse."""

    train_dataloader = LightningModule.train_dataloader


class Digits(LightningDataModule):
    def __init__(self, workers):
        super().__init__()
        self.workers = workers

    def train_dataloader(self):
        data = Noisy().train_dataloader().dataset
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=self.workers)


class FastDigits(PrefetchDataModule, Digits):
    """The same, with prefetching."""


@pytest.mark.parametrize("data", [Digits, FastDigits])
@pytest.mark.parametrize(("level", "workers"), [("O0", 0), ("O1", 0), ("O2", 0), ("O3", 0), ("O1", 2)])
def test_losses_and_weights_are_the_same_at_every_level(level, workers, data):
    def run(*callbacks):
        torch.manual_seed(7)
        module = Fed()
        plugins = [ApexAMP(level, dtype=torch.bfloat16)]
        trainer(*callbacks, plugins=plugins, max_epochs=2 if workers else 1).fit(module, data(workers))
        return module

    doctor = Doctor(**SHORT)
    assert equal(run(), run(doctor))
    assert doctor.report.facts.watched == 3
    assert "host-sync" in rules(doctor)


class Fast(LightningModule):
    """A frozen encoder in eval mode, whose fast path a function mode would close."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(False)
        self.net = nn.Linear(8, 4)
        self.losses = []

    def training_step(self, batch, batch_idx):
        self.encoder.eval()
        with torch.no_grad():
            x = self.encoder(batch[0])
        loss = self.net(x).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(32, 5, 8)), batch_size=4)


def test_fast_paths_of_attention_stay_open():
    doctor = Doctor(**SHORT)
    assert equal(trained(model=Fast), trained(doctor, model=Fast))
    assert "fast path" in doctor.report.facts.notes[0]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_timed_only(in_place):
    class Compiled(Noisy):
        def __init__(self):
            super().__init__()
            if in_place:
                self.net.compile(backend="eager")
            else:
                self.net = torch.compile(self.net, backend="eager")

    doctor = Doctor(**SHORT)
    trained(doctor, model=Compiled)
    assert "compiled" in doctor.report.facts.notes[0]
    assert "host-sync" not in rules(doctor)
    assert doctor.report.facts.timed == 2


def test_a_run_with_code_that_an_earlier_one_compiled_is_timed_only():
    error = torch.compile(lambda out: out.square().mean(), backend="aot_eager")

    class Compiled(Noisy):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + error(batch[0])

    first, doctor = trained(model=Compiled), Doctor(**SHORT)
    assert equal(first, trained(doctor, model=Compiled))
    assert "host-sync" not in rules(doctor)
    assert "torch.compile has compiled code in this process" in doctor.report.facts.notes[0]
    torch._dynamo.reset()
    trained(doctor := Doctor(**SHORT))
    assert "host-sync" in rules(doctor)


def test_cprofile_sees_all_that_it_sees_without_the_doctor():
    doctor, profile = Doctor(**SHORT), cProfile.Profile()
    profile.enable()
    trained(doctor)
    profile.disable()
    calls = {code.co_name: count for code, count, *_ in profile.getstats() if not isinstance(code, str)}
    assert calls["training_step"] == len(trained().losses)
    # It is a profile function before Python 3.12, and of a kind of its own since.
    assert ("progress-bar-sync" in rules(doctor)) == (sys.version_info >= (3, 12))


def test_modes_of_the_user_keep_their_place():
    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    class Moded(Noisy):
        def training_step(self, batch, batch_idx):
            with Count():
                return super().training_step(batch, batch_idx)

    doctor = Doctor(**SHORT)
    trained(doctor, model=Moded)
    assert Count.calls > 12
    assert "host-sync" in rules(doctor)


# Loops of other kinds


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


@pytest.mark.parametrize("model", [TwoOptimizers, Streamed])
def test_other_kinds_of_loops_are_examined_and_not_changed(model):
    doctor = Doctor(**SHORT)
    assert equal(trained(model=model), trained(doctor, model=model))
    assert doctor.report.short == ""
    assert doctor.report.facts.watched == 3
    (line,) = {finding.site.line for finding in doctor.report.findings if finding.rule == "host-sync" and
               finding.what.startswith(".item()")}  # fmt: skip
    assert "self.losses.append(loss.item())" in linecache.getline(__file__ if model is TwoOptimizers else RUNS, line)
    assert len(doctor.report.facts.optimizers) == (2 if model is TwoOptimizers else 1)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        for _ in range(9):
            torch.ones(300, 300) @ torch.ones(300, 300)
        return gradient


def test_backward_by_hand_is_backward():
    class Manual(TwoOptimizers):
        def manual_backward(self, loss, *args, **kwargs):
            super().manual_backward(SlowBackward.apply(loss), *args, **kwargs)

    doctor = Doctor(**SHORT)
    trained(doctor, model=Manual)
    phases = doctor.report.facts.phases
    assert phases["backward"] > phases["forward"] > 0


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


def test_a_doctor_may_time_only():
    doctor = Doctor(warmup=1, timed=4, watched=0)
    assert equal(trained(), trained(doctor))
    assert (doctor.report.short, doctor.report.facts.timed, doctor.report.facts.watched) == ("", 4, 0)
    assert 0 < doctor.report.facts.waiting < 1
    assert "host-sync" not in rules(doctor)


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
    doctor = Doctor(**SHORT)
    trained(doctor, model=Shapes)
    torch._dynamo.reset()
    assert {"recompiles", "graph-breaks"} <= rules(doctor)
    assert doctor.report.facts.recompiled >= 4
    assert sum(doctor.report.facts.graph_breaks.values()) >= 1
    trained(doctor := Doctor(**SHORT))
    assert not {"recompiles", "graph-breaks"} & rules(doctor), "another run's are not this one's"


def test_a_second_fit_is_left_alone():
    torch.manual_seed(7)
    doctor = Doctor(**SHORT)
    runs, module = trainer(doctor), Noisy()
    runs.fit(module)
    report = doctor.report
    runs.fit_loop.max_epochs = 2
    runs.fit(module)
    assert len(module.losses) == 24
    assert doctor.report is report
    assert runs.callbacks == []


# How it ends


def test_a_run_that_is_too_short_says_so(capsys):
    doctor = Doctor()
    trained(doctor, limit_train_batches=5)
    assert "ended after 5 of the 17 steps" in doctor.report.short
    assert "2 were timed and 0 watched" in doctor.report.short
    assert "5 of the 17" in capsys.readouterr().out


def test_findings_of_a_run_that_fails_are_told_and_the_error_goes_its_way(capsys):
    class Fails(Noisy):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5:
                raise ZeroDivisionError("mine")
            return super().training_step(batch, batch_idx)

    doctor = Doctor(**SHORT)
    with pytest.raises(ZeroDivisionError, match="mine"):
        trained(doctor, model=Fails)
    assert "was ended by ZeroDivisionError after 5 of the 6 steps" in doctor.report.short
    assert "host-sync" in rules(doctor)
    assert sys.getprofile() is None
    assert torch._C._len_torch_function_stack() == 0


def test_ctrl_c_while_watching_leaves_nothing_behind(monkeypatch):
    class Stops(Noisy):
        def training_step(self, batch, batch_idx):
            if batch_idx == 4:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    doctor = Doctor(**SHORT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        trained(doctor, model=Stops)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from there on
    assert "KeyboardInterrupt" in doctor.report.short
    assert sys.getprofile() is None
    assert torch._C._len_torch_function_stack() == 0


def test_a_validation_that_fails_leaves_nothing_behind():
    class Fails(Noisy):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError("mine")

        def val_dataloader(self):
            return DataLoader(self.train_dataloader().dataset, batch_size=4)

    with pytest.raises(ZeroDivisionError, match="mine"):
        trained(Doctor(**SHORT), model=Fails, val_check_interval=2, num_sanity_val_steps=0)
    assert sys.getprofile() is None


def test_validation_and_epochs_in_between_are_no_steps():
    class Validates(Noisy):
        def validation_step(self, batch, batch_idx):
            time.sleep(0.2)
            self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]).item())

        def val_dataloader(self):
            return DataLoader(self.train_dataloader().dataset, batch_size=4)

    doctor = Doctor(warmup=1, timed=4, watched=4)
    trained(doctor, model=Validates, max_epochs=3, limit_train_batches=5, val_check_interval=2, limit_val_batches=1)
    assert doctor.report.short == ""
    assert doctor.report.facts.watched == 4
    assert doctor.report.facts.step < 0.2
    lines = [f.site.function for f in doctor.report.findings if f.rule == "host-sync" and f.site]
    assert set(lines) == {"training_step"}


def test_the_second_doctor_leaves_to_the_first():
    first, second = Doctor(**SHORT), Doctor(**SHORT)
    trained(first, second)
    assert first.report is not None
    assert second.report is None
    assert second.superseded


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    doctor = Doctor(html=tmp_path / "file" / "report.html", **SHORT)
    with pytest.warns(UserWarning, match="Doctor could not write its report"):
        module = trained(doctor)
    assert len(module.losses) == 12


def test_letters_that_the_terminal_lacks_do_not_end_the_run(monkeypatch):
    class Named(Noisy):
        def training_step(self, batch, batch_idx):
            self.log("Größe", 1.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

    told = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", told)
    module = trained(Doctor(**SHORT), model=Named)
    told.flush()
    assert len(module.losses) == 12
    assert rb"self.log('Gr\xf6\xdfe', prog_bar=True)" in told.buffer.getvalue()


def test_a_standard_output_of_ones_own_gets_the_report(monkeypatch):
    class Tee:
        def write(self, text):
            told.append(text)

        def flush(self):
            pass

    told = []
    monkeypatch.setattr(sys, "stdout", Tee())
    assert len(trained(Doctor(**SHORT)).losses) == 12
    assert "The mean step takes" in "".join(told)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"warmup": 0}, ValueError, "warmup: expected 1 steps or more, got 0"),
        ({"timed": -1}, ValueError, "timed: expected 1 steps or more, got -1"),
        ({"watched": 1}, ValueError, "watched: expected 2 steps or more, or 0, got 1"),
        ({"warmup": 1.5}, TypeError, "warmup: expected a number of steps, got 1.5"),
        ({"timed": True}, TypeError, "timed: expected a number of steps, got True"),
        ({"fix": True}, TypeError, r"Doctor\(fix=True\): there is no such argument. It was removed: make the change"),
        ({"patience": 3}, TypeError, r"Doctor\(patience=3\): there is no such argument\.$"),
        ({"html": True}, TypeError, r"Doctor\(html=True\): expected the path of the file to write, or None"),
        ({"json": 3}, TypeError, r"Doctor\(json=3\): expected the path of the file to write, or None"),
    ],
)
def test_wrong_arguments_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        Doctor(**given)
