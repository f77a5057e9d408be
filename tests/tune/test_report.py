"""The files that are written after a search."""

import json
import math
import re

import pytest
import yaml

from lightning_turbo.measure import Interrupt, InterruptedRunError, new_row
from lightning_turbo.tune import epochs
from lightning_turbo.tune.candidates import Baseline, list_candidates, select
from lightning_turbo.tune.epochs import compare_epochs, describe_epochs, train_epochs
from lightning_turbo.tune.evidence import Comparison, Configuration
from lightning_turbo.tune.report import as_text, describe_headroom, make_results, write_results
from lightning_turbo.tune.search import FINAL, Search


class Still:
    """A runner that returns the values of a table without noise."""

    cost, left = 1.0, 1e6
    validations = ()  # seconds

    def __init__(self, factors, manual=False):
        self.factors, self.manual, self.facts = factors, manual, {"lacks": ["cuda"]}

    def set_pace(self, step_seconds, accumulate):
        pass

    def measure(self, configurations):
        return {configuration: self.row(configuration) for configuration in configurations}

    def row(self, configuration):
        seconds = {"step": 0.004, "one batch": 0.003, "loader": 0.001}[configuration.mode]
        for name in configuration.names:
            seconds *= self.factors.get(name, 1.001)
        rounds = [{"sweep": n, "process": 0, "seconds": seconds, "steps": 1} for n in range(3)]
        losses = [] if self.manual else [2.0, 1.5 + 0.2 * ("O1" in configuration.names)]
        numbers = {"facts": self.facts, "losses": losses, "validations": self.validations}
        return {**new_row(), "status": "ok", "rounds": rounds, "numbers": numbers}


def search(factors, *names, manual=False):
    made = Search(select(list_candidates(2), names), Still(factors, manual))
    made.run()
    return made


EPOCHS = {
    "default": {"seconds": 10.0, "steps_seconds": 8.0, "metrics": {"val_loss": 0.3125, "rate": None}},
    "chosen": {"seconds": 6.0, "steps_seconds": 4.0, "metrics": {"val_loss": 0.3}},
    "factors": [10.0 / 6.0],
}


def test_measured_epochs_are_reported_with_the_expected_time():
    compared = compare_epochs(EPOCHS, Comparison([math.log(0.4), math.log(0.6)]))
    text = describe_epochs(compared)
    assert "10.0 s without and 6.00 s with it: 1.67 times as fast" in text
    said = re.search(r"promised were (\S+) \((\S+) to (\S+)\)\. Training steps were 80 % of it", text)
    promised, low, high = map(float, said.groups())
    assert compared["promised"] == pytest.approx(promised, abs=0.005) == pytest.approx(1 / 0.49, abs=0.01)
    assert compared["expected"] == pytest.approx([low, high], abs=0.005)
    assert (compared["share"], compared["factor"]) == (0.8, pytest.approx(10.0 / 6.0))
    assert low < promised < high
    assert "val_loss 0.3125 and 0.3" in text
    results = make_results(search({"O1": 0.5}, "O1"), ["python", "train.py"])
    assert as_text({**results, "epochs": {"sentence": text}}).split("\n\n")[2] == text
    failed = compare_epochs({**EPOCHS, "error": "chosen failed: no data"}, Comparison())
    assert "not measured: chosen failed: no data" in describe_epochs(failed)


def test_a_prediction_from_steps_only_is_reported_as_such():
    promise = Comparison([math.log(0.5)], of_epochs=False)
    assert "promised were of training steps alone 2.00 (" in describe_epochs(compare_epochs(EPOCHS, promise))


class Epochs:
    """A runner whose processes train for some rounds, and return the next of these times or fail."""

    def __init__(self, *seconds, rounds=2):
        self.seconds, self.order_of_starts, self.calls, self.rounds = iter(seconds), [], [], rounds
        self.order = {"steps": 7}

    def spawn(self, configuration):
        name = "with" if configuration.names else "without"
        self.order_of_starts.append(name)
        return Epoch(self, name, next(self.seconds))


