"""The benchmark command with real processes: a toy suite, and the real suites in the slow tests."""

import json
import os
import signal
import threading

import pytest

from benchmarks.__main__ import main, run
from benchmarks.runner import Settings, measure
from benchmarks.suite import SUITES, BenchError
from lightning_turbo.measure import write_json
from tests.leftovers import wait_until

TOY = """
import time
from benchmarks.suite import Aim, Case, SkippedError, Suite
from lightning_turbo.errors import MissingExtraError

def prepare(timer):
    return {"card": "a card"}

def nap(timer, *, times):
    naps = 0
    while timer.step(samples=5):
        naps += 1
        time.sleep(times * 0.01)
    return {"naps": naps, "loss": float("nan")}

ERRORS = {
    "skips": SkippedError("not today"), "lacks": MissingExtraError("pip install 'x[demo]'"),
    "raises": OSError("no more"), "imports": ModuleNotFoundError("No module named 'skimage'", name="skimage"),
}

def fail(timer, *, name):
    if name == "raises":
        timer.step()
    raise ERRORS[name]

def leave(timer):
    return {}

SUITE = Suite(
    name="toy", about="Naps.", steps=3, rounds=3, warmup=2, prepare=prepare, aims=[Aim("one", "three", 0.5)],
    quick=("one",),
    cases=[
        Case(name="one", run=nap, config={"times": 1}),
        Case(name="three", run=nap, config={"times": 3}, against=("one",)),
        Case(name="absent", run=nap, needs=("a-package-that-is-nowhere",)),
        *(Case(name=name, run=fail, config={"name": name}) for name in ERRORS),
        Case(name="leaves", run=leave),
    ],
)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy_suite.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(SUITES, "toy", "toy_suite:SUITE")
    return {"suite": "toy", "device": "cpu", "threads": 1, "out": tmp_path / "out"}


REASONS = {
    "skips": ("skipped", "not today"),
    "absent": ("skipped", "a-package-that-is-nowhere not installed"),
    "lacks": ("skipped", "pip install 'x[demo]'"),
    "imports": ("skipped", "skimage not installed"),
    "raises": ("failed", "OSError: no more"),
    "leaves": ("failed", "RuntimeError: 'leaves' returned before timer.step() returned False. Let it run until then."),
}


def read(folder):
    results = json.loads((folder / "results.json").read_text())
    return results, {row["case"]: row for suite in results["suites"] for row in suite["rows"]}


@pytest.mark.parametrize(("names", "processes", "sweeps"), [
    (("one", "absent", "raises"), 1, [(0, 0), (1, 0), (2, 0)]),
    pytest.param(("*",), 2, [(0, 0), (1, 0), (2, 1), (3, 1)], marks=pytest.mark.slow),
])  # fmt: skip
def test_a_failing_benchmark_case_does_not_stop_the_others(toy, names, processes, sweeps, capsys):
    assert run(Settings(**toy, only=names, processes=processes)) == 1
    results, rows = read(toy["out"])
    assert rows["one"]["status"] == "ok", rows["one"]["reason"]
    assert [(part["sweep"], part["process"]) for part in rows["one"]["rounds"]] == sweeps
    assert {part["steps"] for part in rows["one"]["rounds"]} == {3}
    naps = 2 + 3 + (1 + 3) * (len(sweeps) // processes - 1) - 1
    assert rows["one"]["numbers"] == {"naps": naps, "loss": None}, "of the last process"
    assert all(part["seconds"] >= 0.03 for part in rows["one"]["rounds"])
    assert rows["one"]["peak_bytes"] > 2**20
    assert results["suites"][0]["prepared"] == {"card": "a card"}

    reasons = {name: (row["status"], row["reason"]) for name, row in rows.items() if row["status"] != "ok"}
    assert reasons == {name: REASONS[name] for name in REASONS if name in rows}
    assert "Traceback" in (toy["out"] / "logs" / "toy.raises.log").read_text()
    assert results["machine"]["versions"]["torch"]
    assert (toy["out"] / "toy.png").stat().st_size > 1000
    assert "| raises " in (toy["out"] / "results.md").read_text()
    shown = capsys.readouterr()
    assert "OSError: no more" in shown.out
    assert f"toy: {len(rows)} cases" in shown.err
    assert "\x1b" not in shown.err, "no progress bar without a terminal"


@pytest.mark.slow
def test_an_interrupted_benchmark_resumes(toy, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Settings, "seconds", 0.0)
        results = measure(Settings(**toy, only=("one",)), save=len)
    assert (results["suites"], results["not_run"], results["interrupted"]) == ([], ["toy"], False)

    rounds = [{"sweep": n, "process": 0, "seconds": 0.03, "steps": 3, "samples": 15} for n in range(3)]
    rows = [
        {"case": "one", "status": "ok", "base": "one", "against": [], "kind": "torch", "reason": "", "numbers": {},
         "rounds": rounds, "peak_bytes": 1},
        {"case": "three", "status": "skipped", "reason": "no time was left for it", "rounds": []},
        {"case": "skips", "status": "skipped", "reason": "not today", "rounds": []},
    ]  # fmt: skip
    results["suites"] = [{"suite": "toy", "prepared": {"card": "the same"}, "rows": rows}]
    path = write_json(results, toy["out"] / "results.json")
    before = path.read_text()
    with pytest.raises(BenchError, match=r"--out: expected a folder without results, got .*Add --resume to continue"):
        run(Settings(**toy, only=("one",)))
    with pytest.raises(BenchError, match=r"expected the machine and settings of the results in .*'threads: 1 -> 2'"):
        run(Settings(**{**toy, "threads": 2}, only=("one",), resume=True))
    assert path.read_text() == before, "refused before anything is written"

    assert measure(Settings(**toy, only=("one",)), former=results, save=len)["suites"][0]["rows"][0] == rows[0]
    results = measure(Settings(**toy, only=("three", "skips")), former=results, save=len)
    (suite,) = results["suites"]
    found = {row["case"]: row for row in suite["rows"]}
    assert list(found) == ["one", "three", "skips"]
    assert suite["prepared"] == {"card": "the same"}
    sweeps = {name: [(part["process"], part["sweep"]) for part in row["rounds"]] for name, row in found.items()}
    assert sweeps["three"] == [(1, 3), (1, 4), (1, 5)]
    assert sweeps["one"] == [(0, 0), (0, 1), (0, 2), *sweeps["three"]], "measured again, for the ratios of the new case"
    assert found["skips"]["status"] == "skipped"


def test_an_unwritable_output_folder_is_refused_before_any_case(toy, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    assert main(["toy", "--out", str(tmp_path / "file" / "within")]) == 2
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_keep_finished_measurements(number, toy):
    def press():
        wait_until((toy["out"] / "results.json").exists, 120)  # it is written after the first sweep
        os.kill(os.getpid(), number)

    pressing = threading.Thread(target=press)
    pressing.start()
    assert run(Settings(**toy, rounds=10**6, only=("one",))) == 130
    pressing.join()
    results, rows = read(toy["out"])
    assert results["interrupted"]
    assert (rows["one"]["status"], len(rows["one"]["rounds"]) >= 1, rows["one"]["numbers"]["naps"] > 0) == (
        "ok", True, True,
    )  # fmt: skip


def test_the_command_lists_cases(capsys):
    assert main(["overhead", "--list", "--device", "cpu", "--only", "Lightning", "--only", "ApexAMP O0"]) == 0
    head, *cases = capsys.readouterr().out.splitlines()
    assert head.startswith("overhead: ")
    assert [line.strip() for line in cases] == ["plain loop", "Lightning", "ApexAMP O0"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["overhead", "--only", "O9"], "only=('O9',) matches no case; `python -m benchmarks --list` shows their names"),
    (["--minutes", "0"], "minutes=0.0: expected a number above 0"),
])  # fmt: skip
def test_invalid_command_line_arguments_are_refused(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SUITES)
def test_every_benchmark_case_runs_in_its_smallest_form(name, tmp_path):
    only = {
        "grid": ("free step, even io load x1, ?*",),
        "gpu": ("toy*", "*batch 128: O[0-3], bf16", "*UNet*: O1, bf16", "trans*: *compiled", "feed*", "*doctor*"),
    }.get(name, ("*",))
    out = tmp_path / "out"
    settings = Settings(suite=name, device="cpu", threads=1, rounds=1, quick=True, minutes=18, only=only, out=out)
    (measured,) = measure(settings, save=len)["suites"]
    assert {row["case"]: row["reason"] for row in measured["rows"] if row["status"] == "failed"} == {}
    assert any(row["status"] == "ok" for row in measured["rows"])
    for row in measured["rows"]:
        assert row["status"] == "skipped" or len(row["rounds"]) == 1
