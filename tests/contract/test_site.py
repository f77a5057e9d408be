"""The built site, because correct Markdown can still be rendered wrongly."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import lightning_turbo

pytest.importorskip("zensical")
ROOT = Path(lightning_turbo.__file__).parent.parent
SETTINGS = (ROOT / "zensical.toml").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site from a copy of the pages, because another process may build it in the repository."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "zensical.toml", folder)  # with a link, the site would be written to the repository
    shutil.copytree(ROOT / "docs", folder / "docs")
    for path in [*ROOT.glob("*.md"), ROOT / "scripts", ROOT / "lightning_turbo"]:
        (folder / path.name).symlink_to(path)
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"],
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


class Page(HTMLParser):
    """Collects headings in tables and Markdown in text. Void elements have no content."""

    EMPTY = frozenset(("area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"))

    def __init__(self, path):
        super().__init__()
        self.open = []
        self.headings_in_tables = []
        self.marks_in_text = []
        self.cells = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if {"script", "style", "code", "pre"} & set(self.open) or "article" not in self.open:
            return
        heading = re.match(r"\s*#{1,6} \w", data) or re.fullmatch(r"h[1-6]", self.open[-1])
        if "table" in self.open:
            self.cells += 1
            if heading:
                self.headings_in_tables.append(data.strip())
        elif re.match(r"\s*(#{1,6} \w|\|.*\||```)", data, re.M):
            self.marks_in_text.append(data.strip())


def pages(site):
    return {path.relative_to(site).as_posix(): path for path in site.rglob("*.html")}


def test_no_heading_is_part_of_a_table_and_no_markdown_is_left_in_a_page(site):
    read = {name: Page(path) for name, path in pages(site).items()}
    assert sum(page.cells for page in read.values()) > 1000, "tables are parsed"
    assert {name: page.headings_in_tables for name, page in read.items() if page.headings_in_tables} == {}
    assert {name: page.marks_in_text for name, page in read.items() if page.marks_in_text} == {}


def test_the_site_holds_pages_pictures_and_what_zensical_adds_but_no_script_of_ours(site):
    kinds = {path.suffix for path in site.rglob("*") if path.is_file() and "assets" not in path.relative_to(site).parts}
    assert kinds == {".css", ".html", ".inv", ".json", ".png", ".svg", ".txt", ".xml"}
    sources = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    made = {Path(name).parent for name in pages(site)} - {Path()}
    assert made == {path.parent if path.name == "README" else path for path in sources} - {Path("index")}


def signatures(article):
    return [re.sub(r"<.*?>", "", shown) for shown in re.findall(r'<div class="doc-signature.*?</div>', article, re.S)]


def test_each_page_of_the_api_has_its_signature_and_values_as_defaults(site):
    without, constants = set(), {}
    for name in lightning_turbo.__all__:
        text = (site / "api" / name / "index.html").read_text()
        article = text[text.index("<article") : text.index("</article")]
        shown = signatures(article)
        if not any(each.startswith(f"{name}(") for each in shown):
            without.add(name)
        defaults = re.findall(r"<td>\s*<code>([^<]*)</code>\s*</td>\s*</tr>", article)
        found = [each for each in [*defaults, *shown] if re.search(r"(^|=\s*)_?[A-Z][A-Z_]{2,}\b", each)]
        if found:
            constants[name] = found
        assert shown, name
    assert without == {"amp", "augment"}, "modules, whose members have signatures"
    assert constants == {}


def test_every_page_of_the_navigation_is_built(site):
    for page in re.findall(r'"([\w/-]+\.md)"', SETTINGS):
        home = page.removesuffix(".md").removesuffix("README").removesuffix("index")
        assert (site / home / "index.html").exists(), page


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("mixed precision", {"cards/apex-amp/"}),
        ("prefetch", {"cards/background-prefetch/", "cards/device-prefetch/", "symptoms/dataloader-is-slow/"}),
        ("resume", {"resume/", "symptoms/resume-repeats-samples/"}),
        ("预取", {"zh-CN/"}),
        ("混合精度", {"zh-CN/"}),
        ("断点续训", {"zh-CN/"}),
    ],
)
def test_a_search_finds_cards_and_guides_and_no_stored_results_or_arguments(site, words, found):
    items = json.loads((site / "search.json").read_text())["items"]
    assert [item["location"] for item in items if re.match(r"(api|benchmarks)/[^#]", item["location"])] == []
    # A search puts first what has its words in the title: of a page, or of a section of the one Chinese page.
    titles = {item["location"]: re.sub("<.*?>", "", item["title"]).lower() for item in items}
    places = [place for place, title in titles.items() if words in title and ("#" not in place or not words.isascii())]
    assert {place.partition("#")[0] for place in places} == found