class Epoch:
    """A process of ``Epochs``."""

    def __init__(self, runner, name, seconds):
        self.runner, self.name, self.seconds, self.trained = runner, name, seconds, 0

    def tell(self, order):
        assert order == {"order": "round", "lead": 0, "steps": epochs.ROUNDS * 7}
        self.runner.calls.append(self.name)
        self.trained += 1

    def listen(self, timeout, check):
        check()
        if self.seconds is None:
            return {"event": "failed", "reason": "no data"}
        if self.trained < self.runner.rounds:
            return {"event": "round" if self.trained else "ready"}
        numbers = {"seconds": self.seconds, "steps_seconds": self.seconds / 2, "metrics": {}}
        return {"event": "done", "numbers": numbers}

    def hold(self):
        self.runner.calls.append(f"{self.name} held")

    def close(self, grace):
        self.runner.calls.append(f"{self.name} closed")


def test_two_processes_train_epochs_alternately():
    runner = Epochs(4.0, 2.0, *[None] * 2)
    train_epochs(runner, Configuration(("O1",)), 1.0, Interrupt())
    held = ["without held", "with held"]
    rounds = ["without", "without held", "with", "with held", "without", "with"]
    assert runner.calls[:10] == [*held, *rounds, "without closed", "with closed"]


def test_short_epochs_are_trained_in_several_pairs(monkeypatch):
    monkeypatch.setattr(epochs, "PAIRS", 5)
    runner = Epochs(4.0, 2.0, 1.0, 5.0, 6.0, 2.0, 2.0, 8.0, 6.0, 3.0)
    found = train_epochs(runner, Configuration(("O1",)), 1.0, Interrupt())
    assert runner.order_of_starts == ["without", "with", "with", "without"] * 2 + ["without", "with"]
    assert found["factors"] == [2.0, 5.0, 3.0, 4.0, 2.0]
    assert (found["default"]["seconds"], found["chosen"]["seconds"]) == (6.0, 2.0)
    assert "2.99 times as fast (1.80 to 4.98 in 5 pairs); promised" in describe_epochs(
        compare_epochs(found, Comparison([0.0]))
    )


@pytest.mark.parametrize(("seconds", "factors", "error"), [
    ((4.0, 2.0), [2.0], None),
    ((4.0, None), None, "chosen failed: no data"),
    ((None,), None, "default failed: no data"),
])  # fmt: skip
def test_long_epochs_are_trained_in_one_pair(seconds, factors, error, monkeypatch):
    monkeypatch.setattr(epochs, "ENOUGH", 0.0)
    found = train_epochs(Epochs(*seconds), Configuration(("O1",)), 1.0, Interrupt())
    assert (found.get("factors"), found.get("error")) == (factors, error)


def test_complete_pairs_count_if_a_later_one_fails():
    found = train_epochs(Epochs(4.0, 2.0, 1.0, None), Configuration(("O1",)), 1.0, Interrupt())
    assert found["factors"] == [2.0]


def test_the_times_of_an_epoch_and_the_fit_are_reported_if_their_length_is_known():
    runner = Still({"O1": 0.5})
    runner.facts = {"lacks": ["cuda"], "batches": 250, "epochs": 90}
    found = Search(select(list_candidates(2), ["O1"]), runner)
    found.run()
    why = make_results(found, ["python", "train.py"])["why"]
    assert "An epoch takes about 1.00 s (250 steps, border 0.000 s) and 0.500 s with it" in why
    assert "the 90 epochs of the fit 1.50 minutes and 0.750. Factors are of an epoch" in why
    for factors in ({"O1": 0.5}, {}):  # of an unknown number, or without a recommendation
        assert "steps of an epoch" not in make_results(search(factors, "O1"), ["python", "train.py"])["why"]


NAMES = ("O1", "fused", "lean", "device-prefetch")
HEADLINE = "a step 2.50 times as fast (2.50 to 2.50) with fused + O1, other maths"  # epochs have no length here


