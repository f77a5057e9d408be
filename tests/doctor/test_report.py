"""The report: a verdict first, one total, text that fits the terminal, plain JSON."""

import json
from dataclasses import replace

import pytest

from lightning_turbo.doctor.clock import PHASES
from lightning_turbo.doctor.facts import Facts, FitFacts, PartTime, Seen, Site
from lightning_turbo.doctor.report import Report, as_json, as_text, verdict
from lightning_turbo.doctor.rules.rule import Finding, Place
from lightning_turbo.doctor.timing import Segment, sum_phases

EVIL = "</style><script>alert('x')</script>&\"<b>"


SITE = Site(file=f"/{EVIL}.py", line=3)


def finding(site=SITE, **more):
    given = {
        "rule": "host-sync", "level": "warning", "what": f".item() {EVIL}", "remedy": "Keep values on the device.",
        "card": "device-prefetch", "cost": "0.20 ms a step", "places": (Place(site),) if site else (),
    }  # fmt: skip
    return Finding(**{**given, **more})


@pytest.fixture
def report():
    timeline = (Segment("", "data", 0.0, 0.001), Segment(f"[Callback]{EVIL}.on_train_start", "hooks", 0.001, 0.004))
    return Report(
        facts=Facts(timed=3, seen=Seen(watched=2), phases=sum_phases(list(timeline)), notes=(f"note {EVIL}",)),
        findings=(finding(), finding(level="info", site=None), finding(rule="other", level="error")),
        timeline=timeline,
        short=f"too short {EVIL}",
    )


def test_json_and_text_have_one_total(report):
    text, data = as_text(report), as_json(report)
    assert "The mean step takes 5.000 ms:" in text
    assert "20% of its 5.00 ms" in text.splitlines()[0]
    assert data["step_seconds"] == pytest.approx(sum(each["seconds"] for each in data["timeline"]))
    assert data["step_seconds"] == pytest.approx(sum(each["seconds"] for each in data["phases"]))


def test_the_next_action_follows_the_verdict(report):
    assert "\nNext: Keep values on the device." in as_text(report, 100)
    assert "Next" not in as_text(Report(facts=report.facts, findings=(finding(level="info"),)))


@pytest.mark.parametrize(("phases", "said"), [
    ({"data": 0.043, "forward": 0.057},
     "Your step waits 43% of its 100.00 ms for data: loading ahead makes it up to 1.8 times as fast."),
    ({"data": 0.09, "forward": 0.91},
     "Compute-bound: your step waits 9% of its 1000.00 ms for data, so prefetching will hardly help; 91% of it is "),
    ({"copy": 0.06, "forward": 0.04}, "Bound by copies to the device: your step waits 0%"),
    ({"hooks": 0.003, "logging": 0.003, "forward": 0.004}, "Bound by the loop: your step waits 0%"),
    ({"hooks": 0.0003, "forward": 0.0007}, "Bound by the loop: your step waits 0% of its 1.00 ms"),
    ({}, "No step was timed."),
])  # fmt: skip
def test_the_verdict_comes_first(phases, said):
    assert verdict(Facts(phases=phases)).startswith(said)
    report = Report(facts=Facts(phases=phases, seen=Seen(watched=4)), findings=())
    assert " ".join(as_text(report).split()).startswith(f"lightning-turbo doctor: {said}")
    assert as_json(report)["verdict"].startswith(said)
    assert "Nothing to change was found." in as_text(report)
    assert "Nothing" not in as_text(Report(facts=Facts(phases=phases), findings=(), short="too short"))


def test_the_json_report_is_complete(report):
    data = json.loads(json.dumps(as_json(report)))
    assert data == as_json(report)
    assert [each["rule"] for each in data["findings"]] == ["host-sync", "host-sync", "other"]
    first, second, _ = data["findings"]
    assert (first["site"]["line"], first["place"], first["places"]) == (3, f"/{EVIL}.py:3", [f"/{EVIL}.py:3"])
    assert (second["site"], second["place"], second["places"]) == (None, "", [])
    assert [row["phase"] for row in data["phases"]] == list(PHASES)
    assert data["summary"].startswith("1 error, 1 warning, 1 info")


def test_the_text_report_fits_the_terminal(report):
    plain = Report(facts=report.facts, findings=(finding(what="word " * 60, site=None),), short="word " * 60)
    assert max(map(len, as_text(plain, width=60).splitlines())) <= 60


@pytest.mark.parametrize(("epochs", "took"), [(11, "110.0 s"), (12, "2.0 minutes"), (720, "2.0 hours")])
def test_the_time_of_the_fit_has_a_suitable_unit(report, epochs, took):
    fit = FitFacts(parts=(PartTime(name="steps", each=10.0),), epochs=epochs, batches=100, knows_length=True)
    text = as_text(Report(facts=replace(report.facts, fit=fit), findings=()), 120)
    assert f"{epochs} epochs take {took}:" in " ".join(text.split()), text


def test_report_files_are_written_and_their_folder_is_created(report, tmp_path):
    report.save(text=tmp_path / "new" / "r.txt", json=tmp_path / "new" / "r.json")
    assert (tmp_path / "new" / "r.txt").read_text(encoding="utf-8") == as_text(report, 100) + "\n"
    assert json.loads((tmp_path / "new" / "r.json").read_text(encoding="utf-8")) == as_json(report)
