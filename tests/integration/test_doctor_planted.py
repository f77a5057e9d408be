"""The Doctor finds the slow part of a fit among its first two findings, and none in a fast fit."""

import json

import pytest

from lightning_turbo import cli
from tests.children import status_of_child
from tests.integration.doctor_planted import CLEAN, PLANTED, script

# Timed by whole processes, which the load of the machine moves: nightly.
pytestmark = pytest.mark.slow


def findings(parts, folder):
    """Return the findings of ``lightning-turbo doctor`` for a fit, the most severe first."""
    (folder / "train.py").write_text(script(parts))
    assert (
        status_of_child(lambda: cli.main(["doctor", "--json", str(folder / "doctor.json"), str(folder / "train.py")]))
        == 0
    )
    return json.loads((folder / "doctor.json").read_text())["findings"]


def check_planted(name, folder):
    parts, rules, words = PLANTED[name]
    first = findings(parts, folder)[:2]
    named = [each for each in first if each["rule"] in rules and words in each["what"]]
    assert named, [(each["rule"], each["what"]) for each in first]
    assert {each["level"] for each in named} == {"warning"}


# The short form: a slow worker start, hook, optimizer, step and batch.
SHORT = {"slow worker start", "slow hook in steps", "400 groups", "sleeping step", "many objects"}


@pytest.mark.parametrize("name", sorted(SHORT))
def test_the_slow_part_is_among_the_first_two_findings(name, tmp_path):
    check_planted(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_the_slow_part_is_found_in_ten_of_ten_runs(name, tmp_path):
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        check_planted(name, tmp_path / str(number))


@pytest.mark.parametrize(
    "name", ["plain", "workers that stay", *(pytest.param(n, marks=pytest.mark.slow) for n in [*CLEAN][2:])]
)
def test_the_doctor_reports_no_slow_part_in_a_fast_fit(name, tmp_path):
    accused = [each for each in findings(CLEAN[name], tmp_path) if each["level"] != "info"]
    assert [(each["rule"], each["what"], each["cost"]) for each in accused] == []
