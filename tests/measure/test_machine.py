"""The description of the machine."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_turbo.measure import OtherLoad, describe_machine, machine


def test_environment_variables_that_change_times_are_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("THP_MEM_ALLOC_ENABLE", "1")
        patch.setenv("SOME_SECRET", "hush")
        facts = describe_machine("cpu")
    assert facts["environment"]["THP_MEM_ALLOC_ENABLE"] == "1"
    assert "SOME_SECRET" not in facts["environment"]
    assert facts["cores"] >= 1
    assert facts["versions"]["torch"]


def test_the_load_of_other_programs_is_given_in_cores_without_our_own(monkeypatch):
    now, ours = [0.0], [0.0]
    stat = iter(["cpu  100 0 50 900 10 0 0 0", "cpu  400 0 150 1900 10 0 0 0"])  # in hundredths of a second
    monkeypatch.setattr(machine.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(machine.os, "times", lambda: (ours[0], 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(machine.Path, "read_text", lambda path: next(stat))
    load = OtherLoad()
    now[0], ours[0] = 4.0, 1.0
    assert load.cores() == 0.75, "4 s of all cores, 1 s of ours, in 4 s"


def test_a_system_without_a_load_value_has_no_load_line(monkeypatch):
    def fail(path):
        raise FileNotFoundError

    monkeypatch.setattr(machine.Path, "read_text", fail)
    assert OtherLoad().cores() is None


def test_a_system_without_proc_files_has_no_description(monkeypatch):
    def fail(path):
        raise PermissionError

    monkeypatch.setattr(machine.Path, "read_text", fail)
    assert (machine.computes_in_bfloat16(), machine.huge_pages()) == (None, None)


@pytest.mark.parametrize(("answers", "commit"), [
    (["FOLDER", "", "abc"], "abc"),
    (["FOLDER", " M lightning_turbo/cli.py", "abc"], "abc+"),
    (["/another/project"], None),
    ([FileNotFoundError("git")], None),
    ([subprocess.CalledProcessError(128, "git")], None),
    ([subprocess.TimeoutExpired("git", 10)], None),
])  # fmt: skip
def test_the_commit_is_named_only_within_the_checkout(answers, commit, monkeypatch):
    left = [str(Path(machine.__file__).parents[2]) if each == "FOLDER" else each for each in answers]

    def git(command, **options):
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=f"{answer}\n")

    monkeypatch.setattr(machine.subprocess, "run", git)
    assert describe_machine("cpu")["commit"] == commit
    assert left == []
