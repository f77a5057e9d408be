"""The report: text that fits the terminal, JSON that is plain, a page that is self-contained and escapes."""

import json
import re
from html.parser import HTMLParser

import pytest

from lightning_turbo.doctor.advice import Finding
from lightning_turbo.doctor.facts import Facts, Site
from lightning_turbo.doctor.page import as_html
from lightning_turbo.doctor.report import Report, as_json, as_text, place
from lightning_turbo.doctor.timeline import PHASES, Segment

EVIL = "</style><script>alert('x')</script>&\"<b>"


def finding(**more):
    given = {
        "rule": "host-sync",
        "level": "warning",
        "what": f".item() {EVIL}",
        "remedy": "Keep values on the device.",
        "card": "device-prefetch",
        "cost": "0.20 ms a step",
        "site": Site(file=f"/{EVIL}.py", line=3),
        "diff": f"--- a\n+++ a\n@@ -1 +1 @@\n-{EVIL}\n+better",
        "mended": "nothing",
    }
    return Finding(**{**given, **more})


@pytest.fixture
def report():
    return Report(
        facts=Facts(timed=3, watched=2, phases=dict.fromkeys(PHASES, 0.001), notes=(f"note {EVIL}",)),
        findings=(finding(), finding(level="info", rule="host-sync", site=None), finding(rule="other", level="error")),
        timeline=(Segment(f"[Callback]{EVIL}.on_train_start", "hooks", 0.0, 0.004), Segment("", "data", 0.004, 0.001)),
        short=f"too short {EVIL}",
    )


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.words, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_escapes_all_that_comes_from_the_program(report):
    page = Page()
    text = as_html(as_json(report))
    page.feed(text)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert text.count("</style>") == 1
    shown = "".join(page.words)
    for part in (f".item() {EVIL}", f"Note {EVIL}", f"too short {EVIL}", f"/{EVIL}.py:3", f"-{EVIL}"):
        assert part in shown


def test_the_page_needs_nothing_else(report):
    page = Page()
    text = as_html(as_json(report))
    page.feed(text)
    assert page.links == []
    assert not re.search(r"url\(|@import|https?://", text)
    assert '<meta name="viewport"' in text


def test_the_time_line_covers_the_step(report):
    text = as_html(as_json(report))
    bars = re.findall(r'<rect x="([\d.]+)" y="0" width="([\d.]+)"', text)
    assert [(float(x), float(width)) for x, width in bars] == [(0.0, 800.0), (800.0, 200.0)]


def test_an_empty_report_says_so():
    empty = Report(facts=Facts(watched=4), findings=())
    assert "Nothing to mend was found." in as_html(as_json(empty))
    assert "Nothing to mend was found." in as_text(empty)
    assert "Nothing" not in as_text(Report(facts=Facts(), findings=(), short="too short"))


def test_the_json_is_plain_and_complete(report):
    data = json.loads(json.dumps(as_json(report)))
    assert data == as_json(report)
    assert [each["rule"] for each in data["findings"]] == ["host-sync", "host-sync", "other"]
    assert data["findings"][0]["card"] == "docs/cards/device-prefetch.md"
    assert data["findings"][0]["site"]["line"] == 3
    assert data["findings"][1]["place"] == ""
    assert [row["phase"] for row in data["phases"]] == list(PHASES)
    assert data["summary"].startswith("1 error, 1 warning, 1 info")


@pytest.mark.parametrize("width", [60, 100])
def test_the_text_fits_the_terminal(report, width):
    plain = Report(facts=report.facts, findings=(finding(what="word " * 60, diff="", site=None),), short="word " * 60)
    assert max(map(len, as_text(plain, width=width).splitlines())) <= width


def test_a_remedy_is_told_once(report):
    assert as_text(report).count("Keep values on the device.") == 2  # one for each of two rules


def test_places_are_relative_to_the_working_directory(tmp_path):
    assert place(Site(file=str(tmp_path / "train.py"), line=3)) == "train.py:3"
    assert place(Site(file="/elsewhere/train.py", line=3)) == "/elsewhere/train.py:3"


def test_graver_findings_are_picked(report):
    assert [each.level for each in report.above("info")] == ["warning", "error"]
    assert [each.level for each in report.above("warning")] == ["error"]


def test_files_are_written_with_their_folder(report, tmp_path):
    report.save(html=tmp_path / "new" / "r.html", json=tmp_path / "new" / "r.json")
    assert (tmp_path / "new" / "r.html").read_text(encoding="utf-8") == as_html(as_json(report))
    assert json.loads((tmp_path / "new" / "r.json").read_text(encoding="utf-8")) == as_json(report)
