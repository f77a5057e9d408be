"""``lightning-turbo doctor``: a script runs unchanged, and ends as it would without the Doctor."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_turbo import Doctor, cli
from tests.children import RETURNED, status_of_child
from tests.integration.doctor_runs import QUIET, SHORT
from tests.ranks import free_port

pytestmark = QUIET


SCRIPT = """
import os
import signal
import sys
import time
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
    """Return the script, with lines inserted in three places."""
    return SCRIPT.format(lightning=lightning, step=step, before=before, after=after)


def arguments(tmp_path, *own, options=(), **places):
    script = tmp_path / "train.py"
    script.write_text(source(**places))
    return ["doctor", "--json", "r.json", *options, str(script), "--", *own]


KEEP = ["--keep-going"]


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    """Let the command's Doctors look at few steps; the slow tests have a process with the usual ones."""
    monkeypatch.setattr(Doctor.__init__, "__kwdefaults__", {**Doctor.__init__.__kwdefaults__, **SHORT})


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(3)", "1 / 0", "os._exit(0)", "raise SystemExit"])
def test_a_forked_copy_of_a_script_prints_nothing(end, tmp_path, capfd):
    fork = f"pid = os.fork()\n    if pid == 0:\n        {end}\n    os.waitpid(pid, 0)"
    assert status_of_child(lambda: cli.main(arguments(tmp_path, before=fork))) == 0
    shown = capfd.readouterr().err
    assert "not examined" not in shown
    assert shown.count("was ended after the report") == 1


def test_a_script_is_ended_after_the_report(tmp_path, capfd):
    places = {"step": "print('step', batch_idx)", "after": "print('behind fit')"}
    words = arguments(tmp_path, "--lr", "1", options=["--json", "here/r.json", "--minutes", "0"], **places)
    assert status_of_child(lambda: cli.main(words)) == 0
    shown = capfd.readouterr()
    assert re.findall(r"step (\d+)", shown.out) == ["0", "1", "2", "3", "4", "5"], "only the examined steps"
    assert "behind fit" not in shown.out
    assert "train.py was ended after the report, without its handlers" in shown.err
    assert "arguments ['--lr', '1']" in shown.out
    assert f"train.py:{LINE}" in shown.out
    report = json.loads((tmp_path / "here" / "r.json").read_text())
    assert f"train.py:{LINE}" in [finding["place"] for finding in report["findings"]]
    assert "lightning-turbo doctor: " in shown.out


SAVES = """
    import atexit
    from pathlib import Path
    from lightning.pytorch import Callback
    def save(place):
        Path("saved " + place).touch()
    class Saves(Callback):
        def on_exception(self, *args): save("on_exception")
        def on_train_end(self, *args): save("on_train_end")
        def on_train_epoch_end(self, *args): save("on_train_epoch_end"); torch.save({}, "final.pt")
        def on_fit_end(self, *args): save("on_fit_end")
        def teardown(self, *args, **more): save("teardown")
    atexit.register(save, "atexit")
    settings["callbacks"] = [Saves()]
    try:
        Trainer(**settings).fit(Model(), loader)
        save("behind fit")
    except:
        save("except")
        raise
    finally:
        save("finally")
"""
HANDLERS = {"atexit", "behind fit", "finally", "on_fit_end", "on_train_end", "on_train_epoch_end", "teardown"}


def saved(tmp_path):
    return {path.name.removeprefix("saved ") for path in tmp_path.glob("saved *")}


@pytest.mark.parametrize(
    "step", ["", "if batch_idx == 5: os.kill(os.getpid(), signal.SIGINT)"], ids=["report", "Ctrl-C"]
)
def test_the_exit_handlers_of_an_ended_script_save_nothing(step, tmp_path, capfd):
    words = arguments(tmp_path, before=SAVES.strip(), step=step, options=["--minutes", "0"])

    def run():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it by default
        cli.main(words)

    assert status_of_child(run) == (130 if step else 0)
    # Callbacks of the script get the KeyboardInterrupt before the Doctor.
    assert saved(tmp_path) == ({"on_exception"} if step else set())
    assert "The mean step takes" in capfd.readouterr().out
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(("train.py", "r.json", "saved"))]


