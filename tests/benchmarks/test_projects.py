"""Whole fits of public projects: what is timed and compared, how a fit is stopped and resumed, and the page."""

import dataclasses
import inspect
import json
import os
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import project_run, project_scripts, projects
from benchmarks.projects import PROJECTS, Project
from benchmarks.suite import BenchError
from lightning_turbo import TurboStrategy
from lightning_turbo._lightning import Trainer
from lightning_turbo.measure import count_cores
from lightning_turbo.tune.candidates import Settings, list_candidates

EXAMPLE = Project(
    package="torch",
    repository="owner/theirs",
    license="MIT",
    trains="a line",
    data="random",
    cut="3 epochs",
    module="tests.benchmarks.project_example",
    arguments=("9",),
    score="val_loss",
    max_epochs=3,
)


def fit_of(seconds, digest="a", validation=2.0):
    spent = {"processor": 33.0, "wall": seconds}
    part = {"processor": validation, "wall": validation}
    return {"whole": spent, "validation": part, "score": 0.5, "digest": digest, "steps": 1200, "epochs": 3}


VERDICT = "at least 1.10 and about 1.20 times as fast with workers-2 + lean"
RESULTS = {
    "tune": {"minutes": 4.0, "settings": [], "verdict": "nothing helps here"},
    "fits": {"stock": [fit_of(12), fit_of(10), fit_of(11)], "turbo": [fit_of(8), fit_of(5), fit_of(10)], "tune": []},
    "resumed": {"stock": False, "turbo": True},
    "other_cores": [1.5, 0.5, None],
    "version": "1.2",
    "dates": ["2026-11-29"],
    "commits": ["01234567"],
}


def test_a_row_has_medians_and_the_factors_pair_by_pair():
    stock = projects.row("a", RESULTS, "stock")
    assert stock[2:] == ["3", "11.0", "9.00", "7.50", "2.00", "", "33.0", "", "0.5", "yes", "no"]
    turbo = projects.row("a", RESULTS, "turbo")
    assert turbo[2:8] == ["3", "8.00", "6.00", "5.00", "2.00", "1.50 (1.10-2.00)"]
    assert turbo[8:] == ["33.0", "1.00 (1.00-1.00)", "0.5", "yes", "yes"]
    other = {**RESULTS, "fits": {**RESULTS["fits"], "turbo": [fit_of(8), fit_of(5, "b"), fit_of(10)]}}
    assert projects.row("a", other, "turbo")[-2] == "no"
    assert projects.row("a", {**RESULTS, "resumed": {}}, "turbo")[-1] == "not measured"


def test_a_row_of_tune_has_its_settings_or_that_it_recommends_nothing():
    nothing = projects.row("a", RESULTS, "tune")
    assert nothing == ["a", "`tune`: nothing recommended", *[""] * 11]
    tuned = {
        **RESULTS,
        "tune": {"minutes": 4.0, "settings": ["workers-2", "lean"], "verdict": VERDICT},
        "fits": {**RESULTS["fits"], "tune": [fit_of(6, "b"), fit_of(5, "b"), fit_of(2, "b")]},
    }
    row = projects.row("a", tuned, "tune")
    assert row[1:4] == ["`tune`: workers-2 + lean", "3", "5.00"]
    assert row[-2:] == ["no", "not measured"]
    assert projects.said("a", tuned) == ["a", "4", VERDICT]


def test_each_way_has_its_settings():
    fits = projects.Fits(EXAMPLE, Path(), print, ["lean", "workers-1", "threads-1"])
    assert fits.settings("stock") == Settings()
    turbo = fits.settings("turbo")
    assert list(turbo.callbacks) == ["Prefetch"]
    default = inspect.signature(TurboStrategy).parameters
    assert turbo.strategy
    assert all(default[name].default == value for name, value in turbo.strategy.items())
    tuned = fits.settings("tune")
    assert tuned.strategy["lean"]
    assert tuned.loader == {"num_workers": 1}
    assert tuned.environment["OMP_NUM_THREADS"] == "1"


