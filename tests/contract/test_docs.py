"""The documentation is correct: code runs, links, extras, commands and names exist, generated tables are current."""

import argparse
import gc
import importlib.util
import re
import runpy
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import sklearn  # noqa: F401  (sets variables of the environment when it is first imported)

import lightning_turbo
from lightning_turbo import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(lightning_turbo.__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for part in ("docs", "examples", "skills") for page in (ROOT / part).rglob("*.md"))]
)
CARDS = sorted(path for path in (DOCS / "cards").glob("*.md") if path.name != "README.md")
SECTIONS = (
    "What it does", "Use when", "How to use", "Arguments", "What it brings", "Limits", "Sources",
)  # fmt: skip
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=fence) *$", re.M | re.S
)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks():
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            info = match["info"].split()
            if info and info[0] == "python":
                line = text.count("\n", 0, match.start()) + 2
                yield pytest.param(page, line, info[1:], textwrap.dedent(match["body"]), id=f"{name_of(page)}:{line}")


def prose(page):
    return FENCE.sub("", page.read_text())


def overview():
    spec = importlib.util.spec_from_file_location("overview", ROOT / "scripts" / "overview.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page):
    """Return the anchors of the headings of a page."""
    for heading in re.findall(r"^#+ +(.+?) *#*$", prose(page), re.M):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)).strip().lower()
        yield words.replace(" ", "-")


@pytest.mark.parametrize(("page", "line", "options", "code"), list(blocks()))
def test_python_block(page, line, options, code, capsys):
    assert set(options) <= {"no-run"}, f"expected no option or no-run, got {options}"
    compiled = compile("\n" * (line - 1) + code, str(page), "exec", dont_inherit=True)
    if options:
        return
    if re.search(r"pytorch_lightning|bind_lightning", code):  # selects the package of Lightning for the whole process
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which readers would also see
        exec(compiled, {"__name__": "__main__"})
    # Functions and globals of the block are a reference cycle. What they hold, such as a DALI pipeline, is destroyed
    # here, and not in a process that a later test forks.
    gc.collect()


def test_links_have_targets():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            goal = (page.parent / file).resolve() if file else page
            if not goal.exists() or (anchor and anchor not in anchors(goal)):
                broken.append((name_of(page), target))
    assert broken == []


def figures(text):
    """Return the figures of each sentence that ends with links to benchmark pages, and the pages."""
    at, found = 0, []
    for link in re.finditer(r"\[([^\]]*)\]\(([^)\s]*benchmarks/[\w.-]+\.md)[^)]*\)", text):
        sentence = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "", text[at : link.start()]) + link[1]
        numbers = re.findall(r"(?<![\w.,/-])(\d+(?:\.\d+)?)(?![\w/-]|\.\d| x | %)", sentence)
        if found and not re.search(r"\w", text[at : link.start()]):
            found[-1][1].append(link[2])  # another page of the same sentence
        else:
            found.append(([number for number in numbers if "." in number or float(number) >= 10], [link[2]]))
        at = link.end()
    return found


def holds(page, figure):
    """Return whether a page has a figure: the same, in the next unit, or as the inverse ratio."""
    decimals = len(figure.partition(".")[2])
    numbers = map(float, re.findall(r"\d+(?:\.\d+)?", page.read_text()))
    return any(
        round(value, decimals) == float(figure) for n in numbers if n for value in (n, n / 1000, *[1 / n] * (n < 2))
    )


def test_figures_are_those_of_the_linked_results():
    absent = []
    for page in (page for page in PAGES if "benchmarks" not in page.parts):
        for paragraph in re.split(r"\n\s*\n|\n(?=[-#|])", prose(page)):
            for numbers, links in figures(paragraph):
                results = [(page.parent / link).resolve() for link in links]
                absent += [(name_of(page), n) for n in numbers if not any(holds(result, n) for result in results)]
    assert absent == []


def test_a_figure_missing_in_the_linked_page_is_detected():
    text = "Toy: 531 us, 1.5 ms and 1.7 times as fast ([overhead](../benchmarks/overhead_cpu-epyc-avx2_2026-11.md))."
    (((first, *others), (link,)),) = figures(text)
    page = (DOCS / "cards" / link).resolve()
    assert (first, others) == ("531", ["1.5", "1.7"])
    assert not holds(page, first)
    assert all(holds(page, number) for number in ("1516", *others))


def test_each_symptom_page_has_its_sections():
    pages = sorted((DOCS / "symptoms").glob("*.md"))
    assert len(pages) >= 8
    for page in pages:
        headings = re.findall(r"^## (.+)$", prose(page), re.M)
        own = [heading for heading in headings if heading != "What it brought"]  # figures that no card has
        assert own == ["How to see it", "What helps", "Limits"], name_of(page)
        assert f"(symptoms/{page.name})" in (DOCS / "symptoms.md").read_text()


def test_all_factors_of_the_chinese_readme_are_in_the_english_one():
    factors = [set(re.findall(r"\d+\.\d+", (ROOT / name).read_text())) for name in ("README.zh-CN.md", "README.md")]
    assert len(factors[0]) > 10
    assert factors[0] - factors[1] == set()


