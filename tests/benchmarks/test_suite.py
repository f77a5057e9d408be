"""Suites: baselines, what is measured together, and the commands in the documentation."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import project_scripts
from benchmarks.__main__ import PROGRAMS, main, parse
from benchmarks.runner import Settings, differences
from benchmarks.suite import SUITES, Aim, Case, Suite, load_suite


def nothing(timer):
    return {}


def make(*names, **options):
    return Suite(name="s", about="about", cases=[Case(name=name, run=nothing) for name in names], **options)


def test_names_are_unique_and_references_exist():
    with pytest.raises(ValueError, match="2 different names"):
        make("a", "a")
    with pytest.raises(ValueError, match="refers to"):
        make("a", aims=[Aim("a", "z", 1.0)])
    with pytest.raises(ValueError, match="refers to"):
        make("a", quick=("z",))


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_is_consistent(name):
    suite = load_suite(name)
    assert suite.name == name
    assert suite.lead >= 1, "memory that a paused case released is allocated again before the measurement"
    assert sorted(case for group in suite.groups() for case in group) == sorted(suite.known)
    for case in suite.cases:
        base = suite.base(case.name)
        assert suite.base(base) == base, f"{base} is a baseline, and has another one"
        assert case.kind in ("torch", "ours", "peer")
    # Each process takes seconds of imports, and --quick has two minutes for all suites.
    assert 2 <= len(suite.quick) <= 4
    assert {suite.base(case) for case in suite.quick} <= set(suite.quick)


def test_compared_cases_are_measured_together():
    suite = make("a", "b", "c", "d", aims=[Aim("b", "a", 1.0), Aim("d", "", 1.0, "loss")])
    assert suite.groups() == [["a", "b", "c", "d"]], "all are divided by the first case"
    own = [Case(name=name, run=nothing, base=base) for name, base in (("a", "a"), ("b", "b"), ("c", "a"), ("d", "b"))]
    assert Suite(name="s", about="", cases=own).groups() == [["a", "c"], ["b", "d"]]


@pytest.mark.parametrize(("options", "chosen"), [
    ({}, ["base", "O1, bf16", "other base", "O2, bf16"]),
    ({"quick": True}, ["base", "O1, bf16"]),
    ({"only": ("o1*",)}, ["base", "O1, bf16"]),
    ({"only": ("O2*",), "quick": True}, ["other base", "O2, bf16"]),
])  # fmt: skip
def test_settings_choose_cases_with_their_baselines(options, chosen):
    bases = {"base": "", "O1, bf16": "", "other base": "other base", "O2, bf16": "other base"}
    cases = [Case(name=name, run=nothing, base=base) for name, base in bases.items()]
    suite = Suite(name="s", about="about", cases=cases, quick=("base", "O1, bf16"))
    assert Settings(device="cpu", **options).chosen(suite) == chosen


def test_differences_between_two_runs():
    before = {"machine": {"processor": "a", "environment": {}}, "settings": {"threads": None}}
    assert differences(before, {**before, "machine": {"processor": "a"}}) == []
    after = {"machine": {"processor": "b", "environment": {"THP_MEM_ALLOC_ENABLE": "1"}}, "settings": {"threads": 2}}
    assert differences(before, after) == [
        "processor: 'a' -> 'b'", "environment: None -> {'THP_MEM_ALLOC_ENABLE': '1'}", "threads: None -> 2",
    ]  # fmt: skip


def commands(text):
    """The commands of a page: lines of its shell blocks, and inline code, which may be wrapped."""
    shell = r"^```shell\n(.*?)^```"
    lines = [line for block in re.findall(shell, text, re.S | re.M) for line in block.splitlines()]
    lines += [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", re.sub(shell, "", text, flags=re.S | re.M))]
    return [line[line.index("-m benchmarks") :] for line in lines if "-m benchmarks" in line]


PAGES = [*Path("docs").glob("**/*.md"), Path("README.md"), Path("CONTRIBUTING.md")]
COMMANDS = sorted({command for page in PAGES for command in commands(page.read_text())})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_a_page_is_valid(command, capsys):
    arguments = shlex.split(command, comments=True)[2:]
    if arguments[:1] and arguments[0] in PROGRAMS:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--help"])
        assert ended.value.code == 0
        return
    if command.startswith(f"-m {project_scripts.__name__} "):
        assert arguments[0] in [program.__name__ for program in project_scripts.PROGRAMS]
        return
    asked = parse(arguments)
    for pattern in asked.only or ["*"]:
        assert main([asked.suite, "--list", "--device", "cpu", "--only", pattern]) == 0, capsys.readouterr().err
