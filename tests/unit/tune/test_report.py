"""What is written after a search."""

import io
import json

import pytest

from lightning_turbo.measure import new_row
from lightning_turbo.tune.candidates import Facts, list_candidates, select
from lightning_turbo.tune.report import describe_headroom, make_results, print_results, write_results
from lightning_turbo.tune.search import Search


class Still:
    """A runner that measures what the table says, without noise."""

    cost, left = 1.0, 1e6

    def __init__(self, factors):
        self.factors = factors

    def set_pace(self, step_seconds, accumulate):
        pass

    def measure(self, cases):
        return {case: self.row(case) for case in cases}

    def row(self, case):
        seconds = 0.004 if case.mode == "step" else 0.003
        for name in case.names:
            seconds *= self.factors.get(name, 1.001)
        rounds = [{"sweep": n, "process": 0, "seconds": seconds, "steps": 1} for n in range(3)]
        numbers = {"facts": {"can_fuse": True}, "losses": [2.0, 1.5 + 0.2 * ("O1" in case.names)]}
        return {**new_row(), "status": "ok", "rounds": rounds, "numbers": numbers}


@pytest.fixture
def search():
    made = Search(select(list_candidates(2), ["O1", "fused", "lean", "tf32"]), Still({"O1": 0.5, "fused": 0.8}))
    made.run()
    return made


def test_the_files_hold_what_was_found(search, tmp_path):
    results = make_results(search, ["python", "train.py"])
    paths = write_results(search, results, tmp_path)
    assert [path.name for path in paths] == ["tune.json", "turbo.yaml", "turbo.py", "tune.png"]
    assert json.loads(paths[0].read_text()) == results
    assert results["default"] == {"step_ms": 4.0}
    assert results["headroom"]["waiting_ms"] == pytest.approx(1.0)
    rows = {row["name"]: row for row in results["candidates"]}
    assert rows["fused"]["ratio"] == pytest.approx(0.8)
    assert rows["fused"]["interval"] == pytest.approx([0.8, 0.8])
    kept = {name: row["kept"] for name, row in rows.items()}
    assert kept == {"O1": True, "fused": True, "lean": False, "tf32": False}
    assert rows["tf32"]["why"] == "not tried: it needs a CUDA device"
    assert rows["tf32"]["ratio"] is None
    chosen = results["chosen"]
    assert (chosen["settings"], chosen["result"]) == (["fused", "O1"], "other maths")
    assert (chosen["ratio"], chosen["interval"]) == (pytest.approx(0.4), pytest.approx([0.4, 0.4]))
    headline = "2.50 times as fast as the default (2.50 to 2.50), result: other maths"
    assert all(path.read_text().splitlines()[0].endswith((headline, f"{headline}.")) for path in paths[1:3])
    assert paths[3].read_bytes().startswith(b"\x89PNG")
    screen = io.StringIO()
    print_results(results, paths, screen)
    assert "Chosen: fused + O1" in screen.getvalue()
    rows = [line.split() for line in screen.getvalue().splitlines()]
    assert ["fused", "1.25", "1.25-1.25", "same"] in [row[:4] for row in rows]


def test_nothing_is_written_as_nothing(tmp_path):
    made = Search(select(list_candidates(2), ["lean"]), Still({}))
    made.run()
    results = make_results(made, ["python", "train.py"])
    assert results["chosen"] == {"settings": [], "ratio": None, "interval": None, "result": "same bits"}
    paths = write_results(made, results, tmp_path)
    assert "nothing helps here" in paths[2].read_text()
    assert "trainer: {}" in paths[1].read_text()
    assert make_results(Search([], Still({})), ["python"])["headroom"] is None, "ended before anything was measured"


@pytest.mark.parametrize(("step", "one_batch", "loader", "sentence"), [
    (64.0, 33.0, 30.9, "64.0 ms, 31.0 of them waiting for data; without waiting it would be 1.9 times as fast."),
    (10.0, 9.5, 0.0, "10.0 ms, 0.500 of them waiting for data; without waiting it would be 1.05 times as fast."),
    (10.0, 11.0, 0.0, "10.0 ms, 0.000 of them waiting for data: prefetching cannot help."),
])  # fmt: skip
def test_the_headroom_in_a_sentence(step, one_batch, loader, sentence):
    facts = Facts(step_ms=step, one_batch_ms=one_batch, loader_ms=loader)
    alone = f" The loader alone takes {loader} ms a batch." if loader else ""
    assert describe_headroom(facts) == f"Your step takes {sentence}{alone}"


def test_without_matplotlib_there_is_no_picture_and_one_line_says_how_to_get_it(search, tmp_path, monkeypatch):
    results = make_results(search, ["python", "train.py"])
    write_results(search, results, tmp_path)
    monkeypatch.setattr("lightning_turbo.measure.picture.installed", lambda name: name != "matplotlib")
    paths = write_results(search, results, tmp_path)
    assert [path.name for path in paths] == ["tune.json", "turbo.yaml", "turbo.py"]
    assert not (tmp_path / "tune.png").exists(), "the picture of an earlier search would belong to other numbers"
    screen = io.StringIO()
    print_results(results, paths, screen)
    *_, last = screen.getvalue().splitlines()
    assert last.endswith("matplotlib is not installed: pip install 'lightning-turbo[pictures]'")