def test_the_result_files_contain_the_findings(tmp_path):
    found = search({"O1": 0.5, "fused": 0.8}, *NAMES)
    results = make_results(found, ["python", "train.py"])
    paths = write_results(found, results, tmp_path)
    assert [path.name for path in paths] == ["tune.json", "tune.md", "turbo.yaml", "turbo.py", "tune.png"]
    assert json.loads(paths[0].read_text()) == results
    assert results["default"]["step_ms"] == 4.0
    assert set(results["default"]["processes_ms"]) == {4.0}
    assert results["chosen"]["processes_ms"] == pytest.approx([1.6] * (4 + FINAL)), (
        "from the elimination and the last comparison"
    )
    assert results["headroom"]["waiting_ms"] == pytest.approx(1.0)
    rows = {row["name"]: row for row in results["candidates"]}
    assert rows["fused"]["ratio"] == pytest.approx(0.8)
    assert rows["fused"]["interval"] == pytest.approx([0.8, 0.8])
    assert {name for name, row in rows.items() if row["kept"]} == {"O1", "fused"}
    assert rows["device-prefetch"]["ratio"] is None
    chosen = results["chosen"]
    assert (chosen["settings"], chosen["result"]) == (["fused", "O1"], "other maths")
    assert (chosen["ratio"], chosen["interval"]) == (pytest.approx(0.4), pytest.approx([0.4, 0.4]))
    assert all(path.read_text().startswith(f"# {HEADLINE}") for path in paths[2:4])
    assert paths[4].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("word", ["name=${model}_${seed}", r"C:\Users\me", r"$\xi$", '"""', "two\nlines", "'\\"])
def test_the_measured_command_may_contain_any_characters(word, tmp_path):
    found = search({"threads-1": 0.5}, "threads-1")  # with a line on how to start it
    paths = write_results(found, make_results(found, ["python", "train.py", word]), tmp_path)
    compile(paths[3].read_text(), "turbo.py", "exec")
    assert yaml.safe_load(paths[2].read_text()) == {"trainer": {}}
    assert all("Start it with: OMP_NUM_THREADS=1" in path.read_text() for path in paths[2:4])
    assert paths[4].name == "tune.png"


def test_settings_to_change_manually_are_in_every_file(tmp_path):
    runner = Still({"augment-batches": 0.5})
    runner.facts = {"lacks": ["cuda"], "random_part": "take RandFlipd out of the dataset's transforms"}
    found = Search(select(list_candidates(2), ["augment-batches"]), runner)
    found.run()
    results = make_results(found, ["python", "train.py"])
    assert (results["chosen"]["settings"], results["chosen"]["result"]) == (["augment-batches"], "other maths")
    for path in write_results(found, results, tmp_path)[:4]:
        assert "For augment-batches take RandFlipd out of the dataset's transforms" in path.read_text()


def test_the_summary_comes_first_and_fits_a_terminal_and_markdown():
    text = as_text(make_results(search({"O1": 0.5, "fused": 0.8}, *NAMES), ["python", "train.py"]))
    verdict, why, then, table, *_ = text.split("\n\n")
    assert verdict == f"`python train.py`: {HEADLINE}: losses in the picture."
    assert why.startswith("Why: Your step takes 4.00 ms, with one batch again and again 3.00 ms")
    assert why.endswith("is not in them; --confirm measures whole epochs.")
    assert "Trainer(**turbo(" in then
    assert "--config turbo.yaml" in then
    rows = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines()]
    assert rows[0] == ["setting", "how it ended", "result"]
    assert {name: end for name, end, _ in rows[2:]} == {
        "lean": "no gain: a step 1.00 times as fast (1.00 to 1.00)",
        "fused": "kept: alone a step 1.25 times as fast (1.25 to 1.25)",
        "O1": "kept: alone a step 2.00 times as fast (2.00 to 2.00)",
        "device-prefetch": "not tried because it needs a CUDA device",
    }
    assert len({line.index("|", 2) for line in table.splitlines() if "---" not in line}) == 1, "in columns"