def test_an_epoch_is_trained_whole_and_its_hooks_write_as_in_any_run(tmp_path, capfd):
    before = SAVES.strip().replace("    try:\n", "    settings['max_epochs'] = 2\n    try:\n", 1)
    places = {"step": "print('step', batch_idx)", "before": before}
    assert status_of_child(lambda: cli.main(arguments(tmp_path, **places))) == 0
    assert len(re.findall(r"step \d+", capfd.readouterr().out)) == 12, "the first epoch, whole"
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["fit"]["is_epoch"], report["fit"]["batches"]) == (True, 12)
    assert saved(tmp_path) == {"on_train_epoch_end"}
    assert (tmp_path / "final.pt").exists()


def test_an_error_at_the_end_of_an_epoch_is_the_scripts_own(tmp_path, capfd):
    before = SAVES.strip().replace('save("on_train_epoch_end"); torch.save({}, "final.pt")', "1 / 0")
    words = arguments(tmp_path, before=before)
    assert status_of_child(lambda: os._exit(cli.main(words))) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_run_that_has_trained_longer_than_the_minutes_runs_on(tmp_path, capfd):
    words = arguments(tmp_path, options=["--minutes", "0.005"], step="time.sleep(0.1)", after="print('behind fit')")
    assert status_of_child(lambda: os._exit(cli.main(words))) == 0
    shown = capfd.readouterr()
    assert "behind fit" in shown.out
    assert "train.py ran to its own end, because it ended, or trained longer than the minutes" in shown.err


def test_a_fit_with_fewer_steps_than_are_examined_is_not_shortened(tmp_path):
    before = SAVES.strip().replace("    try:\n", "    settings['max_steps'] = 5\n    try:\n", 1)
    assert status_of_child(lambda: cli.main(arguments(tmp_path, before=before))) == RETURNED, "the command returned"
    assert saved(tmp_path) >= {"on_train_end", "behind fit", "finally"}


@pytest.mark.slow
def test_a_script_with_keep_going_saves(tmp_path):
    done = run_command(tmp_path, before=SAVES.strip(), options=KEEP)
    assert done.returncode == 0, done.stderr
    assert saved(tmp_path) == HANDLERS


LONGER = "loader = DataLoader(torch.ones(320, 32), batch_size=4)"  # than the usual steps of a Doctor, on two ranks


def run_command(tmp_path, **places):
    """Run the command in a separate process."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "lightning_turbo", *arguments(tmp_path, **places)],
        capture_output=True, text=True, timeout=170, cwd=tmp_path, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_script_that_imports_pytorch_lightning_is_examined(tmp_path):
    done = run_command(tmp_path, lightning="pytorch_lightning", before=LONGER)
    assert done.returncode == 0, done.stderr
    assert f"train.py:{LINE}" in done.stdout


@pytest.fixture
def interrupts():
    """Restores the handler of Ctrl-C, because Lightning ignores it after the first one."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


ABSENT = "train.py was not examined: it ended"
FAIL, STOP = "raise ValueError('own')", "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(("places", "status", "said", "error"), [
    ({"after": "sys.exit(3)"}, 3, f"train.py:{LINE}", ""),
    ({"step": f"if batch_idx == 5: {FAIL}"}, 1, "was ended by ValueError after 5 of the 6 steps", ""),
    # exit status of Lightning
    ({"step": f"if batch_idx == 5: {STOP}"}, 1, "was ended by KeyboardInterrupt after 5 of the 6 steps", ""),
    ({"before": "settings['limit_train_batches'] = 2"}, 0,
     "ended after 2 of the 6 steps that the doctor needs: 1 were timed and 0 watched", ""),
    ({"before": "sys.exit(3)"}, 3, "", f"{ABSENT} before a Trainer began to train."),
    ({"before": "Trainer(**settings), sys.exit('no')"}, 1, "", f"{ABSENT} before a Trainer began to train."),
    ({"before": "Trainer(gpus=1)"}, 1, "", f"{ABSENT} in TypeError before a Trainer began to train."),
    # as in a shell
    ({"before": STOP}, 130, "", f"{ABSENT} in KeyboardInterrupt before a Trainer began to train."),
])  # fmt: skip
def test_a_script_keeps_its_error_and_exit_status(places, status, said, error, tmp_path, capsys, interrupts):
    before = sys.argv, list(sys.path)
    assert cli.main(arguments(tmp_path, options=KEEP, **places)) == status
    assert (sys.argv, sys.path) == before
    assert (sys.getprofile(), torch._C._len_torch_function_stack()) == (None, 0)
    shown = capsys.readouterr()
    assert said in " ".join(shown.out.split())
    assert error in shown.err
    assert (f"train.py:{LINE}" in shown.out) == ("before" not in places)
    if "ValueError" in said:
        lines = shown.err.splitlines()
        first = lines.index("Traceback (most recent call last):")
        assert "train.py" in lines[first + 1], "the traceback has no frames of the Doctor"
        assert "ValueError: own" in lines


