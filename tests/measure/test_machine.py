"""The description of the machine."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_turbo import _machine
from lightning_turbo.measure import OtherLoad, count_cores, describe_machine, machine


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
    def fail(*given, **more):
        raise PermissionError

    monkeypatch.setattr(machine.Path, "read_text", fail)
    facts = machine.describe_machine("cpu")
    assert (facts["bfloat16_instructions"], facts["transparent_huge_pages"]) == (None, None)


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


@pytest.mark.parametrize(("own", "files", "cores"), [
    # Version 2, as a container sees it: its own group is the root.
    ("0::/", {"cpu.max": "150000 100000"}, 2),
    ("0::/", {"cpu.max": "max 100000"}, 64),
    ("0::/jobs/7", {"jobs/7/cpu.max": "max 100000", "jobs/cpu.max": "800000 100000"}, 8),
    ("0::/jobs/7", {"jobs/7/cpu.max": "50000 100000", "jobs/cpu.max": "800000 100000"}, 1),
    # Version 1, whose groups of controllers may be mounted under one name or both.
    ("4:cpu,cpuacct:/docker/a", {"cpu/docker/a/cpu.cfs_quota_us": "400000",
                                 "cpu/docker/a/cpu.cfs_period_us": "100000"}, 4),
    ("4:cpu,cpuacct:/docker/a", {"cpu,cpuacct/cpu.cfs_quota_us": "300000",
                                 "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3),
    ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
    ("3:memory:/a", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 64),
    ("0::/", {"cpu.max": "what"}, 64),
    ("", {}, 64),
])  # fmt: skip
def test_the_cores_are_those_of_the_affinity_and_of_the_smallest_quota(own, files, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{own}\n" if own else "")
    monkeypatch.setattr(_machine, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(_machine, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(_machine.os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert count_cores() == cores
    monkeypatch.setattr(_machine.os, "sched_getaffinity", lambda process: {0}, raising=False)
    assert count_cores() == 1


def test_a_system_without_cgroups_has_the_cores_of_the_affinity(tmp_path, monkeypatch):
    monkeypatch.setattr(_machine, "OWN_CGROUP", tmp_path / "absent")
    monkeypatch.setattr(_machine.os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    assert count_cores() == 3
