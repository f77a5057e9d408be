"""The benchmark as a user runs it: real processes, a toy suite, and the real suites in the slow form."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lightning_turbo.bench.case import BenchError
from lightning_turbo.bench.command import list_cases, run_bench
from lightning_turbo.bench.runner import run_suites
from lightning_turbo.bench.settings import BenchSettings
from lightning_turbo.cli import main

TOY = """
import os, subprocess, sys, threading, time
from lightning_turbo.bench.case import Aim, SkippedError, Suite
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
SUITE.add("three", nap, config={"times": 3}, against=("busy",))
SUITE.aims.append(Aim("one", "three", 0.5))

@SUITE.case("busy")
def busy(meter):
    # A thread and a process go on while the main thread waits for its turn, unless they are held.
    counts = [0]
    def count():
        while not meter.over:
            counts[0] += 1
            time.sleep(0.001)
    thread = threading.Thread(target=count)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("CHILD_FILE", "w").write(str(child.pid))
    thread.start()
    first = None
    while meter.step():
        if first is None:
            first = (time.monotonic(), counts[0])
        time.sleep(0.01)
    share = (counts[0] - first[1]) / ((time.monotonic() - first[0]) / 0.001)
    thread.join()
    return {"share": share}

@SUITE.case("skips")
def skips(meter):
    raise SkippedError("not today")

@SUITE.case("absent", needs=("a-package-that-is-nowhere",))
def absent(meter):
    raise AssertionError("started in vain")

@SUITE.case("lacks")
def lacks(meter):
    raise MissingExtraError("pip install 'x[demo]'")

@SUITE.case("raises")
def raises(meter):
    meter.step()
    raise OSError("no more")

@SUITE.case("dies")
def dies(meter):
    steps = 0
    while meter.step():
        steps += 1
        if steps == 8:
            print("goodbye", file=sys.stderr, flush=True)
            os._exit(3)

@SUITE.case("leaves")
def leaves(meter):
    return {}
"""
LINGERS = """
@SUITE.case("lingers", base="lingers")
def lingers(meter):
    # Its second process never gets behind its warm-up.
    with open("CHILD_FILE", "a") as file:
        file.write("x")
    if os.path.getsize("CHILD_FILE") == 2:
        time.sleep(600)
    while meter.step():
        time.sleep(0.01)
    return {"naps": 1.0}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy_suite.py").write_text(TOY.replace("CHILD_FILE", str(tmp_path / "child")))
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"suite": "toy", "suites": {"toy": "toy_suite"}, "device": "cpu", "threads": 1, "out": tmp_path / "out"}


