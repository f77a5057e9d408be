"""``lightning-turbo doctor``: a script is examined as it is, and ends as it would have."""

import json
import re
import resource
import signal
import subprocess
import sys

import pytest
import torch

from lightning_turbo import cli
from tests.integration.doctor_runs import QUIET

pytestmark = QUIET


SCRIPT = """
import os
import signal
import sys
import torch
from {lightning} import Trainer
from {lightning}.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

class Wrapper:
    def __init__(self, loader):
        self.loader = loader
    def __iter__(self):
        return iter(self.loader)

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        {step}
        loss = self.layer(batch).mean()
        self.last = loss.item()
        return loss

if __name__ == "__main__":
    print("arguments", sys.argv[1:])
    settings = {{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "limit_val_batches": 0, "logger": False,
                "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}}
    loader = DataLoader(torch.ones(48, 32), batch_size=4)
    {before}
    Trainer(**settings).fit(Model(), loader)
    {after}
""".strip()
LINE = 1 + SCRIPT.splitlines().index("        self.last = loss.item()")


def source(*, lightning="lightning.pytorch", step="", before="", after=""):
    """The script, with lines for three of its places."""
    return SCRIPT.format(lightning=lightning, step=step, before=before, after=after)


def arguments(tmp_path, *own, options=(), **places):
    script = tmp_path / "train.py"
    script.write_text(source(**places))
    return ["doctor", "--warmup", "1", "--timed", "2", "--watched", "3", *options, str(script), "--", *own]


KEEP = ["--keep-going"]


def test_a_script_is_examined_and_ended_after_the_report(tmp_path, capsys):
    status = cli.main(arguments(
        tmp_path, "--lr", "1", options=["--out", "here"], step="print('step', batch_idx)", after="print('behind fit')",
    ))  # fmt: skip
    assert status == 0
    told = capsys.readouterr()
    assert re.findall(r"step (\d+)", told.out) == ["0", "1", "2", "3", "4", "5"], "those that it looks at, and no more"
    assert "behind fit" not in told.out
    assert "train.py was ended after the report; --keep-going lets it run to its own end" in told.err
    assert "arguments ['--lr', '1']" in told.out
    assert f"train.py:{LINE}" in told.out
    assert "report in here/doctor.txt" in told.err
    report = json.loads((tmp_path / "here" / "doctor.json").read_text())
    assert f"train.py:{LINE}" in [finding["place"] for finding in report["findings"]]
    assert (tmp_path / "here" / "doctor.txt").read_text().startswith("lightning-turbo doctor: ")


def run_command(tmp_path, **places):
    """Run it in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "lightning_turbo", *arguments(tmp_path, **places)],
        capture_output=True, text=True, timeout=170, cwd=tmp_path, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_script_under_lightnings_other_name_is_examined(tmp_path):
    done = run_command(tmp_path, lightning="pytorch_lightning")
    assert done.returncode == 0, done.stderr
    assert f"train.py:{LINE}" in done.stdout


@pytest.fixture
def interrupts():
    """Puts the handler of Ctrl-C back: Lightning ignores it once it has seen one."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


REPORT, ABSENT = "report in runs/doctor/doctor.txt\n", "train.py was not examined: it ended"
FAIL, STOP = "raise ValueError('own')", "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(("places", "status", "said", "error"), [
    ({"after": "sys.exit(3)"}, 3, f"train.py:{LINE}", REPORT),
    ({"step": f"if batch_idx == 5: {FAIL}"}, 1, "was ended by ValueError after 5 of the 6 steps", REPORT),
    # Lightning's own status
    ({"step": f"if batch_idx == 5: {STOP}"}, 1, "was ended by KeyboardInterrupt after 5 of the 6 steps", REPORT),
    ({"before": "settings['limit_train_batches'] = 2"}, 0,
     "ended after 2 of the 6 steps that the doctor needs: 1 were timed and 0 watched", REPORT),
    ({"before": "sys.exit(3)"}, 3, "", f"{ABSENT} before a Trainer began to train."),
    ({"before": "Trainer(**settings), sys.exit('no')"}, 1, "", f"{ABSENT} before a Trainer began to train."),
    ({"before": "Trainer(gpus=1)"}, 1, "", f"{ABSENT} in TypeError before a Trainer began to train."),
    # As shells have it
    ({"before": STOP}, 130, "", f"{ABSENT} in KeyboardInterrupt before a Trainer began to train."),
])  # fmt: skip
def test_a_script_keeps_its_end_and_status(places, status, said, error, tmp_path, capsys, interrupts):
    before = sys.argv, list(sys.path)
    assert cli.main(arguments(tmp_path, options=KEEP, **places)) == status
    assert (sys.argv, sys.path) == before
    assert (sys.getprofile(), torch._C._len_torch_function_stack()) == (None, 0)
    told = capsys.readouterr()
    assert said in " ".join(told.out.split())
    assert error in told.err
    assert (f"train.py:{LINE}" in told.out) == ("before" not in places)
    if "ValueError" in said:
        lines = told.err.splitlines()
        first = lines.index("Traceback (most recent call last):")
        assert "train.py" in lines[first + 1], "the doctor's own frames are not in it"
        assert "ValueError: own" in lines


@pytest.mark.parametrize("after", ["", "os.rmdir(os.getcwd())"], ids=["kept", "removed"])
def test_the_report_is_where_the_reader_is_though_the_script_goes_elsewhere(after, tmp_path, capsys):
    (tmp_path / "work").mkdir()
    assert cli.main(arguments(tmp_path, options=KEEP, before=f"os.chdir({str(tmp_path / 'work')!r})", after=after)) == 0
    assert REPORT in capsys.readouterr().err
    assert (tmp_path / "runs" / "doctor" / "doctor.txt").is_file()


