"""The comparison of two result folders."""

import json
import math
import random

import pytest

from lightning_turbo.cli import main

MACHINE = {"processor": "a processor", "cores": 2}


def write(folder, default, chosen=(), verdict="", settings=("lean",), **machine):
    folder.mkdir()
    names = list(settings) if chosen else []
    results = {
        "default": {"step_ms": 1.0, "processes_ms": list(default)},
        "chosen": {"settings": names, "processes_ms": list(chosen)},
        "machine": {**MACHINE, **machine},
        "verdict": verdict,
    }
    (folder / "tune.json").write_text(json.dumps(results))
    return str(folder)


def draw(middle, seed, noise=0.03):
    luck = random.Random(seed)
    return [middle * math.exp(luck.gauss(0.0, noise)) for _ in range(8)]


@pytest.mark.parametrize(("default", "chosen", "status", "said"), [
    (10.0, 5.0, 0, "None of 2 steps got slower beyond noise."),
    (12.0, 5.0, 1, "1 of 2 steps got slower"),
    (10.0, 6.0, 1, "1 of 2 steps got slower"),
    (10.1, 5.05, 0, "None of 2 steps"),  # less than noise
    (8.0, None, 1, "1 of 2 steps got slower"),  # the unchanged script is faster, and no setting helps any more
])  # fmt: skip
def test_a_significant_slowdown_gives_a_failure_exit_status(default, chosen, status, said, tmp_path, capsys):
    before = write(tmp_path / "a", draw(10.0, 1), draw(5.0, 2))
    after = write(tmp_path / "b", draw(default, 3), draw(chosen, 4) if chosen else [])
    assert main(["tune", "compare", before, after]) == status
    assert said in capsys.readouterr().out
    assert main(["tune", "compare", before, before]) == 0


LATE = "nothing is recommended: the time was over before the last comparison"


def test_settings_not_recommended_for_lack_of_time_are_not_a_slowdown(tmp_path, capsys):
    before = write(tmp_path / "a", draw(10.0, 1), draw(5.0, 2))
    tens = draw(10.0, 3)
    after = write(tmp_path / "b", tens, tens, settings=(), verdict=LATE)  # as tune writes for the chosen settings
    slower = write(tmp_path / "c", draw(12.0, 3), verdict=LATE)
    for one, other, status, said in [
        (before, after, 0, "None of 1 step got slower"),
        (after, before, 0, "None of 1 step got slower"),
        (before, slower, 1, "1 of 1 step got slower"),
    ]:
        assert main(["tune", "compare", one, other]) == status
        out = capsys.readouterr().out
        assert said in out
        assert f"{slower if status else after}: nothing was recommended yet" in out


def test_the_same_script_is_rarely_reported_as_slower(tmp_path):
    found = []
    for seed in range(20):
        (tmp_path / str(seed)).mkdir()
        parts = [write(tmp_path / str(seed) / name, draw(10.0, (seed, name).__repr__())) for name in "ab"]
        found.append(main(["tune", "compare", *parts]))
    assert sum(found) == 0


def test_results_that_cannot_be_compared_are_refused(tmp_path, capsys):
    good = write(tmp_path / "a", draw(10.0, 1))
    other = write(tmp_path / "b", draw(10.0, 1), processor="another one")
    few = write(tmp_path / "c", [10.0])
    for name, text in {"d": '{"default": {', "e": "{}", "f": "[]", "g": '{"default": {}, "chosen": null}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tune.json").write_text(text)
    odd = [((good, str(tmp_path / name)), "expected what this version of tune writes, got") for name in "defg"]
    for words, message in [
        ((good,), "expected two folders of results, got 1"),
        ((good, str(tmp_path)), "expected a folder that tune wrote, with tune.json"),
        ((good, other), "expected results of one machine, got a processor, 2 cores and another one, 2 cores"),
        ((good, few), "expected a step measured in two processes or more"),
        *odd,
    ]:
        assert main(["tune", "compare", *words]) == 2
        assert message in capsys.readouterr().err
