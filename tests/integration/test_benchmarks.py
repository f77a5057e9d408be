"""The benchmark as a user runs it: real processes, a toy suite, and the real suites in the slow form."""

import json
import os
import signal
import sys
import threading

import pytest

from benchmarks.__main__ import main
from benchmarks.command import list_cases, run_bench
from benchmarks.runner import run_suites
from benchmarks.settings import BenchSettings
from benchmarks.suite import BenchError
from tests.leftovers import wait_until

TOY = """
import time
from benchmarks.suite import Aim, SkippedError, Suite
from lightning_turbo.errors import MissingExtraError

def prepare(meter):
    return {"nap": 0.01}

SUITE = Suite("toy", "Naps.", steps=3, quick_steps=2, rounds=3, warmup=2, lead=1, prepare=prepare)

def nap(meter, *, times):
    naps = 0
    while meter.step(samples=5):
        naps += 1
        time.sleep(times * meter.prepared["nap"])
    return {"naps": naps, "loss": float("nan")}

SUITE.add("one", nap, config={"times": 1}, baseline=True)
SUITE.add("three", nap, config={"times": 3}, against=("one",))
SUITE.aims.append(Aim("one", "three", 0.5))

@SUITE.case("absent", needs=("a-package-that-is-nowhere",))
def absent(meter):
    raise AssertionError("started in vain")

ERRORS = {
    "skips": SkippedError("not today"), "lacks": MissingExtraError("pip install 'x[demo]'"),
    "raises": OSError("no more"),
}

def fail(meter, *, name):
    if name == "raises":
        meter.step()
    raise ERRORS[name]

for name in ERRORS:
    SUITE.add(name, fail, config={"name": name})

@SUITE.case("leaves")
def leaves(meter):
    return {}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy_suite.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"suite": "toy", "suites": {"toy": "toy_suite"}, "device": "cpu", "threads": 1, "out": tmp_path / "out"}


def test_a_list_of_no_case_shows_what_is_there(toy, capsys):
    with pytest.raises(BenchError, match=r"only=\('nothing',\) matches none of these cases"):
        list_cases(BenchSettings(**toy, only=("nothing",)))
    everything = capsys.readouterr().out
    assert list_cases(BenchSettings(**toy)) == 0
    assert capsys.readouterr().out == everything
    assert "  three\n" in everything


REASONS = {
    "skips": ("skipped", "not today"),
    "absent": ("skipped", "a-package-that-is-nowhere not installed"),
    "lacks": ("skipped", "pip install 'x[demo]'"),
    "raises": ("failed", "OSError: no more"),
    "leaves": ("failed", "RuntimeError: 'leaves' returned before meter.step() said False; let it loop until then."),
}


@pytest.mark.parametrize("names", [("one", "absent", "raises"), pytest.param(("*",), marks=pytest.mark.slow)])
def test_one_bad_case_stops_nothing_else(toy, names, capsys):
    assert run_bench(BenchSettings(**toy, only=names, processes=2)) == 1
    results = json.loads((toy["out"] / "results.json").read_text())
    (suite,) = results["suites"]
    rows = {row["case"]: row for row in suite["rows"]}
    assert rows["one"]["status"] == "ok", rows["one"]["reason"]
    rounds = [(part["sweep"], part["process"], part["steps"]) for part in rows["one"]["rounds"]]
    assert rounds == [(0, 0, 3), (1, 0, 3), (2, 1, 3), (3, 1, 3)]
    assert rows["one"]["numbers"] == {"naps": 2 + 3 + (1 + 3) - 1, "loss": None}, "of the last process"
    assert all(part["seconds"] >= 0.03 for part in rows["one"]["rounds"])
    assert rows["one"]["peak_bytes"] > 2**20
    assert suite["prepared"] == {"nap": 0.01}

    reasons = {name: (row["status"], row["reason"]) for name, row in rows.items() if row["status"] != "ok"}
    assert reasons == {name: REASONS[name] for name in REASONS if name in rows}
    assert "Traceback" in (toy["out"] / "logs" / "toy.raises.log").read_text()
    assert results["machine"]["versions"]["torch"]
    assert (toy["out"] / "toy.png").stat().st_size > 1000
    assert "| raises | " in (toy["out"] / "results.md").read_text()
    shown = capsys.readouterr()
    assert "OSError: no more" in shown.out
    assert f"toy: {len(rows)} cases" in shown.err
    assert "\x1b" not in shown.err, "no bar where there is no terminal"


def test_former_results_are_kept(toy, monkeypatch):
    toy["out"].mkdir()
    (toy["out"] / "results.json").write_text("the last one")
    (toy["out"] / "results-1.json").write_text("an older one")
    with pytest.raises(BenchError, match=r"only=\('O9',\) matches no case; `python -m benchmarks --list` shows"):
        run_bench(BenchSettings(**toy, only=("O9",)))
    assert (toy["out"] / "results.json").read_text() == "the last one", "it stays where there is nothing to run"
    monkeypatch.setattr(sys, "argv", ["/some/where/benchmarks/__main__.py", "toy", "--rounds", "1"])
    assert run_bench(BenchSettings(**toy, only=("one",), rounds=1)) == 0
    assert (toy["out"] / "results-1.json").read_text() == "an older one"
    assert (toy["out"] / "results-2.json").read_text() == "the last one"
    results = json.loads((toy["out"] / "results.json").read_text())
    assert results["settings"]["rounds"] == 1
    assert results["command"] == ["python", "-m", "benchmarks", "toy", "--rounds", "1"]


@pytest.mark.parametrize("folder", ["file/within", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_is_refused_before_any_case(folder, tmp_path, toy):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(BenchError, match=r"out='.*': .*; expected a folder that can be made and written"):
        run_bench(BenchSettings(**{**toy, "out": tmp_path / folder}))


def test_a_preparation_that_fails_is_told_in_every_row(toy, tmp_path):
    text = TOY.replace('return {"nap": 0.01}', 'raise OSError("no bed")')
    (tmp_path / "sleepless_suite.py").write_text(text)
    options = {**toy, "suites": {"toy": "sleepless_suite"}, "only": ("one", "three")}
    (suite,) = run_suites(BenchSettings(**options))["suites"]
    for row in suite["rows"]:
        assert (row["status"], row["reason"]) == ("failed", "preparation: OSError: no bed")


def test_nothing_more_is_started_when_the_time_is_up(toy, monkeypatch):
    monkeypatch.setattr(BenchSettings, "seconds", 0.0)
    results = run_suites(BenchSettings(**toy, only=("one", "three")))
    assert (results["suites"], results["not_run"], results["interrupted"]) == ([], ["toy"], False)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_keep_what_was_measured(number, toy):
    def press():
        wait_until((toy["out"] / "results.json").exists, 120)  # it is written after the first sweep
        os.kill(os.getpid(), number)

    pressing = threading.Thread(target=press)
    pressing.start()
    assert run_bench(BenchSettings(**toy, rounds=10**6, only=("one",))) == 130
    pressing.join()
    results = json.loads((toy["out"] / "results.json").read_text())
    (row,) = results["suites"][0]["rows"]
    assert results["interrupted"]
    assert (row["status"], len(row["rounds"]) >= 1, row["numbers"]["naps"] > 0) == ("ok", True, True)


@pytest.mark.parametrize("again", [[], ["--only"]])
def test_the_command_lists_cases(again, capsys):
    assert main(["overhead", "--list", "--device", "cpu", "--only", "Lightning", *again, "ApexAMP O0"]) == 0
    head, *cases = capsys.readouterr().out.splitlines()
    assert head.startswith("overhead: ")
    assert [line.strip() for line in cases] == ["plain loop", "Lightning", "ApexAMP O0"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["overhead", "precision"], "expected one suite, got 'precision' besides"),
    (["compare", "a"], "expected two results, compare A B; got 1"),
    (["compare", "a", "b"], "'a' is not a file"),
    (["--minutes", "0"], "minutes=0.0: expected a number above 0"),
])  # fmt: skip
def test_the_command_refuses_what_it_cannot_do(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("suite", ["precision", "overhead", "compiled", "memory", "tricks", "loaders", "prefetch"])
def test_every_case_of_a_real_suite_runs(suite, tmp_path):
    settings = BenchSettings(suite=suite, device="cpu", threads=1, rounds=1, out=tmp_path / "out")
    (measured,) = run_suites(settings)["suites"]
    assert {row["case"]: row["reason"] for row in measured["rows"] if row["status"] == "failed"} == {}
    assert any(row["status"] == "ok" for row in measured["rows"])
    for row in measured["rows"]:
        assert row["status"] == "skipped" or len(row["rounds"]) == 1
