"""The report: a verdict first, one total, text that fits the terminal, plain JSON."""

import json
from dataclasses import replace

import pytest

from lightning_turbo.doctor.facts import Facts, FitFacts, LineTime, Seen, Site
from lightning_turbo.doctor.report import Report, as_json, as_text, verdict
from lightning_turbo.doctor.rules.rule import Finding, Place
from lightning_turbo.doctor.timeline import PHASES

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
    phases = {**dict.fromkeys(PHASES, 0.0), "data": 0.001, "hooks": 0.004}
    lines = (LineTime(sites=(SITE,), seconds=0.001, own=0.001, text=EVIL),)
    return Report(
        facts=Facts(timed=3, seen=Seen(watched=2), phases=phases, notes=(f"note {EVIL}",), lines=lines),
        findings=(finding(), finding(level="info", site=None), finding(rule="other", level="error")),
        short=f"too short {EVIL}",
    )


def test_json_and_text_have_one_total(report):
    text, data = as_text(report), as_json(report)
    assert "The mean step takes 5.000 ms:" in text
    assert "20% of its 5.00 ms" in text.splitlines()[0]
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


@pytest.mark.parametrize(("waits", "title"), [(False, "Bound by your own lines"), (True, "Idle")])
def test_the_verdict_tells_the_users_lines_from_the_network(waits, title):
    lines = (LineTime(sites=(SITE,), seconds=0.07, own=0.064, waits=waits),)
    said = verdict(Facts(phases={"forward": 0.09, "backward": 0.01}, lines=lines))
    assert said.startswith(f"{title}: your step takes 100.00 ms, of which 64.00 ms")


@pytest.mark.parametrize(("whole", "title"), [(True, "An epoch takes 12.5 s"), (False, "no whole epoch, takes 12.5 s")])
def test_the_table_of_the_fit_has_what_was_seen(report, whole, title):
    parts = {"set-up": 3.0, "steps": 10.0, "validation": 2.5, "hooks": 0.001}
    fit = FitFacts(parts=parts, is_epoch=whole, batches=100, validations=1, validated=4)
    text = as_text(Report(facts=replace(report.facts, fit=fit), findings=()), 120)
    assert f"{title} (100 steps, 4 batches of validation), after set-up:" in " ".join(text.split())
    assert "10.000 s  80.0%" in text
    assert "hooks at the borders" not in text


def test_the_report_file_is_written_and_its_folder_is_created(report, tmp_path):
    report.save(tmp_path / "new" / "r.json")
    data = json.loads((tmp_path / "new" / "r.json").read_text(encoding="utf-8"))
    assert data == as_json(report)
    assert data["lines"][0]["places"] == [f"/{EVIL}.py:3"]
    report.save()
    assert [each.name for each in tmp_path.iterdir()] == ["new"]
