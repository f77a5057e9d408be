"""What is written and said after a search."""

import json
import math
import re

import pytest
import yaml
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

import lightning_turbo
from lightning_turbo.measure import InterruptedRunError, new_row
from lightning_turbo.tune.candidates import combine, list_candidates, select
from lightning_turbo.tune.report import as_text, changed_lines, make_results, write_results, yaml_text
from lightning_turbo.tune.search import Search

PHASES = {"data": 0.002, "forward": 0.003, "backward": 0.003, "optimizer": 0.001, "hooks": 0.001}
LOOK = {
    "phases": PHASES, "lacks": ["cuda", "new workers"], "batches": 250, "period": 250, "seconds": 3.0, "is_seen": True,
}  # fmt: skip
TABLE = {each.name: each for each in list_candidates(2)}


class Still:
    """A runner that returns the values of a table, with a little noise."""

    start, left, at = 1.0, 1e4, 0

    def __init__(self, factors):
        self.factors = factors

    def look(self):
        return {**new_row(), "status": "ok", "numbers": dict(LOOK)}

    def measure(self, together, stretch):
        self.at += 1
        return {names: self.row(names) for names in together}

    def row(self, names):
        seconds = math.prod(self.factors.get(name, 1.001) for name in names) * (1 + 0.01 * (self.at % 3) * bool(names))
        return {**new_row(), "status": "ok", "rounds": [{"sweep": 0, "process": 0, "seconds": seconds, "steps": 1}]}


class Late(Still):
    """A runner whose time limit is reached before anything is known."""

    left = 0.0

    def look(self):
        raise InterruptedRunError


def search(factors, *names, runner=Still):
    made = Search(select(list_candidates(2), names), runner(factors))
    made.run()
    return made


NAMES = ("bf16-mixed", "fused", "lean", "device-prefetch")


def test_the_result_files_contain_the_findings(tmp_path):
    found = search({"bf16-mixed": 0.5, "fused": 0.8}, *NAMES)
    results = make_results(found, ["python", "train.py"])
    paths = write_results(found, results, tmp_path)
    assert [path.name for path in paths] == ["tune.json", "turbo.yaml"]
    written = json.loads(paths[0].read_text())
    assert written["chosen"] == {"settings": ["fused", "bf16-mixed"], "result": "other maths"}
    promise = written["promise"]
    assert (promise["of"], promise["settings"]) == ("epochs", ["fused", "bf16-mixed"])
    assert promise["factor"] == pytest.approx(2.475, abs=0.01)
    assert promise["interval"][0] < promise["factor"] < promise["interval"][1]
    assert [without > chosen for without, chosen in promise["pairs_seconds"]] == [True] * 10
    assert {row["name"]: row["why"] for row in written["candidates"] if row["why"] == "kept"} == {
        "fused": "kept", "bf16-mixed": "kept",
    }  # fmt: skip
    assert written["epoch"] == {"seconds": 3.0, "batches": 250, "with_validation": True}
    assert written["step"]["phases"] == PHASES
    said = f"# at least {promise['interval'][0]:.2f} and about {promise['factor']:.2f} times as fast (95 % interval "
    assert paths[1].read_text().startswith(said)


def test_the_verdict_comes_first_and_fits_a_terminal_and_markdown():
    found = search({"bf16-mixed": 0.5, "fused": 0.8}, *NAMES)
    verdict, why, change, lines, table = as_text(make_results(found, ["python", "train.py"], 0.5)).strip().split("\n\n")
    assert re.fullmatch(
        r"`python train\.py`: at least 2\.4\d and about 2\.4\d times as fast \(95 % interval 2\.4\d to 2\.\d\d, "
        r"10 pairs of whole epochs with their validation\) with fused \+ bf16-mixed, other maths\.", verdict,
    ), verdict  # fmt: skip
    assert why.startswith("A step takes 10.0 ms: forward 30%, backward 30%, waiting for data 20%, ")
    assert "Other programs took 0.5 of" in why
    assert "--config turbo.yaml" in change
    assert lines.splitlines()[1].strip() == "Trainer(..., precision='bf16-mixed', callbacks=[..., FusedOptimizers()])"
    rows = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines()]
    assert rows[0] == ["setting", "how it ended", "result"]
    assert {name: end for name, end, _ in rows[2:]} == {
        "lean": "no gain",
        "fused": "kept",
        "bf16-mixed": "kept",
        "device-prefetch": "not tried because it needs a CUDA device",
    }
    assert len({line.index("|", 2) for line in table.splitlines() if "---" not in line}) == 1, "in columns"


