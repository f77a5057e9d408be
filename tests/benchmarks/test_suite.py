import re
import shlex
from pathlib import Path

import pytest

from benchmarks.__main__ import PROGRAMS, main, parse
from benchmarks.runner import QUICK_SECONDS, Settings, choose_suites, differences
from benchmarks.suite import SUITES, Aim, BenchError, Case, Suite, load_suite


def nothing(timer):
    return {}


def make(*names, **options):
    return Suite(name="s", about="about", cases=[Case(name=name, run=nothing) for name in names], **options)


def test_names_are_unique_and_every_name_that_is_referred_to_exists():
    with pytest.raises(ValueError, match="suite 's': expected 2 different names, got 1"):
        make("a", "a")
    with pytest.raises(ValueError, match=r"'a' refers to \{'z'\}. Use one of"):
        make("a", aims=[Aim("a", "z", 1.0)])
    with pytest.raises(ValueError, match=r"'z' refers to \{'z'\}"):
        make("a", quick=("z",))


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_is_whole(name):
    suite = load_suite(name)
    assert suite.name == name
    assert suite.lead >= 1, "what a case gave back while it was held is taken again before the clock starts"
    assert sorted(case for group in suite.groups() for case in group) == sorted(suite.known)
    for case in suite.cases:
        base = suite.base(case.name)
        assert suite.base(base) == base, f"{base} is a base, and divided by another case"
        assert case.kind in ("torch", "ours", "peer")
    # Each start costs seconds of imports, and --quick has two minutes for all suites together.
    assert 2 <= len(suite.quick) <= 4
    assert {suite.base(case) for case in suite.quick} <= set(suite.quick)


def test_what_is_compared_is_measured_together():
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
def test_settings_choose_cases_and_what_these_are_divided_by(options, chosen):
    bases = {"base": "", "O1, bf16": "", "other base": "other base", "O2, bf16": "other base"}
    cases = [Case(name=name, run=nothing, base=base) for name, base in bases.items()]
    suite = Suite(name="s", about="about", cases=cases, quick=("base", "O1, bf16"))
    assert Settings(device="cpu", **options).chosen(suite) == chosen


@pytest.mark.parametrize(("options", "message"), [
    ({"suite": "fast"}, r"suite='fast': expected one of precision, .*, or 'all'"),
    ({"device": "tpu"}, "device='tpu': expected 'auto', 'cpu', or 'cuda' where torch sees a GPU"),
    ({"device": "cuda"}, "device='cuda': expected 'auto', 'cpu', or"),
    ({"threads": 0}, "threads=0: expected an integer of 1 or more"),
    ({"rounds": -1}, "rounds=-1: expected an integer of 1 or more"),
    ({"minutes": float("nan")}, "minutes=nan: expected a number above 0"),
    ({"seed": 2**32}, r"seed=4294967296: expected an integer from 0 to 2\*\*32 - 1"),
])  # fmt: skip
def test_impossible_settings_are_refused(options, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BenchError, match=message):
        Settings(**{"device": "cpu", **options})
    assert Settings(device="auto").device == "cpu"


def test_a_limit_that_is_asked_for_goes_before_that_of_quick():
    found = [Settings(quick=quick, minutes=minutes).seconds for quick in (False, True) for minutes in (None, 9)]
    assert found == [float("inf"), 540, QUICK_SECONDS, 540]


def test_all_leaves_out_what_takes_hours():
    assert "grid" not in [suite.name for suite in choose_suites(Settings(device="cpu"))]


def test_what_makes_times_of_two_runs_differ():
    before = {"machine": {"processor": "a", "environment": {}}, "settings": {"threads": None}}
    assert differences(before, {**before, "machine": {"processor": "a"}}) == []
    after = {"machine": {"processor": "b", "environment": {"THP_MEM_ALLOC_ENABLE": "1"}}, "settings": {"threads": 2}}
    assert differences(before, after) == [
        "processor: 'a' -> 'b'", "environment: None -> {'THP_MEM_ALLOC_ENABLE': '1'}", "threads: None -> 2",
    ]  # fmt: skip


def commands(text):
    """The commands of a page: lines of its shell blocks, and code between backticks, which may go over two lines."""
    shell = r"^```shell\n(.*?)^```"
    lines = [line for block in re.findall(shell, text, re.S | re.M) for line in block.splitlines()]
    lines += [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", re.sub(shell, "", text, flags=re.S | re.M))]
    return [line[line.index("-m benchmarks") :] for line in lines if "-m benchmarks" in line]


PAGES = [*Path("docs").glob("**/*.md"), Path("README.md"), Path("CONTRIBUTING.md")]
COMMANDS = sorted({command for page in PAGES for command in commands(page.read_text())})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_a_page_still_names_something(command, capsys):
    arguments = shlex.split(command, comments=True)[2:]
    if arguments[:1] and arguments[0] in PROGRAMS:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--help"])
        assert ended.value.code == 0
        return
    asked = parse(arguments)
    for pattern in asked.only or ["*"]:
        assert main([asked.suite, "--list", "--device", "cpu", "--only", pattern]) == 0, capsys.readouterr().err