def test_a_script_with_its_own_doctor_gets_no_second_one(tmp_path, capsys):
    own = "from lightning_turbo import Doctor; settings['callbacks'] = [Doctor(warmup=1, timed=1, watched=2)]"
    assert cli.main(arguments(tmp_path, options=KEEP, before=own)) == 0
    shown = capsys.readouterr()
    assert "1 steps timed and 2 watched on cpu" in shown.out
    assert "train.py was not examined: its Trainer has a Doctor of its own, which reports by itself." in shown.err
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("after", ["", "os.rmdir(os.getcwd())"], ids=["kept", "removed"])
def test_the_report_is_written_to_the_starting_folder_if_the_script_changes_its_folder(after, tmp_path, capsys):
    (tmp_path / "work").mkdir()
    assert cli.main(arguments(tmp_path, options=KEEP, before=f"os.chdir({str(tmp_path / 'work')!r})", after=after)) == 0
    assert "The mean step takes" in capsys.readouterr().out
    assert (tmp_path / "r.json").is_file()


def test_a_script_started_through_a_link_finds_its_files(tmp_path, capfd):
    for name in ("own", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "train.py").write_text("import sys\nprint(__file__, sys.path[0])")
    link = tmp_path / "linked" / "train.py"
    link.symlink_to(tmp_path / "own" / "train.py")
    assert cli.main(["doctor", str(link)]) == 3, "nothing was examined"
    assert capfd.readouterr().out == f"{link} {tmp_path / 'own'}\n"


def test_each_trainer_of_a_script_has_its_own_report(tmp_path, capsys):
    (tmp_path / "r.json").write_text("an old one")
    again = "Trainer(**{**settings, 'max_epochs': 2}).fit(Model(), loader)"
    assert cli.main(arguments(tmp_path, options=KEEP, after=again)) == 0
    assert capsys.readouterr().out.count("\nlightning-turbo doctor: ") == 2
    assert [json.loads((tmp_path / f"{name}.json").read_text())["watched"] for name in ("r", "r-2")] == [3, 3]


def test_a_console_script_is_examined(tmp_path, capfd):
    """Its launcher is no line of the user's: the lines are those of the package that it calls."""
    package = tmp_path / "site-packages" / "trains"
    package.mkdir(parents=True)
    text = source(step="time.sleep(0.05)").replace('if __name__ == "__main__":', "def main():")
    (package / "__init__.py").write_text(text)
    launcher = tmp_path / "bin" / "trains"
    launcher.parent.mkdir()
    launcher.write_text(
        f"import sys\nsys.path.insert(0, {str(package.parent)!r})\nfrom trains import main\nsys.exit(main())"
    )
    words = ["doctor", "--json", "r.json", "--minutes", "0", str(launcher), "train"]
    assert status_of_child(lambda: cli.main(words)) == 0
    assert "arguments ['train']" in capfd.readouterr().out
    places = [place for each in json.loads((tmp_path / "r.json").read_text())["findings"] for place in each["places"]]
    assert places
    assert {place.partition(":")[0] for place in places} == {"site-packages/trains/__init__.py"}