def test_a_script_behind_a_link_finds_its_files_as_under_python(tmp_path, capfd):
    for name in ("own", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "train.py").write_text("import sys\nprint(__file__, sys.path[0])")
    link = tmp_path / "linked" / "train.py"
    link.symlink_to(tmp_path / "own" / "train.py")
    assert cli.main(["doctor", str(link)]) == 0
    assert capfd.readouterr().out == f"{link} {tmp_path / 'own'}\n"


def test_each_trainer_of_a_script_has_a_report_of_its_own_in_place_of_old_ones(tmp_path, capsys):
    folder = tmp_path / "runs" / "doctor"
    folder.mkdir(parents=True)
    for name in ("doctor-3.json", "doctor_notes.txt", "doctor.py"):
        (folder / name).write_text("")
    again = "Trainer(**{**settings, 'max_epochs': 2}).fit(Model(), loader)"
    assert cli.main(arguments(tmp_path, options=KEEP, after=again)) == 0
    assert capsys.readouterr().out.count("\nlightning-turbo doctor: ") == 2
    assert [json.loads((folder / f"{name}.json").read_text())["watched"] for name in ("doctor", "doctor-2")] == [3, 3]
    reports = {f"{name}.{suffix}" for name in ("doctor", "doctor-2") for suffix in ("txt", "json")}
    assert {each.name for each in folder.iterdir()} == {*reports, "doctor_notes.txt", "doctor.py"}


def test_a_package_is_examined_as_by_python_m(tmp_path, capsys, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "__main__.py").write_text(source(after="print(__package__, sys.argv)"))
    monkeypatch.setitem(sys.modules, "own", None)
    monkeypatch.delitem(sys.modules, "own")
    assert cli.main(["doctor", "--warmup", "1", "--timed", "2", *KEEP, "-m", "own", "--", "--lr", "1"]) == 0
    told = capsys.readouterr().out
    assert f"own ['{tmp_path / 'own' / '__main__.py'}', '--lr', '1']" in told
    assert f"own/__main__.py:{LINE}" in told


def test_a_run_that_is_too_short_for_a_report_goes_on_to_the_next(tmp_path, capsys):
    later = "Trainer(**settings).fit(Model(), loader); print('behind fit')"
    short = "Trainer(**{**settings, 'max_steps': 4}).fit(Model(), loader)"
    assert cli.main(arguments(tmp_path, before=short, after=later)) == 0
    reports = [
        json.loads((tmp_path / "runs" / "doctor" / f"{name}.json").read_text()) for name in ("doctor", "doctor-2")
    ]
    assert ["ended after 4 of the 6 steps" in each["short"] for each in reports] == [True, False]
    assert "behind fit" not in capsys.readouterr().out


@pytest.mark.parametrize("place", ["file", "file/within", "holds_a_folder"])
def test_a_place_that_cannot_hold_the_report_is_refused_before_the_script_runs(place, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "holds_a_folder" / "doctor.txt").mkdir(parents=True)
    assert cli.main(arguments(tmp_path, options=["--out", place])) == 2
    told = capsys.readouterr()
    assert "arguments" not in told.out
    assert told.err.startswith(f"lightning-turbo: error: out='{place}': expected a folder to write reports to (")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.filterwarnings("ignore:Doctor could not write its report")
def test_a_full_disk_leaves_no_half_report_and_no_status_of_success(tmp_path, capsys):
    words = arguments(tmp_path, options=["--out", "out"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # less than the text takes
    try:
        assert cli.main(words) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = capsys.readouterr().err
    assert f"a report could not be written to {tmp_path / 'out'}; the warning above says why" in told
    assert "not examined" not in told
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("words", "said"), [
    (["gone.py"], "gone.py' is not a file"),
    (["--watched", "1", "x.py"], "watched: expected 2 steps or more"),
    (["--json", "x.py"], "--json"),
    (["-m"], "--module: expected a script to run as well, got none. Add SCRIPT, or leave out --module."),
    (["--watched", "4", "--out", "here"], "--out, --watched: expected a script to run as well, got none."),
    (["--keep-going"], "--keep-going: expected a script to run as well, got none."),
])  # fmt: skip
def test_wrong_options_are_refused(words, said, tmp_path, capsys):
    (tmp_path / "x.py").write_text("raise SystemExit(0)")
    try:
        status = cli.main(["doctor", *words])
    except SystemExit as end:  # argparse
        status = end.code
    told = capsys.readouterr()
    assert (status, told.out) == (2, "")
    assert said in told.err
    assert not (tmp_path / "here").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_first_of_two_ranks_is_examined(tmp_path):
    done = run_command(tmp_path, before="settings['devices'], loader = 2, Wrapper(loader)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lightning-turbo doctor:") == 1
    assert "train.py ran to its own end, because its other ranks would have waited" in done.stderr
    findings = json.loads((tmp_path / "runs" / "doctor" / "doctor.json").read_text())["findings"]
    found = {(each["rule"], each["level"]) for each in findings}
    assert ("lost-sampler", "error") in found
    assert ("host-sync", "info") in found
    bounds = {"waits-for-data", "compute-bound", "copy-bound", "loop-overhead"}
    assert {rule for rule, _ in found} - bounds == {"lost-sampler", "host-sync"}
