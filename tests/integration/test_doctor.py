"""The Doctor in real Trainers: it changes nothing, costs nothing afterwards, and ends well whatever happens."""

import cProfile
import gc
import json
import subprocess
import sys
import textwrap
import time
import weakref

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_turbo import Doctor, cli
from lightning_turbo.errors import TurboError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches .* is smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated.*"),
    pytest.mark.filterwarnings("ignore:You have turned on `Trainer.detect_anomaly=True.`.*"),
]
SHORT = {"warmup": 1, "timed": 2, "watched": 3}


class Noisy(LightningModule):
    """Dropout, batch norm, Adam and a few bad habits: whatever the doctor disturbed would show."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 4)
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x + torch.randn_like(x)), y)
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        if loss > 100:
            return None
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(48, 1, 6, 6, generator=generator), torch.randint(0, 4, (48,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)


def trainer(*callbacks, **more):
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
                "enable_model_summary": False, "accelerator": "cpu", **more}  # fmt: skip
    return Trainer(callbacks=list(callbacks), **settings)


def trained(*callbacks, model=Noisy, **more):
    torch.manual_seed(7)
    module = model()
    trainer(*callbacks, **more).fit(module)
    return module


def rules(doctor):
    return {finding.rule for finding in doctor.report.findings}


# What it changes: nothing


def equal(a, b):
    return a.losses == b.losses and all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("more", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}], ids=str)
def test_losses_and_weights_are_the_same_bit_for_bit(more):
    doctor = Doctor(**SHORT)
    assert equal(trained(**more), trained(doctor, **more))
    assert doctor.report.facts.watched == 3
    assert "host-sync" in rules(doctor)


def test_the_state_of_the_generator_is_the_same():
    trained()
    plain = torch.get_rng_state()
    trained(Doctor(**SHORT))
    assert torch.equal(plain, torch.get_rng_state())


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


def test_a_compiled_model_is_timed_only():
    class Compiled(Noisy):
        def __init__(self):
            super().__init__()
            self.net = torch.compile(self.net, backend="eager")

    doctor = Doctor(**SHORT)
    trained(doctor, model=Compiled)
    assert "compiled" in doctor.report.facts.notes[0]
    assert doctor.report.facts.operations == 0
    assert doctor.report.facts.timed == 2


def test_another_profiler_keeps_its_place():
    doctor, profile = Doctor(**SHORT), cProfile.Profile()
    profile.enable()
    trained(doctor)
    profile.disable()
    assert any("profile function" in note for note in doctor.report.facts.notes)
    assert "host-sync" in rules(doctor), "the modes watch all the same"
    assert "progress-bar-sync" not in rules(doctor)


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


# What it costs: nothing afterwards


class Hooks(Callback):
    """Looks at the Trainer in the middle of every step."""

    def __init__(self):
        self.seen = []

    def on_before_backward(self, trainer, pl_module, loss):
        doctor = any(isinstance(each, Doctor) for each in trainer.callbacks)
        modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
        self.seen.append((doctor, modes, sys.getprofile() is not None, type(trainer.profiler).__name__))


def test_it_takes_itself_out_after_its_steps():
    hooks, doctor = Hooks(), Doctor(**SHORT)
    before = sys.getprofile()
    trained(hooks, doctor)
    assert sys.getprofile() is before
    timing, watching, gone = hooks.seen[:3], hooks.seen[3:6], hooks.seen[6:]
    assert set(timing) == {(True, 0, False, "Recorder")}
    assert set(watching) == {(True, 1, True, "Recorder")}
    assert set(gone) == {(False, 0, False, "PassThroughProfiler")}
    assert len(gone) == 6


def test_no_memory_is_kept():
    kept = []

    class Remembers(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            kept.append(weakref.ref(batch[0]))

    doctor = Doctor(**SHORT)
    module = trained(doctor, Remembers())
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert doctor.report is not None
    assert reference() is None
    assert [each for each in kept if each() is not None] == []


@pytest.mark.slow
def test_the_steps_after_its_own_cost_less_than_one_per_cent():
    class Long(Noisy):
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(2400, 1, 6, 6), torch.zeros(2400).long()), batch_size=4)

    class Clock(Callback):
        def __init__(self):
            self.times = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.times.append(time.perf_counter())

    def median(*callbacks):
        clock = Clock()
        trained(clock, *callbacks, model=Long)
        gaps = sorted(b - a for a, b in zip(clock.times[50:], clock.times[51:], strict=False))
        return gaps[len(gaps) // 2]

    median()
    ratios = sorted(median(Doctor(**SHORT)) / median() for _ in range(7))
    # What it does afterwards is nothing at all (see above); the clock's own noise on shared cores is the rest.
    assert ratios[0] < 1.01


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
    import signal

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        trained(doctor, model=Stops)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from there on
    assert "KeyboardInterrupt" in doctor.report.short
    assert sys.getprofile() is None
    assert torch._C._len_torch_function_stack() == 0


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


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"warmup": 0}, ValueError, r"Doctor\(warmup=0\): at least 1 is needed"),
        ({"timed": -1}, ValueError, r"Doctor\(timed=-1\): at least 1"),
        ({"watched": 1}, ValueError, r"Doctor\(watched=1\): at least 2"),
        ({"warmup": 1.5}, TypeError, r"Doctor\(warmup=1.5\): a whole number"),
        ({"timed": True}, TypeError, r"Doctor\(timed=True\): a whole number"),
    ],
)
def test_wrong_counts_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        Doctor(**given)


# What it mends


class Slow(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        time.sleep(0.005)
        return torch.ones(1, 6, 6), i % 4


class Sick(Noisy):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def train_dataloader(self):
        return DataLoader(Slow(), batch_size=4)


class Settings(Callback):
    """What can be mended, before each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        grads = any(parameter.grad is not None for parameter in pl_module.parameters())
        self.seen.append((torch.is_anomaly_enabled(), trainer.train_dataloader.num_workers, grads))