def test_a_package_is_examined_as_with_python_m(tmp_path, capsys, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "__main__.py").write_text(source(after="print(__package__, sys.argv)"))
    monkeypatch.setitem(sys.modules, "own", None)
    monkeypatch.delitem(sys.modules, "own")
    assert cli.main(["doctor", *KEEP, "-m", "own", "--", "--lr", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"own ['{tmp_path / 'own' / '__main__.py'}', '--lr', '1']" in shown
    assert f"own/__main__.py:{LINE}" in shown


def test_after_a_run_too_short_for_a_report_the_next_one_is_examined(tmp_path, capfd):
    later = "Trainer(**settings).fit(Model(), loader); print('behind fit')"
    short = "Trainer(**{**settings, 'max_steps': 4}).fit(Model(), loader)"
    words = arguments(tmp_path, before=short, after=later)
    assert status_of_child(lambda: cli.main(words)) == 0
    reports = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("r", "r-2")]
    assert ["ended after 4 of the 6 steps" in each["short"] for each in reports] == [True, False]
    assert "behind fit" not in capfd.readouterr().out


@pytest.mark.parametrize("place", ["folder", "file/within"])
def test_an_unwritable_report_is_refused_before_the_script_runs(place, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    assert cli.main(arguments(tmp_path, options=["--json", place])) == 2
    shown = capsys.readouterr()
    assert "arguments" not in shown.out
    assert shown.err.startswith(f"lightning-turbo: error: json='{tmp_path / place}': expected a file to write to (")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.filterwarnings("ignore:Doctor could not write its report")
def test_a_full_disk_leaves_no_partial_report_and_a_failure_status(tmp_path, capsys):
    words = arguments(tmp_path, options=KEEP)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # less than the size of the report
    try:
        assert cli.main(words) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    shown = capsys.readouterr().err
    assert "the report could not be written; the warning above says why" in shown
    assert "not examined" not in shown
    assert not list(tmp_path.glob("r.json*"))


@pytest.mark.parametrize(("words", "said"), [
    (["gone.py"], "gone.py' is not a file"),
    (["--minutes", "-1", "x.py"], "--minutes: expected 0 minutes or more, got -1"),
    (["--json"], "expected one argument"),
    (["-m"], "--module: expected a script to run as well, got none. Add SCRIPT, or leave out --module."),
    (["--minutes", "4", "--json", "here"], "--json, --minutes: expected a script to run as well, got none."),
    (["--keep-going"], "--keep-going: expected a script to run as well, got none."),
])  # fmt: skip
def test_invalid_doctor_options_are_refused(words, said, tmp_path, capsys):
    (tmp_path / "x.py").write_text("raise SystemExit(0)")
    try:
        status = cli.main(["doctor", *words])
    except SystemExit as end:  # argparse
        status = end.code
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert said in shown.err
    assert not (tmp_path / "here").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_rank_0_of_two_ranks_is_examined(tmp_path):
    done = run_command(tmp_path, before=f"{LONGER}; settings['devices'], loader = 2, Wrapper(loader)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lightning-turbo doctor:") == 1
    assert "train.py ran to its own end, because its other ranks would have waited" in done.stderr
    findings = json.loads((tmp_path / "r.json").read_text())["findings"]
    found = {(each["rule"], each["level"]) for each in findings}
    assert ("lost-sampler", "error") in found
    assert ("host-sync", "info") in found
    bounds = {"waits-for-data", "compute-bound", "copy-bound", "loop-overhead", "slow-line", "processor-threads"}
    assert {rule for rule, _ in found} - bounds == {"lost-sampler", "host-sync"}


@pytest.mark.slow
@pytest.mark.distributed
def test_under_torchrun_the_first_rank_reports_and_all_run_to_their_end(tmp_path):
    words = arguments(tmp_path, before="settings['devices'] = 2", after="print('behind fit')")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launch, "-m", "lightning_turbo", *words],
        capture_output=True, text=True, timeout=170, cwd=tmp_path, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lightning-turbo doctor:") == 1
    assert done.stdout.count("behind fit") == 2
    assert (tmp_path / "r.json").exists()