def test_scenes_are_made_by_the_script_of_the_project(tmp_path, monkeypatch):
    """The script stands for torchgeo's, which has these names."""
    folder = tmp_path / "tests/data/l7irish"
    folder.mkdir(parents=True)
    script = "from pathlib import Path\nSIZE = 36\nfilenames = ['a']\ndef create_directory(folder, names):\n"
    (folder / "data.py").write_text(f"{script}    Path(folder, *names).write_text(str(SIZE))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(project_scripts.sys, "argv", ["project_scripts", "l7irish"])
    project_scripts.main()
    assert (folder / "a").read_text() == "384"


def test_the_page_says_where_each_project_comes_from_and_what_was_cut():
    text = "\n".join(projects.page({"chemprop": RESULTS, "scvi-tools": RESULTS}))
    assert "`python -m benchmarks projects --rounds 3 --minutes 4 --only chemprop scvi-tools`" in text
    assert re.search(r"\| chemprop +\| 4 +\| nothing helps here +\|", text)
    assert "commit 01234567, " in text
    assert "Other programs used 0.5 to 1.5 cores" in text
    assert re.search(r"\[chemprop 1.2, files at 9a0b47a\]\(https://github.com/chemprop/chemprop/tree/\w{40}\)", text)
    assert PROJECTS["scvi-tools"].cut in text
    assert "1,200" in text


def test_what_is_missing_is_named_with_the_command_that_gets_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(projects, "installed_version", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install 'scvi-tools' 'pytorch-forecasting\[tuning\]' .*'pandas<3'"):
        projects.main(["--only", "scvi-tools", "pytorch-forecasting"])
    monkeypatch.setattr(projects, "installed_version", lambda name: "1")
    with pytest.raises(BenchError, match=rf"git clone https://github.com/chemprop/chemprop {tmp_path}/chemprop$"):
        projects.main(["--only", "chemprop", "scvi-tools", "--repositories", str(tmp_path)])


def test_fits_take_turns_and_those_that_were_made_are_kept(tmp_path, monkeypatch, capsys):
    asked = []

    def whole(self, way):
        asked.append((self.project.package, way))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return fit_of(len(asked))

    monkeypatch.setattr(projects, "installed_version", lambda name: "1")
    monkeypatch.setattr(projects.Fits, "whole", whole)
    monkeypatch.setattr(projects.Fits, "resumed", lambda self, way, whole: way == "turbo")
    recommended = {"minutes": 2.0, "settings": ["lean"], "verdict": VERDICT}
    monkeypatch.setattr(projects.Fits, "tune", lambda self, minutes: {**recommended, "minutes": minutes})
    page = tmp_path / "page.md"
    command = ["--only", "scvi-tools", "--out", str(tmp_path), "--rounds", "2", "--minutes", "2", "--page", str(page)]
    with pytest.raises(KeyboardInterrupt):
        projects.main(command)
    assert projects.main([*command, "--resume"]) == 0
    assert [way for _, way in asked] == ["stock", "turbo", "tune", "tune", "tune", "turbo", "stock"]
    assert page.read_text().rstrip("\n") in capsys.readouterr().out
    kept = json.loads((tmp_path / "scvi-tools.json").read_text())
    assert [fit["whole"]["wall"] for fit in kept["fits"]["stock"]] == [1, 7]
    assert kept["tune"] == recommended
    assert kept["resumed"] == {"stock": False, "turbo": True, "tune": False}
    # What nothing was added to stays that of its commit.
    monkeypatch.setattr(projects, "describe_machine", lambda device: {"commit": "other"})
    again = projects.measure(projects.PROJECTS["scvi-tools"], tmp_path, 2, 2, print, lambda found: None, kept)
    assert again == kept
    assert "other" not in again["commits"]


def test_where_tune_recommends_nothing_no_fit_is_made_of_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(projects.Fits, "whole", lambda self, way: asked.append(way) or fit_of(1))
    monkeypatch.setattr(projects.Fits, "resumed", lambda self, way, whole: True)
    monkeypatch.setattr(projects.Fits, "tune", lambda self, minutes: RESULTS["tune"])
    found = projects.measure(EXAMPLE, tmp_path, 2, 1.0, print, lambda found: None)
    assert asked == ["stock", "turbo", "turbo", "stock"]
    assert found["resumed"] == {"stock": True, "turbo": True}


def test_the_time_of_the_processor_has_that_of_living_children(monkeypatch):
    before, own = project_run.clock()["processor"], time.process_time()
    monkeypatch.setattr(project_run.multiprocessing, "active_children", lambda: [SimpleNamespace(pid=os.getpid())])
    assert project_run.clock()["processor"] >= before + 0.9 * own
    monkeypatch.setattr(project_run.multiprocessing, "active_children", lambda: [SimpleNamespace(pid=-1)])
    assert before <= project_run.clock()["processor"] < before + 0.5 * own


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a fit of the example in this process, and returns what it has written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "fit", Trainer.fit)  # put back after a fit was resumed

    def run(way, stop=None, resume=None, recommended=()):
        # The process that ``Fits`` starts, in this one.
        def started(command, *, env, **settings):
            assert Path(env["PYTHONPATH"].partition(os.pathsep)[0], "benchmarks").is_dir()
            return subprocess.CompletedProcess(command, project_run.main([command[-1]]), "", "")

        monkeypatch.setattr(projects.subprocess, "run", started)
        return projects.Fits(EXAMPLE, tmp_path, print, recommended).run(way, tmp_path, stop=stop, resume=resume)

    return run


def leave(status):
    raise SystemExit(status)


def test_a_fit_that_is_stopped_and_resumed_equals_a_whole_one(run, tmp_path, monkeypatch):
    whole = run("turbo")
    assert (whole["steps"], whole["epochs"]) == (18, 3)
    assert whole["whole"]["wall"] > whole["validation"]["wall"] > 0
    assert run("turbo")["digest"] == whole["digest"]
    monkeypatch.setattr(os, "_exit", leave)
    assert run("turbo", stop=10) == {}
    assert torch.load(tmp_path / "fit.ckpt", weights_only=False)["global_step"] == 10
    assert run("turbo", resume=tmp_path / "fit.ckpt")["digest"] == whole["digest"]


def test_the_score_and_the_weights_are_those_at_the_end_of_the_fit(run, tmp_path):
    found, turbo = run("stock"), run("turbo")
    assert (found["strategy"], turbo["strategy"]) == ("SingleDeviceStrategy", "TurboStrategy")
    assert found["score"] > 0
    assert len(found["digest"]) == 64
    assert found["digest"] == turbo["digest"], "the strategy changes no bit"
    assert project_run.digest({"a": torch.zeros(2)}) != project_run.digest({"a": torch.ones(2)})
    assert json.loads((tmp_path / "fit.json").read_text())["steps"] == 18


def test_what_tune_recommends_is_applied_to_the_fit(run):
    stock = run("stock")
    assert run("tune", recommended=["lean", "fused"])["steps"] == stock["steps"]
    assert run("tune", recommended=["bf16-mixed"])["digest"] != stock["digest"]


@pytest.mark.slow
def test_a_project_is_measured_in_processes_of_its_own(tmp_path):
    shown = []
    former = {"tune": RESULTS["tune"]}
    found = projects.measure(EXAMPLE, tmp_path, 1, 1.0, shown.append, shown.append, former)
    assert found["resumed"] == {"stock": False, "turbo": True}
    assert found["fits"]["stock"][0]["digest"] == found["fits"]["turbo"][0]["digest"]
    assert len(shown) == 8
    with pytest.raises(
        BenchError, match=r"(?s)torch: benchmarks.project_run ended with exit status 1:.*No module named"
    ):
        projects.Fits(dataclasses.replace(EXAMPLE, module="none.such"), tmp_path, print).whole("stock")


@pytest.mark.slow
def test_tune_is_asked_once_about_the_script_of_a_project(tmp_path):
    said = projects.Fits(dataclasses.replace(EXAMPLE, arguments=("1000",)), tmp_path, print).tune(0.2)
    assert said["minutes"] == 0.2
    assert said["verdict"]
    assert set(said["settings"]) <= {each.name for each in list_candidates(count_cores())}
