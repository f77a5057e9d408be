"""The Doctor names the slow line of a script among its first two findings, and accuses no line of a clean script."""

import json

import pytest

from lightning_turbo import cli
from tests.children import status_of_child
from tests.integration.doctor_lines import CLEAN, SLOW, script

pytestmark = pytest.mark.usefixtures("free_alarm")


def findings(folder, text):
    """Return the findings of ``lightning-turbo doctor`` for a script, the most severe first."""
    (folder / "train.py").write_text(text)
    out = folder / "doctor.json"
    assert status_of_child(lambda: cli.main(["doctor", "--json", str(out), str(folder / "train.py")])) == 0
    return json.loads(out.read_text())["findings"]


def is_named(name, n, workers, folder):
    """Return whether the first two findings name the line, and what they are."""
    place, lines, _ = SLOW[name]
    text = script(n, workers, **{place: lines})
    slow = {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# slow")}
    first = findings(folder, text)[:2]
    named = {int(where.rpartition(":")[2].split()[0]) for each in first for where in each["places"] if ":" in where}
    return bool(slow & named), [(each["rule"], each["what"], each["places"]) for each in first]


@pytest.mark.parametrize(("name", "workers"), [("sorted samples", 1), ("masks in forward", 0)])
def test_the_doctor_names_the_slow_line(name, workers, tmp_path):
    named, first = is_named(name, 3, workers, tmp_path)
    assert named, first


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4, 20])
def test_the_doctor_names_nine_of_ten_slow_lines_with_and_without_workers(n, tmp_path):
    missed = {}
    for name, (_, _, loads) in SLOW.items():
        for workers in (0, 1) if loads else (0,):
            folder = tmp_path / f"{name} {workers}"
            folder.mkdir()
            named, first = is_named(name, n, workers, folder)
            if not named:
                missed[name] = first
    assert len(missed) <= 1, missed


@pytest.mark.parametrize("name", ["plain", *(pytest.param(each, marks=pytest.mark.slow) for each in [*CLEAN][1:])])
def test_the_doctor_accuses_no_line_of_a_clean_script(name, tmp_path):
    accused = [each for each in findings(tmp_path, script(**CLEAN[name])) if each["level"] != "info"]
    assert [(each["rule"], each["what"], each["cost"]) for each in accused] == []