def alive(pid):
    """Whether a process is there and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pid, within=30.0):
    deadline = time.monotonic() + within
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def test_a_list_of_no_case_shows_what_is_there(toy, capsys):
    with pytest.raises(BenchError, match=r"only=\('nothing',\) matches none of these cases"):
        list_cases(BenchSettings(**toy, only=("nothing",)))
    everything = capsys.readouterr().out
    assert list_cases(BenchSettings(**toy)) == 0
    assert capsys.readouterr().out == everything
    assert "  busy\n" in everything


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_does_not_take_is_refused_before_any_case(toy, seed):
    with pytest.raises(BenchError, match=rf"seed={seed}; accepted are whole numbers from 0 to 2\*\*32 - 1"):
        run_bench(BenchSettings(**toy, seed=seed))
    assert not toy["out"].exists()


def test_one_bad_case_stops_nothing_else(toy, tmp_path, capsys):
    assert run_bench(BenchSettings(**toy)) == 1
    results = json.loads((toy["out"] / "results.json").read_text())
    (suite,) = results["suites"]
    rows = {row["case"]: row for row in suite["rows"]}

    # The good ones: interleaved rounds of the same number of steps, warm-up and lead besides.
    for name in ("one", "three", "busy"):
        assert rows[name]["status"] == "ok", rows[name]["reason"]
        assert [part["sweep"] for part in rows[name]["rounds"]] == [0, 1, 2]
        assert {part["process"] for part in rows[name]["rounds"]} == {0}
        assert all(part["steps"] == 3 for part in rows[name]["rounds"])
    assert rows["one"]["numbers"] == {"naps": 2 + 3 * (3 + 1) - 1, "loss": None}
    assert all(part["seconds"] >= 0.03 for part in rows["one"]["rounds"])
    assert rows["one"]["peak_bytes"] >= rows["one"]["start_bytes"] > 2**20
    assert rows["one"]["threads"] == 1
    assert suite["prepared"] == {"nap": 0.01}

    # While the others measured, thread and process of this one stood still.
    assert rows["busy"]["numbers"]["share"] < 0.7
    assert gone(int((tmp_path / "child").read_text()))

    # The bad ones say why, each in its row.
    reasons = {name: (rows[name]["status"], rows[name]["reason"]) for name in rows if rows[name]["status"] != "ok"}
    assert reasons == {
        "skips": ("skipped", "not today"),
        "absent": ("skipped", "a-package-that-is-nowhere not installed"),
        "lacks": ("skipped", "pip install 'x[demo]'"),
        "raises": ("failed", "OSError: no more"),
        "dies": ("failed", "ended with exit status 3: goodbye"),
        "leaves": ("failed", "RuntimeError: 'leaves' returned before meter.step() said False; let it loop until then."),
    }
    assert "Traceback" in (toy["out"] / "logs" / "toy.raises.log").read_text()

    # The report, in full, with the circumstances.
    assert results["machine"]["versions"]["torch"]
    assert results["settings"]["suite"] == "toy"
    assert (toy["out"] / "toy.png").stat().st_size > 1000
    report = (toy["out"] / "results.md").read_text()
    assert "| dies | " in report
    assert "| one | three | time | 0.50 | " in report
    shown = capsys.readouterr()
    assert "goodbye" in shown.out
    assert "x[demo]" in shown.out, "no markup"
    assert "toy: 9 cases" in shown.err
    assert "\x1b" not in shown.err, "no bar where there is no terminal"


def test_former_results_are_kept(toy):
    options = {**toy, "only": ("one",), "rounds": 1}
    toy["out"].mkdir()
    (toy["out"] / "results.json").write_text("the last one")
    (toy["out"] / "results-1.json").write_text("an older one")
    assert run_bench(BenchSettings(**options)) == 0
    assert (toy["out"] / "results-1.json").read_text() == "an older one"
    assert (toy["out"] / "results-2.json").read_text() == "the last one"
    assert json.loads((toy["out"] / "results.json").read_text())["settings"]["rounds"] == 1


def test_a_former_result_stays_where_it_is_when_there_is_nothing_to_run(toy):
    toy["out"].mkdir()
    (toy["out"] / "results.json").write_text("the last one")
    with pytest.raises(BenchError, match="matches no case"):
        run_bench(BenchSettings(**toy, only=("O9",)))
    assert [path.name for path in toy["out"].iterdir()] == ["results.json"]


@pytest.mark.parametrize("place", ["file/within", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_is_refused_before_any_case(place, tmp_path, toy):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(BenchError, match=r"out='.*': .*; accepted is a folder that can be made or written"):
        run_bench(BenchSettings(**{**toy, "out": tmp_path / place}))
    assert not (tmp_path / "child").exists()


@pytest.mark.parametrize("program", ["/some/where/lightning-turbo", "/some/where/lightning_turbo/__main__.py"])
def test_the_command_is_kept_as_it_can_be_given_again(toy, monkeypatch, program):
    monkeypatch.setattr(sys, "argv", [program, "bench", "toy"])
    assert run_bench(BenchSettings(**toy, only=("one",), rounds=1)) == 0
    assert json.loads((toy["out"] / "results.json").read_text())["command"] == ["lightning-turbo", "bench", "toy"]


def test_a_pattern_that_matches_nothing_is_refused(toy):
    with pytest.raises(ValueError, match=r"only=\('O9',\) matches no case; `lightning-turbo bench --list` shows"):
        run_suites(BenchSettings(**toy, only=("O9",)))
    assert not toy["out"].exists()


def test_a_preparation_that_fails_is_told_in_every_row(toy, tmp_path):
    text = TOY.replace('return {"nap": 0.01}', 'raise OSError("no bed")')
    (tmp_path / "sleepless_suite.py").write_text(text)
    options = {**toy, "suites": {"toy": "sleepless_suite"}, "only": ("one", "three")}
    (suite,) = run_suites(BenchSettings(**options))["suites"]
    for row in suite["rows"]:
        assert (row["status"], row["reason"]) == ("failed", "preparation: OSError: no bed")


def test_rounds_are_divided_among_fresh_processes(toy):
    assert run_bench(BenchSettings(**toy, only=("one",), processes=2)) == 0
    results = json.loads((toy["out"] / "results.json").read_text())
    (row,) = results["suites"][0]["rows"]
    assert [part["sweep"] for part in row["rounds"]] == [0, 1, 2, 3]
    assert [part["process"] for part in row["rounds"]] == [0, 0, 1, 1]
    assert row["numbers"]["naps"] == 2 + 2 * (3 + 1) - 1, "of the last process"
    assert results["settings"]["processes"] == 2


@pytest.mark.parametrize("limit", [{"quick": True}, {"minutes": 0.005}])
def test_nothing_more_is_started_when_the_time_is_up(limit, toy, monkeypatch):
    monkeypatch.setattr("lightning_turbo.bench.settings.QUICK_SECONDS", 0.3)  # less than the start of a process takes
    results = run_suites(BenchSettings(**toy, **limit, only=("one", "three")))
    for row in results["suites"][0]["rows"]:
        assert (row["status"], row["reason"]) == ("skipped", "no time was left for it")
    assert not results["interrupted"]
    monkeypatch.setattr(BenchSettings, "seconds", -1.0)
    results = run_suites(BenchSettings(**toy, **limit, only=("one",)))
    assert (results["suites"], results["not_run"]) == ([], ["toy"])


@contextlib.contextmanager
def long_run(toy, tmp_path, written, **options):
    """A benchmark of a thousand rounds in a process of its own, as soon as its case has written so many characters."""
    options = {**toy, "out": str(toy["out"]), "rounds": 1000, **options}
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            from pathlib import Path
            from lightning_turbo.bench.command import run_bench
            from lightning_turbo.bench.settings import BenchSettings
            options = {options!r}
            sys.exit(run_bench(BenchSettings(**{{**options, "out": Path(options["out"])}})))
            """
        )
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    child = tmp_path / "child"
    try:
        deadline = time.monotonic() + 120
        while not (child.exists() and child.stat().st_size >= written) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def measuring(toy, tmp_path):
    """A long run of two cases, already measuring."""
    with long_run(toy, tmp_path, 1, only=("one", "busy")) as process:
        time.sleep(3.0)  # both have started when the second has; some rounds follow
        yield process


