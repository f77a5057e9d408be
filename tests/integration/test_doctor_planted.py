"""A fit in which one thing is slow has it among the first two findings; one in which nothing is, is not accused."""

import json

import pytest

from lightning_turbo import cli
from tests.children import status_of_child
from tests.integration.doctor_planted import CLEAN, PLANTED, script


def findings(parts, folder):
    """What ``lightning-turbo doctor`` finds in a fit, the gravest first."""
    (folder / "train.py").write_text(script(parts))
    assert status_of_child(lambda: cli.main(["doctor", "--out", str(folder), str(folder / "train.py")])) == 0
    return json.loads((folder / "doctor.json").read_text())["findings"]


def check_planted(name, folder):
    parts, rules, words = PLANTED[name]
    first = findings(parts, folder)[:2]
    named = [each for each in first if each["rule"] in rules and words in each["what"]]
    assert named, [(each["rule"], each["what"]) for each in first]
    assert {each["level"] for each in named} == {"warning"}


# The short form: a cause in the start of workers, in a hook, in an optimizer, in a step and in a batch.
SHORT = {"slow worker start", "slow hook in steps", "400 groups", "sleeping step", "many objects"}


@pytest.mark.parametrize("name", sorted(SHORT))
def test_what_is_slow_is_among_the_first_two_findings(name, tmp_path):
    check_planted(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_what_is_slow_is_found_in_ten_of_ten_runs(name, tmp_path):
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        check_planted(name, tmp_path / str(number))


@pytest.mark.parametrize(
    "name", ["plain", "workers that stay", *(pytest.param(n, marks=pytest.mark.slow) for n in [*CLEAN][2:])]
)
def test_a_fit_in_which_nothing_is_slow_is_not_accused(name, tmp_path):
    accused = [each for each in findings(CLEAN[name], tmp_path) if each["level"] != "info"]
    assert [(each["rule"], each["what"], each["cost"]) for each in accused] == []
