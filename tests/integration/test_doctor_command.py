"""``lightning-turbo doctor``: a script is examined as it is, and ends as it would have."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from lightning_turbo import cli
from lightning_turbo.doctor.command import examine
from lightning_turbo.doctor.script import make_callbacks, run_script
from tests.integration.doctor_runs import QUIET

pytestmark = QUIET


SCRIPT = """
import os
import signal
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
        if "stop" in sys.argv and batch_idx == 5:
            os.kill(os.getpid(), signal.SIGINT)
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
    if "stop early" in sys.argv:
        os.kill(os.getpid(), signal.SIGINT)
    if "idle" in sys.argv:
        sys.exit("nothing to do")
    trainer.fit(Model(), DataLoader(torch.ones(8 if "brief" in sys.argv else 48, 4), batch_size=4))
    if "late" in sys.argv:
        sys.exit(3)
    if "twice" in sys.argv:
        trainer = Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                          enable_model_summary=False, accelerator="cpu")
        trainer.fit(Model(), DataLoader(torch.ones(48, 4), batch_size=4))
"""


LINE = 1 + SCRIPT.strip().splitlines().index("        self.last = loss.item()")


def arguments(tmp_path, *own, lightning="lightning.pytorch", options=()):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.strip().format(lightning=lightning))
    return ["doctor", "--warmup", "1", "--timed", "2", "--watched", "3", *options, str(script), "--", *own]


def test_a_script_is_examined(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, "--lr", "1", options=["--out", "here"])) == 0
    told = capsys.readouterr()
    assert "arguments ['--lr', '1']" in told.out
    assert f"train.py:{LINE}" in told.out
    assert "report in here/doctor.html" in told.err
    report = json.loads((tmp_path / "here" / "doctor.json").read_text())
    assert report["findings"][0]["place"] == f"train.py:{LINE}"
    assert (tmp_path / "here" / "doctor.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_a_script_under_lightnings_other_name_is_examined(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "lightning_turbo"]
    done = subprocess.run(
        command + arguments(tmp_path, lightning="pytorch_lightning"),
        capture_output=True, text=True, timeout=150, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"train.py:{LINE}" in done.stdout


def test_a_failing_script_keeps_its_traceback_and_status(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, "fail")) == 1
    told = capsys.readouterr()
    lines = told.err.splitlines()
    first = lines.index("Traceback (most recent call last):")
    assert "train.py" in lines[first + 1], "the doctor's own frames are not in it"
    assert "ValueError: the user's own" in lines
    assert "was ended by ValueError after 5 of the 6 steps" in " ".join(told.out.split())
    assert f"train.py:{LINE}" in told.out


@pytest.fixture
def interrupts():
    """Puts the handler of Ctrl-C back: Lightning ignores it once it has seen one."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_ctrl_c_in_training_keeps_lightnings_status_and_what_was_found(tmp_path, capsys, interrupts):
    assert cli.main(arguments(tmp_path, "stop")) == 1, "Lightning's own, as without the doctor"
    told = capsys.readouterr()
    assert "was ended by KeyboardInterrupt after 5 of the 6 steps" in " ".join(told.out.split())
    assert f"train.py:{LINE}" in told.out
    assert "report in runs/doctor/doctor.html" in told.err


def test_ctrl_c_outside_of_training_has_the_status_of_shells(tmp_path, capsys, interrupts):
    assert cli.main(arguments(tmp_path, "stop early")) == 130
    told = capsys.readouterr().err
    assert "it ended in KeyboardInterrupt before a Trainer began to train." in told


def test_a_script_that_trains_for_two_steps_is_told_so(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, "brief")) == 0
    assert "ended after 2 of the 6 steps" in " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "runs" / "doctor" / "doctor.json").read_text())
    assert (report["timed"], report["watched"]) == (1, 0)
    assert "No step was watched." in (tmp_path / "runs" / "doctor" / "doctor.html").read_text()