def test_what_is_safe_is_mended_and_undone(monkeypatch):
    monkeypatch.setattr("lightning_turbo.doctor.inspection.cores", lambda: 2)
    doctor, settings = Doctor(fix=True, **SHORT), Settings()
    torch.manual_seed(7)
    module = Sick()
    each = trainer(settings, doctor, detect_anomaly=True, max_epochs=2)
    each.fit(module)
    mended = {finding.rule: finding.mended for finding in doctor.report.findings if finding.mended}
    assert "off for the rest" in mended["anomaly-mode"]
    assert "num_workers=1 from the next epoch" in mended["workers"]
    assert "released after each optimizer step" in mended["gradients-kept"]
    assert settings.seen[5] == (True, 0, True)
    assert settings.seen[8] == (False, 1, False), "the second epoch"
    assert (each.train_dataloader.num_workers, each.train_dataloader.prefetch_factor) == (0, None)
    assert not torch.is_anomaly_enabled()
    assert all(not optimizer._optimizer_step_post_hooks for optimizer in each.optimizers)


def test_nothing_is_mended_unasked():
    doctor, settings = Doctor(**SHORT), Settings()
    trained(settings, doctor, model=Sick, detect_anomaly=True, max_epochs=2, limit_train_batches=7)
    assert {finding.mended for finding in doctor.report.findings} == {""}
    assert settings.seen[-1] == (True, 0, True)


def test_what_was_mended_is_undone_after_an_error():
    class Fails(Sick):
        def training_step(self, batch, batch_idx):
            if batch_idx == 7:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    doctor = Doctor(fix=True, **SHORT)
    torch.manual_seed(7)
    each = trainer(doctor, detect_anomaly=True, max_epochs=2)
    with pytest.raises(ZeroDivisionError):
        each.fit(Fails())
    assert each.train_dataloader.num_workers == 0
    assert not torch.is_anomaly_enabled()


def test_released_gradients_leave_the_numbers_as_they_are():
    class Keeps(Noisy):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    doctor = Doctor(fix=True, **SHORT)
    assert equal(trained(model=Keeps), trained(doctor, model=Keeps))
    assert any(finding.mended for finding in doctor.report.findings)


# The command

SCRIPT = """
import sys
import torch
from {lightning} import LightningModule, Trainer
from torch.utils.data import DataLoader

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if "fail" in sys.argv and batch_idx == 5:
            raise ValueError("the user's own")
        loss = self.net(batch).mean()
        self.last = loss.item()
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    print("arguments", sys.argv[1:])
    if "none" in sys.argv:
        sys.exit(3)
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False, accelerator="cpu")
    if "idle" in sys.argv:
        sys.exit("nothing to do")
    trainer.fit(Model(), DataLoader(torch.ones(48, 4), batch_size=4))
"""