def test_texts_for_assistants_have_each_card_and_valid_links():
    full = overview().everything_for_assistants()
    assert [card.stem for card in CARDS if card.read_text().partition("\n# ")[2].partition("\n")[0] not in full] == []
    assert re.findall(r"\]\((?!https?:)[\w./]*\)", FENCE.sub("", full)) == []
    assert re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text())
    for path in re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text()):
        assert path == "llms-full.txt" or (DOCS / path).exists(), path
    # One sentence of each card.
    lines = (DOCS / "llms.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("- [") and "**" in line] == []


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_links_every_page_that_it_names(name):
    text = re.sub(r"\[[^\]]*\]\([^)]*\)", "", prose(ROOT / name))
    assert re.findall(r"[\w./-]+\.(?:md|txt)\b", text) == []


def test_the_version_stands_in_one_place_and_in_the_citation():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lightning_turbo.__version__"}
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert cited == lightning_turbo.__version__


def test_every_extra_that_is_named_exists():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for path in [*PAGES, *(ROOT / "lightning_turbo").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for extras in re.findall(
            r"pip install (?:-e )?['\"]?(?:lightning[-_]turbo|\.)\[([\w\-, ]+)\]", path.read_text()
        ):
            named.update(extra.strip() for extra in extras.split(","))
    named.update(extra for _, extra in lightning_turbo._optional.EXTRAS.values())
    assert named
    assert named - set(declared) == set()


def test_every_page_and_message_installs_the_package_from_the_same_source():
    files = [
        *PAGES,
        DOCS / "llms.txt",
        *(path for part in ("lightning_turbo", "examples") for path in (ROOT / part).rglob("*.py")),
    ]
    named = [
        (name_of(path), source)
        for path in files
        for source in re.findall(r"pip install ['\"]?(lightning[-_]turbo|\.(?=['\"`\s\[]))", path.read_text())
    ]
    assert {page for page, _ in named} >= {
        "README.md", "README.zh-CN.md", "docs/index.md", "docs/quick-start.md", "docs/llms.txt",
        "skills/lightning-turbo/SKILL.md",
    }  # fmt: skip
    assert [(page, source) for page, source in named if source != lightning_turbo._optional.SOURCE] == []


def test_every_command_that_is_named_exists(monkeypatch):
    parsers = []
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", lambda self, argv=None: parsers.append(self) or sys.exit(0)
    )
    with pytest.raises(SystemExit):
        cli.main([])
    (commands,) = (action.choices for action in parsers[0]._actions if isinstance(action.choices, dict))
    named = {
        (name_of(page), command)
        for page in PAGES
        for command in re.findall(r"(?:^|`)lightning-turbo ([a-z]\w*)", page.read_text(), re.M)
    }
    assert {command for _, command in named} >= {"tune", "doctor"}
    assert {(page, command) for page, command in named if command not in commands} == set()


def test_the_architecture_names_every_package_and_no_other():
    text = (DOCS / "architecture.md").read_text()
    packages = {path.parent.name for path in (ROOT / "lightning_turbo").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", text, re.M)) == packages
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
        assert (ROOT / name).exists() or (ROOT / "lightning_turbo" / name).exists(), name


def test_generated_pages_are_current_and_list_every_public_name():
    made = overview()
    texts = made.generated()
    assert {p.stem for p in texts if p.parent.name == "api"} - {"README"} == set(lightning_turbo.__all__)
    assert made.main(["--check"]) == 0, "run python scripts/overview.py"


def test_every_public_name_stands_in_a_card_or_a_guide():
    written = [page for page in PAGES if page.is_relative_to(DOCS) and page.parent.name not in ("api", "benchmarks")]
    text = "\n".join(page.read_text() for page in written)
    lacking = [name for name in lightning_turbo.__all__ if not re.search(rf"\b{name}\b", text)]
    assert lacking == [], "write a card in docs/cards, in the format of the others, or name it in a guide of docs"


def test_card_has_its_parts():
    made = overview()
    for card in CARDS:
        fields = made.front_matter(card)  # raises an error if a field is missing
        assert str(fields["name"]).strip()
        headings = re.findall(r"^(?:## +|\*\*)(.+)$", prose(card), re.M)
        lacking = [part for part in SECTIONS if not any(heading.startswith(part) for heading in headings)]
        assert lacking == [], name_of(card)


def test_tests_that_a_page_names_exist():
    named = {(name_of(page), path) for page in PAGES for path in re.findall(r"\btests/[\w/]+\.py", page.read_text())}
    assert [(page, path) for page, path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# no front matter\n", "expected front matter"),
        ("---\nname: x\n", "expected front matter"),
        ("---\n- a\n---\n", "expected fields"),
        ("---\nname: x\nclass: y\n---\n", "expected function, maths_unchanged"),
    ],
)
def test_a_card_with_missing_fields_is_refused(tmp_path, content, message):
    (tmp_path / "card.md").write_text(content)
    with pytest.raises(ValueError, match=message):
        overview().front_matter(tmp_path / "card.md")


def test_the_example_of_the_readme_runs(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(ROOT / "examples" / "add_apex_amp.py"), run_name="__main__")
    assert float(re.search(r"validation accuracy ([\d.]+)", capsys.readouterr().out)[1]) > 0.95