@pytest.mark.parametrize("then", ["", "\n    os.rmdir(os.getcwd())"], ids=["kept", "removed"])
def test_the_report_is_where_the_reader_is_though_the_script_goes_elsewhere(then, tmp_path, capsys):
    given = arguments(tmp_path)
    script = tmp_path / "train.py"
    (tmp_path / "work").mkdir()
    goes = script.read_text().replace("    print(", f"    os.chdir({str(tmp_path / 'work')!r})\n    print(", 1)
    script.write_text(goes + then)
    assert cli.main(given) == 0
    assert "report in runs/doctor/doctor.html\n" in capsys.readouterr().err
    assert (tmp_path / "runs" / "doctor" / "doctor.html").is_file()


def test_a_script_behind_a_link_finds_its_files_as_under_python(tmp_path, capfd):
    for name in ("own", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "train.py").write_text("import sys\nprint(__file__, sys.path[0])")
    link = tmp_path / "linked" / "train.py"
    link.symlink_to(tmp_path / "own" / "train.py")
    subprocess.run([sys.executable, link], check=True, timeout=60)
    told = capfd.readouterr().out
    assert told == f"{link} {tmp_path / 'own'}\n"
    assert cli.main(["doctor", str(link)]) == 0
    assert capfd.readouterr().out == told


def test_a_script_that_exits_after_training_keeps_its_status(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, "late")) == 3
    assert "report in runs/doctor/doctor.html" in capsys.readouterr().err


def test_each_trainer_of_a_script_has_a_report_of_its_own(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, "twice")) == 0
    assert capsys.readouterr().out.count("0 errors, 1 warning") == 2
    reports = [
        json.loads((tmp_path / "runs" / "doctor" / f"{name}.json").read_text()) for name in ("doctor", "doctor-2")
    ]
    assert [each["watched"] for each in reports] == [3, 3]


@pytest.mark.parametrize(
    ("argument", "status"),
    [("none", 3), ("idle", 1)],
)
def test_a_script_without_training_is_told_so_and_keeps_its_status(tmp_path, argument, status, capsys):
    assert cli.main(arguments(tmp_path, argument)) == status
    assert "train.py was not examined: it ended before a Trainer began to train." in capsys.readouterr().err


def test_an_error_before_training_is_named(tmp_path, capsys):
    (tmp_path / "old.py").write_text("import lightning.pytorch as pl\npl.Trainer(gpus=1)")
    assert cli.main(["doctor", str(tmp_path / "old.py")]) == 1
    told = capsys.readouterr().err
    assert "old.py was not examined: it ended in TypeError before a Trainer began to train." in told


def test_a_script_that_is_not_there_is_refused(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path / "gone.py")]) == 2
    assert "gone.py' is not a file" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file", "file/within", "holds_a_folder"])
