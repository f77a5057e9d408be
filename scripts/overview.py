"""Writes what is generated: the table of techniques from the cards, and a page for each public name of the package.

python scripts/overview.py            write the pages
python scripts/overview.py --check    only tell, by the exit status, whether they are up to date
"""

import inspect
import os
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CARDS = ROOT / "docs" / "cards"
API, SITE = ROOT / "docs" / "api" / "README.md", ROOT / "zensical.toml"
KEYS = ("name", "class", "function", "maths_unchanged", "needs")


def front_matter(path):
    """The fields between the two lines of dashes that open a card, spaces in their names made underscores."""
    head, _, rest = path.read_text().partition("\n")
    block, closing, _ = rest.partition("\n---\n")
    if head != "---" or not closing:
        raise ValueError(f"{path}: a card opens with front matter between two lines of three dashes.")
    fields = yaml.safe_load(block)
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: the front matter holds no fields.")
    fields = {str(key).replace(" ", "_").replace("-", "_"): value for key, value in fields.items()}
    missing = [key for key in KEYS if key not in fields]
    if missing:
        raise ValueError(f"{path}: the front matter lacks {', '.join(missing)}.")
    return fields


def cards():
    return sorted(path for path in CARDS.glob("*.md") if path.name != "README.md")


def table(page):
    """The table as ``page`` shows it, with links that start from there."""
    lines = ["| Technique | In the Trainer | In any loop | Maths unchanged |", "|---|---|---|---|"]
    for path in cards():
        fields = front_matter(path)
        link = f"[{fields['name']}]({Path(os.path.relpath(path, page.parent)).as_posix()})"
        cells = [link, _code(fields["class"]), _code(fields["function"]), _words(fields["maths_unchanged"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _code(value):
    text = _words(value)
    return text if text in ("", "-") or "`" in text else ", ".join(f"`{name.strip()}`" for name in text.split(", "))


def _words(value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "-"
    text = "-" if value is None else str(value).strip()
    return ("-" if text.lower() in ("none", "nothing", "") else text).replace("|", "\\|")


def public_names():
    """The table of the package: what the documentation calls them -> names."""
    sys.path.insert(0, str(ROOT))
    import lightning_turbo

    return {kind: list(names) for kind, names in lightning_turbo.PUBLIC.items()}


def reference(page):
    """A list for each kind of public names, with the first sentence of each docstring."""
    import lightning_turbo

    lines = []
    for kind, names in public_names().items():
        lines += [f"## {kind}", ""]
        for name in names:
            first = " ".join(inspect.getdoc(getattr(lightning_turbo, name)).partition("\n\n")[0].split())
            lines += [f"- [`{name}`]({name}.md): {first.replace('``', '`')}"]
        lines += [""]
    return "\n".join(lines).strip()


def navigation(page):
    """The pages of the API in the navigation of the site."""
    lines = ["  { API = [", '    "api/README.md",']
    for kind, names in public_names().items():
        lines += [f'    {{ "{kind}" = [', *(f'      {{ "{name}" = "api/{name}.md" }},' for name in names), "    ] },"]
    return "\n".join([*lines, "  ] },"])


# Page -> the word in the markers around its generated part, and what makes that part.
PARTS = {
    CARDS / "README.md": ("techniques", table),
    API: ("public names", reference),
    SITE: ("public names", navigation),
}


def generated():
    """Each generated file -> its text."""
    pages = {
        API.parent / f"{name}.md": f"::: lightning_turbo.{name}\n"
        for names in public_names().values()
        for name in names
    }
    return pages | {page: updated(page) for page in PARTS}


def updated(page):
    """The text of ``page`` with its generated part in its place."""
    word, make = PARTS[page]
    begin, end = f"<!-- {word}: made by scripts/overview.py -->", f"<!-- end of {word} -->"
    if page.suffix == ".toml":
        begin, end = (f"  # {mark[5:-4]}" for mark in (begin, end))
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page}: expected the markers {begin!r} and {end!r}.")
    return f"{before}{begin}\n{make(page)}\n{end}{after}"


def main(argv):
    texts = generated()
    old = set(API.parent.glob("*.md")) - set(texts)
    stale = [page for page, text in texts.items() if not page.exists() or page.read_text() != text] + sorted(old)
    if "--check" in argv:
        for page in stale:
            print(f"{page} is out of date: run python scripts/overview.py")
        return 1 if stale else 0
    for page in stale:
        page.unlink() if page in old else page.write_text(texts[page])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