def test_a_screening_says_no_number():
    """Only the promise has one."""
    results = make_results(search({"lean": 0.9, "fused": 0.5}, *NAMES), ["python", "train.py"])
    for row in results["candidates"]:
        assert not re.search(r"\d\.\d\d", row["why"])
        assert set(row) == {"name", "why", "result"}


@pytest.mark.parametrize("word", ["name=${model}_${seed}", r"C:\Users\me", r"$\xi$", '"""', "two\nlines", "'\\"])
def test_the_measured_command_may_contain_any_characters(word, tmp_path):
    found = search({"threads-1": 0.5}, "threads-1")  # with a line on how to start it
    paths = write_results(found, make_results(found, ["python", "train.py", word]), tmp_path)
    assert yaml.safe_load(paths[1].read_text()) == {"trainer": {}}
    assert "Start it with: OMP_NUM_THREADS=1" in paths[1].read_text()


def test_a_search_without_a_gain_says_so(tmp_path):
    made = search({}, "lean")
    results = make_results(made, ["python", "train.py"])
    assert results["verdict"] == "nothing helps here"
    assert (results["chosen"]["settings"], results["changes"], results["promise"]["of"]) == ([], [], None)
    assert "trainer: {}" in write_results(made, results, tmp_path)[1].read_text()
    assert "Leave the script as it is, or ask lightning-turbo doctor" in as_text(results)


def test_a_script_too_slow_for_the_time_limit_is_reported():
    made = search({}, runner=Late)
    results = make_results(made, ["python", "train.py"])
    assert results["verdict"] == "nothing is recommended: the time was over before any setting was tried"
    assert results["untried"] == [row["name"] for row in results["candidates"]]
    assert f"{len(TABLE)} of {len(TABLE)} settings were not tried: take longer (--minutes)" in as_text(results)


class Unsure(Still):
    """What the screening shows is not what the pairs of the promise show."""

    def measure(self, together, stretch):
        self.factors = {"lean": 0.8 if stretch.pairs == 1 else (0.8, 1.3)[self.at % 2]}
        return super().measure(together, stretch)


def test_an_interval_that_reaches_one_is_undecided():
    made = search({}, "lean", runner=Unsure)
    results = make_results(made, ["python", "train.py"])
    assert results["verdict"].startswith("nothing is recommended: undecided: ")
    assert results["chosen"]["settings"] == []
    assert made.trials["lean"].why == "undecided"


COMBINATIONS = [
    ("lean", "fused", "bf16-mixed"),
    ("O2", "channels-last", "prefetch-threads"),
    ("workers-2-persistent", "threads-1"),
]


@pytest.mark.parametrize("names", COMBINATIONS, ids=" ".join)
def test_the_changed_lines_are_python_and_make_the_settings(names):
    lines = changed_lines(combine(TABLE[name] for name in names), ["python", "train.py", "--rate", "1"])
    if "threads-1" in names:
        assert lines.pop() == "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python train.py --rate 1"
    made = []
    own = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    places = {
        "Trainer": lambda ellipsis, **given: made.append(Trainer(**own, **given)),
        "DataLoader": lambda ellipsis, **given: made.append(DataLoader(range(4), **given)),
    }
    exec("\n".join(lines).replace("callbacks=[..., ", "callbacks=["), places)
    (thing,) = made
    if "fused" in names:
        assert [type(thing.strategy).__name__, thing.precision] == ["TurboStrategy", "bf16-mixed"]
        assert any(isinstance(each, lightning_turbo.FusedOptimizers) for each in thing.callbacks)
    elif "O2" in names:
        assert thing.strategy.precision_plugin.opt_level == "O2"
        assert {"MemoryFormat", "Prefetch"} <= {type(each).__name__ for each in thing.callbacks}
    else:
        assert (thing.num_workers, thing.persistent_workers) == (2, True)


def test_arguments_of_loaders_are_named_beside_the_configuration():
    text = yaml_text(combine([TABLE["workers-2-persistent"]]), "1.40 times as fast", ["python", "train.py"])
    assert "# Where loaders are made: DataLoader(..., num_workers=2, persistent_workers=True)\n" in text
    assert yaml.safe_load(text) == {"trainer": {}}