def test_a_place_that_cannot_hold_the_report_is_refused_before_the_script_runs(place, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "holds_a_folder" / "doctor.html").mkdir(parents=True)
    assert cli.main(arguments(tmp_path, options=["--out", place])) == 2
    told = capsys.readouterr()
    assert "arguments" not in told.out
    assert told.err.startswith(f"lightning-turbo: error: out='{place}': expected a folder to write reports to (")
    assert len(told.err.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.filterwarnings("ignore:Doctor could not write its report")
def test_a_report_that_cannot_be_written_is_not_taken_for_a_run_without_training(tmp_path, capsys):
    given = arguments(tmp_path, options=["--out", "gone"])
    script = tmp_path / "train.py"
    script.write_text(f"import os\nos.rmdir('gone')\nopen('gone', 'w').close()\n{script.read_text()}")
    assert cli.main(given) == 1
    told = capsys.readouterr().err
    assert f"a report could not be written to {tmp_path / 'gone'}; the warning above says why" in told
    assert "never began to train" not in told


@pytest.mark.filterwarnings("ignore:Doctor could not write its report")
def test_a_full_disk_leaves_no_half_report_and_no_status_of_success(tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # less than the page takes
    try:
        assert cli.main(arguments(tmp_path, options=["--out", "out"])) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "a report could not be written" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [(["-m"], "--module"), (["--out", "here"], "--out"), (["--watched", "4", "--out", "here"], "--out, --watched")],
)
def test_options_for_a_script_are_refused_without_one(options, named, tmp_path, capsys):
    assert cli.main(["doctor", *options]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        f"lightning-turbo: error: without a script there is nothing for {named} to do; give one, or leave it out\n"
    )
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("arguments", [["--watched", "1", "x.py"], ["--json", "x.py"]])
def test_wrong_options_are_refused(arguments, tmp_path, capsys):
    (tmp_path / "x.py").write_text("raise SystemExit(0)")
    assert cli.main(["doctor", *arguments]) == 2
    assert "lightning-turbo: error: " in capsys.readouterr().err


def test_an_option_that_has_gone_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments(tmp_path, options=["--fix"]))
    assert "--fix has gone; leave it out, and make the changes that the report names" in capsys.readouterr().err


def test_only_reports_of_the_doctor_are_replaced(tmp_path):
    (tmp_path / "nothing.py").write_text("")
    for name in ("doctor.html", "doctor-2.json", "doctor_notes.html", "doctor.py"):
        (tmp_path / name).write_text("")
    before = sys.argv, list(sys.path)
    assert examine(tmp_path / "nothing.py", out=tmp_path) == 0
    assert (sys.argv, sys.path) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["doctor.py", "doctor_notes.html", "nothing.py"]


def test_a_package_is_examined_as_by_python_m(tmp_path, capsys, monkeypatch):
    (tmp_path / "own").mkdir()
    source = SCRIPT.strip().format(lightning="lightning.pytorch")
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "__main__.py").write_text(f"{source}\n    print(__package__, sys.argv)")
    monkeypatch.setitem(sys.modules, "own", None)
    monkeypatch.delitem(sys.modules, "own")
    assert cli.main(["doctor", "--warmup", "1", "--timed", "2", "-m", "own", "--", "--lr", "1"]) == 0
    told = capsys.readouterr().out
    assert f"own ['{tmp_path / 'own' / '__main__.py'}', '--lr', '1']" in told
    assert f"own/__main__.py:{LINE}" in told


class Counts(Callback):
    """What another command may add to the Trainers of a script."""

    steps = 0

    def on_train_batch_end(self, *given):
        Counts.steps += 1


@pytest.mark.parametrize(
    ("own", "status", "steps"), [([], 0, 12), (["fail"], 1, 5), (["late"], 3, 12), (["none"], 3, 0)]
)
def test_any_callbacks_can_be_added_to_the_trainers_of_a_script(own, status, steps, tmp_path, monkeypatch):
    path = Path(arguments(tmp_path)[-2])
    monkeypatch.setattr(Counts, "steps", 0)
    before = sys.argv, list(sys.path)
    ending = run_script(path, own, lambda: [Counts()])
    assert (ending.status, Counts.steps) == (status, steps)
    assert isinstance(ending.error, ValueError) == ("fail" in own)
    assert (sys.argv, sys.path) == before
    assert make_callbacks() == [], "outside of a run the entry point gives nothing"


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
with open(f"rank-{trainer.global_rank}", "w") as file:
    file.write(str([type(each).__name__ for each in trainer.callbacks]))
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
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["[]", "[]"]
    assert done.stdout.count("lightning-turbo doctor:") == 1
    findings = json.loads((tmp_path / "runs" / "doctor" / "doctor.json").read_text())["findings"]
    found = {(each["rule"], each["level"]) for each in findings}
    assert ("lost-sampler", "error") in found
    assert ("unused-parameters", "warning") in found
    assert {rule for rule, _ in found} == {"lost-sampler", "unused-parameters"}