def workers_of(pid):
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if b"bench.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_keep_what_was_measured(number, measuring, toy, tmp_path):
    workers = workers_of(measuring.pid)
    assert len(workers) == 2
    measuring.send_signal(number)
    output, _ = measuring.communicate(timeout=60)
    assert measuring.returncode == 130, output
    results = json.loads((toy["out"] / "results.json").read_text())
    assert results["interrupted"]
    rows = {row["case"]: row for row in results["suites"][0]["rows"]}
    assert len(rows["one"]["rounds"]) >= 1
    assert rows["one"]["status"] == "ok"
    assert rows["one"]["numbers"]["naps"] > 0, "the case still returned its numbers"
    assert "**interrupted**" in (toy["out"] / "results.md").read_text()
    assert all(gone(pid) for pid in workers)
    assert gone(int((tmp_path / "child").read_text()))


def test_ctrl_c_while_a_further_process_starts_keeps_what_was_measured(toy, tmp_path):
    (tmp_path / "toy_suite.py").write_text(TOY + LINGERS.replace("CHILD_FILE", str(tmp_path / "child")))
    with long_run(toy, tmp_path, 2, only=("lingers",), processes=1000) as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    rows = json.loads((toy["out"] / "results.json").read_text())["suites"][0]["rows"]
    (row,) = [row for row in rows if row["case"] == "lingers"]
    assert (row["status"], len(row["rounds"]), row["numbers"]) == ("ok", 1, {"naps": 1.0})


@needs_proc
def test_a_killed_runner_leaves_its_rounds_and_no_process_behind(measuring, toy, tmp_path):
    workers = workers_of(measuring.pid)
    assert len(workers) == 2
    measuring.kill()
    measuring.wait()
    assert all(gone(pid) for pid in [*workers, int((tmp_path / "child").read_text())])
    results = json.loads((toy["out"] / "results.json").read_text())
    assert results["finished"] is None
    for row in results["suites"][0]["rows"]:
        assert row["status"] == "interrupted"
        assert len(row["rounds"]) >= 1


def test_the_command_lists_cases(capsys):
    assert main(["bench", "overhead", "--list", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("overhead: ")
    assert "  plain loop\n" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "suite='nonsense'; accepted are"),
        (["overhead", "precision"], "bench takes one suite; 'precision' is one too many"),
        (["compare", "a"], "bench compare takes two results, A and B; 1 were given"),
        (["compare", "a", "b"], "'a' is no file"),
        (["--minutes", "0"], "minutes=0.0; accepted are numbers above 0"),
        (["--threads", "0"], "threads=0; accepted are whole numbers from 1 on"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("suite", ["precision", "overhead", "memory", "tricks", "loaders", "prefetch"])
def test_every_case_of_a_real_suite_runs(suite, tmp_path):
    settings = BenchSettings(suite=suite, device="cpu", threads=1, rounds=1, out=tmp_path / "out")
    (measured,) = run_suites(settings)["suites"]
    assert {row["case"]: row["reason"] for row in measured["rows"] if row["status"] == "failed"} == {}
    assert any(row["status"] == "ok" for row in measured["rows"])
    for row in measured["rows"]:
        assert row["status"] == "skipped" or len(row["rounds"]) == 1
