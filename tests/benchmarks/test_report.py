"""Ratios, intervals and verdicts of a report, and its files."""

import json

import pytest

from benchmarks.report import aim_verdicts, load_results, suite_tables, write_report
from benchmarks.runner import FORMAT

MACHINE = {"processor": "a CPU", "memory_bytes": 2**34, "bfloat16_instructions": False, "versions": {"torch": "2.13"}}
SETTINGS = {"suite": "toy", "quick": False, "device": "cpu"}


def row(case, seconds, *, base="slow", status="ok", reason="", against=(), peak=2**20, **numbers):
    rounds = [{"sweep": sweep, "seconds": s, "steps": 1, "samples": 10} for sweep, s in enumerate(seconds)]
    return {
        "case": case, "status": status, "reason": reason, "config": {}, "base": base, "against": list(against),
        "kind": "ours" if case == "fast" else "torch", "rounds": rounds, "numbers": numbers, "peak_bytes": peak,
    }  # fmt: skip


def aim(at_most, **options):
    return {
        "case": "fast", "against": "slow", "at_most": at_most, "quantity": "seconds", "fact": "",
        **options,
    }  # fmt: skip


@pytest.fixture
def results():
    rows = [
        row("slow", [0.002, 0.002, 0.002], loss=0.5),
        row("fast", [0.001, 0.0012, 0.0014], loss=0.25, accuracy=0.9, against=("middle",)),
        row("middle", [0.0015, 0.0015, 0.0015], state_bytes=3 * 2**20),
        row("absent", [], status="skipped", reason="a|b not installed", peak=None),
        row("broken", [0.1], status="failed", reason="OSError: no", peak=None),
    ]
    suite = {
        "suite": "toy", "about": "Toys.", "unit": "step", "quantity": "seconds", "steps": 1,
        "warmup": 2, "lead": 0, "round_seconds": 0.0, "prepared": {"nap seconds": 0.5, "card": "a card"},
        "left_out": ["peer"], "rows": rows, "aims": [aim(0.7)],
    }  # fmt: skip
    return {
        "format": FORMAT, "lightning_turbo": "0", "command": ["python", "-m", "benchmarks"], "settings": SETTINGS,
        "machine": MACHINE, "started": "then", "finished": "now", "interrupted": False, "not_run": [],
        "suites": [suite],
    }  # fmt: skip


def cells(results):
    columns, lines = suite_tables(results["suites"][0], MACHINE)[0]
    return {line[0]: dict(zip(columns, line, strict=True)) for line in lines}


def test_every_row_shows_time_ratio_memory_and_quality(results):
    fast = cells(results)["fast"]
    assert fast["ms a step"] == "1.20 (1.10-1.30)"
    assert fast["time / baseline"] == "0.60 (0.55-0.65)"
    assert fast["samples/s"] == "8333"
    assert fast["peak memory, MiB"] == "1.0"
    assert (fast["loss"], fast["accuracy"]) == ("0.25", "0.9")
    assert cells(results)["middle"]["state, MiB"] == "3.0"
    _, lines = suite_tables(results["suites"][0], MACHINE)[1]
    assert lines == [["fast", "middle", "0.80 (0.73-0.87)"]]


@pytest.mark.parametrize(("stated", "verdict"), [
    (aim(0.7), "met"),
    (aim(0.5), "missed"),
    (aim(0.6), "undecided"),
    (aim(0.7, fact="bfloat16_instructions"), "does not count here"),
    (aim(2.0, quantity="peak_bytes"), "met"),
    (aim(0.7, case="absent"), "not measured"),
    (aim(0.25, against="", quantity="loss"), "met"),
    (aim(0.24, against="", quantity="loss"), "missed"),
    (aim(1.0, against="", quantity="nothing"), "not measured"),
])  # fmt: skip
def test_verdicts_of_aims(results, stated, verdict):
    results["suites"][0]["aims"] = [stated]
    assert [found for *_, found in aim_verdicts(results["suites"][0], MACHINE)] == [verdict]


def test_an_interval_over_processes_decides_the_verdict(results):
    # One round in three is slow in every process: the limit is between the quartiles, but the processes agree.
    suite = results["suites"][0]
    suite["rows"] = [row("base", [1.0] * 18), row("fast", [0.9, 0.9, 1.2] * 6, base="base")]
    for made in suite["rows"]:
        for part in made["rounds"]:
            part["process"] = part["sweep"] // 3
            part["seconds"] *= 1 + 0.001 * part["process"] * (made["case"] == "fast")
    suite["aims"] = [aim(1.05, case="fast", against="base")]
    ((_, value, ends, verdict),) = aim_verdicts(suite, MACHINE)
    assert value.low < 1.05 < value.high
    assert (0.9 * 0.9 * 1.2) ** (1 / 3) < ends[0] < ends[1] < 1.0
    assert verdict == "met"
    assert f"{ends[0]:.3f}-{ends[1]:.3f}" in suite_tables(suite, MACHINE)[-1][1][0]


def test_the_folder_has_json_markdown_and_charts(results, tmp_path):
    paths = write_report(results, tmp_path / "out")
    assert sorted(path.name for path in paths) == ["results.json", "results.md", "toy.png"]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    assert load_results(tmp_path / "out") == results