def test_the_plot_has_no_panel_without_losses(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr("lightning_turbo.tune.report.draw_bars", lambda bars, path, **more: drawn.update(more))
    for manual in (False, True):
        found = search({"O1": 0.5}, "O1", manual=manual)
        results = make_results(found, ["python", "train.py"])
        write_results(found, results, tmp_path)
        assert set(drawn["curves"]) == (set() if manual else {"default", "chosen"})
        assert ("losses in the picture" in results["verdict"]) == (not manual)


def test_an_empty_search_is_reported_as_empty(tmp_path):
    made = search({}, "lean")
    results = make_results(made, ["python", "train.py"])
    assert results["chosen"]["settings"] == []
    paths = write_results(made, results, tmp_path)
    assert all("nothing helps here" in path.read_text() for path in paths[1:4])
    assert "Next: Leave the script as it is" in paths[1].read_text()
    assert "trainer: {}" in paths[2].read_text()
    assert make_results(Search([], Still({})), ["python"])["headroom"] is None, "ended before anything was measured"


@pytest.mark.parametrize(("validations", "duration"), [
    (0.0, "1.00 s (250 steps, border 0.000 s)"),
    (2.0, "7.00 s (250 steps, border 0.000 s, validation 6.00 s)"),
])  # fmt: skip
def test_a_validation_is_reported_as_a_part_of_the_epoch(validations, duration):
    runner = Still({})
    runner.facts = {"lacks": ["cuda"], "batches": 250, "validations": validations}
    runner.validations = [2.0, 3.0, 8.0]
    made = Search(select(list_candidates(2), ["lean"]), runner)
    made.run()
    assert f"An epoch takes about {duration}." in as_text(make_results(made, ["python"]))


AHEAD = "loading ahead can make it {} times as fast at most"


@pytest.mark.parametrize(("times", "workers", "sentence"), [
    ((33.0, 30.9), 0, "33.0 ms, and the loader alone 30.9 ms a batch: " + AHEAD.format(1.94)),
    ((65.0, 8.0), 0, "65.0 ms, and the loader alone 8.00 ms a batch: " + AHEAD.format(1.14)),
    ((65.0, 50.0), 2, "65.0 ms, and the loader alone 50.0 ms a batch; batches are loaded beside the step already"),
    ((40.0, 0.1), 0, "40.0 ms, and the loader alone 0.100 ms a batch: loading ahead cannot help"),
    ((0.2, 90.0), 0, "0.200 ms, and the loader alone 90.0 ms a batch: loading takes nearly all of the time"),
])  # fmt: skip
def test_the_sentence_about_the_headroom(times, workers, sentence):
    baseline = Baseline(step_ms=64.0, one_batch_ms=times[0], loader_ms=times[1], num_workers=workers)
    assert describe_headroom(baseline) == f"Your step takes 64.0 ms, with one batch again and again {sentence}."


def test_without_matplotlib_no_plot_is_written_or_mentioned(tmp_path, monkeypatch):
    (tmp_path / "tune.png").write_text("of an earlier search")
    monkeypatch.setattr("lightning_turbo.measure.picture.installed", lambda name: name != "matplotlib")
    found = search({"O1": 0.5}, "O1")
    results = make_results(found, ["python", "train.py"])
    write_results(found, results, tmp_path)
    assert not (tmp_path / "tune.png").exists()
    assert "picture" not in results["verdict"]


class Late(Still):
    """A runner whose time limit is reached before the unchanged script is measured."""

    left = 0.0

    def measure(self, configurations):
        raise InterruptedRunError


def test_a_script_too_slow_for_the_time_limit_is_reported():
    made = Search(list_candidates(2), Late({}))
    made.run()
    results = make_results(made, ["python", "train.py"])
    assert results["verdict"] == "nothing is recommended: the time was over before any setting was tried"
    assert "--minutes" in results["next"]
    assert "--only" not in results["next"]
    assert "25 of 25 settings were not tried" in results["untried"]
    assert ": up to " in results["untried"]