def arguments(tmp_path, *own, lightning="lightning.pytorch", options=()):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(lightning=lightning)))
    return ["doctor", "--warmup", "1", "--timed", "2", "--watched", "3", *options, str(script), "--", *own]


def test_a_script_is_examined(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, "--lr", "1", options=["--out", "here"])) == 0
    told = capsys.readouterr()
    assert "arguments ['--lr', '1']" in told.out
    assert "host-sync  train.py:15" in told.out
    assert "report in here/doctor.html" in told.err
    report = json.loads((tmp_path / "here" / "doctor.json").read_text())
    assert report["findings"][0]["place"] == "train.py:15"
    assert (tmp_path / "here" / "doctor.html").read_text().startswith("<!DOCTYPE html>")


def test_a_script_under_lightnings_other_name_is_examined(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "lightning_turbo"]
    done = subprocess.run(
        command + arguments(tmp_path, lightning="pytorch_lightning"),
        capture_output=True, text=True, timeout=150, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "host-sync  train.py:15" in done.stdout


def test_a_failing_script_keeps_its_traceback_and_status(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, "fail")) == 1
    told = capsys.readouterr()
    lines = told.err.splitlines()
    first = lines.index("Traceback (most recent call last):")
    assert "train.py" in lines[first + 1], "the doctor's own frames are not in it"
    assert "ValueError: the user's own" in lines
    assert "was ended by ValueError after 5 of the 6 steps" in " ".join(told.out.split())
    assert "host-sync  train.py:15" in told.out


@pytest.mark.parametrize(
    ("argument", "status", "words"),
    [("none", 3, "it made no Trainer"), ("idle", 1, "its Trainer never began to train")],
)
def test_a_script_without_training_is_told_so_and_keeps_its_status(tmp_path, argument, status, words, capsys):
    assert cli.main(arguments(tmp_path, argument)) == status
    assert f"train.py was not examined: {words}" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_refused(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path / "gone.py")]) == 2
    assert "gone.py' is no file" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--watched", "1", "x.py"], ["--json", "x.py"]])
def test_wrong_options_are_refused(arguments, tmp_path, capsys):
    (tmp_path / "x.py").write_text("raise SystemExit(0)")
    assert cli.main(["doctor", *arguments]) == 2
    assert "lightning-turbo: error: " in capsys.readouterr().err


def test_only_reports_of_the_doctor_are_replaced(tmp_path):
    from lightning_turbo.doctor import script

    (tmp_path / "nothing.py").write_text("")
    for name in ("doctor.html", "doctor-2.json", "doctor_notes.html", "doctor.py"):
        (tmp_path / name).write_text("")
    before = sys.argv, list(sys.path)
    assert script.run(tmp_path / "nothing.py", out=tmp_path) == 0
    assert (sys.argv, sys.path) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["doctor.py", "doctor_notes.html", "nothing.py"]
    assert issubclass(TurboError, Exception)
    assert script.doctors() == [], "outside of a run the entry point gives nothing"


RANKS = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

torch.set_num_threads(1)

class Wrapper:
    def __init__(self, loader):
        self.loader = loader
    def __len__(self):
        return len(self.loader)
    def __iter__(self):
        return iter(self.loader)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.spare = torch.nn.Linear(4, 1), torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch).mean() + 0 * self.spare(batch[:, :1]).mean().detach()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return Wrapper(DataLoader(torch.ones(48, 4), batch_size=4))

trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, devices=2,
                  enable_model_summary=False, accelerator="cpu", strategy="ddp_find_unused_parameters_true")
trainer.fit(Model())
print("rank", trainer.global_rank, "has trained with", [type(each).__name__ for each in trainer.callbacks])
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_the_first_of_two_ranks_is_examined(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "lightning_turbo", "doctor", "--warmup", "1", "--timed", "2",
         "--watched", "3", str(tmp_path / "ranks.py")],
        capture_output=True, text=True, timeout=170, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0 has trained with []" in done.stdout
    assert "rank 1 has trained with []" in done.stdout
    assert done.stdout.count("lightning-turbo doctor:") == 1
    findings = json.loads((tmp_path / "runs" / "doctor" / "doctor.json").read_text())["findings"]
    found = {(each["rule"], each["level"]) for each in findings}
    assert ("lost-sampler", "error") in found
    assert ("unused-parameters", "warning") in found
    assert {rule for rule, _ in found} == {"lost-sampler", "unused-parameters"}
