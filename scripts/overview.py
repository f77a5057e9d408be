"""Write the generated pages: the table of techniques, the API pages, the navigation, and llms.txt.

Also writes ``lightning_turbo/__init__.pyi``, the public names for type checkers.

python scripts/overview.py            write the pages
python scripts/overview.py --check    only check whether they are up to date; the exit status is 1 if not
python scripts/overview.py --full     write llms-full.txt, which is not in git, for the site and the skill
"""

import importlib
import inspect
import os
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CARDS = ROOT / "docs" / "cards"
STUB = ROOT / "lightning_turbo" / "__init__.pyi"
API, SITE = ROOT / "docs" / "api" / "README.md", ROOT / "zensical.toml"
AUGMENTATION = CARDS / "batch-augmentation.md"
SKILL = ROOT / "skills" / "lightning-turbo" / "SKILL.md"
FULL = (ROOT / "docs" / "llms-full.txt", SKILL.with_name("llms-full.txt"))
GUIDES = (
    "quick-start", "resume", "levels", "migration", "coming-from", "segmentation-monai",
    "scale-out", "ray-train", "from-plain-pytorch", "imagenet-apex-dali",
)  # fmt: skip
# Topic of benchmark pages -> first words of their file names, in the order of the navigation.
TOPICS = {
    "Loading": ("prefetch", "grid", "loaders", "dali", "loading", "getitem", "starts", "patches", "lengths"),
    "Augmentation": ("augment", "transforms"),
    "Computing": ("precision", "networks", "compiled", "overhead", "groups", "memory", "saves"),
    "Whole runs": ("projects", "promises", "tune", "ablation", "resume", "stops"),
}
# Modules that pages write in front of a function -> their location in the package.
MODULES = {name: name for name in ("amp", "amp.convert", "data", "nn", "optim")} | {"augment": "data.augment"}
# A search finds the card of a name, and not the pages of its arguments.
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
KEYS = ("name", "class", "function", "maths_unchanged")


def front_matter(path):
    """Return the front matter of a card as a dict, with underscores for spaces and dashes in the keys."""
    head, _, rest = path.read_text().partition("\n")
    block, closing, _ = rest.partition("\n---\n")
    if head != "---" or not closing:
        raise ValueError(f"{path}: expected front matter between two lines of three dashes at the start of the card.")
    fields = yaml.safe_load(block)
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: expected fields in the front matter, got none.")
    fields = {str(key).replace(" ", "_").replace("-", "_"): value for key, value in fields.items()}
    missing = [key for key in KEYS if key not in fields]
    if missing:
        raise ValueError(f"{path}: expected {', '.join(missing)} in the front matter. Add the missing fields.")
    return fields


def cards():
    """Return the paths of all cards."""
    return sorted(path for path in CARDS.glob("*.md") if path.name != "README.md")


def table(page):
    """Return the table of techniques, with links relative to ``page``."""
    lines = ["| Technique | Maths unchanged |", "|---|---|"]
    for path in cards():
        fields = front_matter(path)
        link = f"[{fields['name']}]({Path(os.path.relpath(path, page.parent)).as_posix()})"
        names = ", ".join(_code(fields[key]).replace("lightning_turbo.", "") for key in ("class", "function"))
        used = ", ".join(dict.fromkeys(name for name in names.split(", ") if name != "-"))
        lines.append(f"| {link}: {used} | {_words(fields['maths_unchanged'])} |")
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
    """Return the public names of the package by kind."""
    sys.path.insert(0, str(ROOT))
    import lightning_turbo

    return {kind: list(names) for kind, names in lightning_turbo.PUBLIC.items()}


def reference(page):
    """Return a list for each kind of public names, with the first paragraph of each docstring."""
    import lightning_turbo

    lines = []
    for kind, names in public_names().items():
        lines += [f"## {kind}", ""]
        for name in names:
            lines += [f"- [`{name}`]({name}.md): {first_paragraph(getattr(lightning_turbo, name))}"]
        lines += [""]
    return "\n".join(lines).strip()


def first_paragraph(named):
    """Return the first paragraph of a docstring on one line."""
    return " ".join(inspect.getdoc(named).partition("\n\n")[0].split()).replace("``", "`")


def transforms(page):
    """Return the table of batch transforms."""
    from lightning_turbo import augment

    lines = ["| Transform | What it does |", "|---|---|"]
    for name in augment.__all__:
        transform = getattr(augment, name)
        if transform.__module__.rpartition(".")[2] not in ("batch", "indexed"):
            lines.append(f"| `{name}` | {first_paragraph(transform)} |")
    return "\n".join(lines)


def navigation(page):
    """Return the benchmark pages and the API pages in the navigation of the site."""
    pages = [path for path in (ROOT / "docs" / "benchmarks").glob("*.md") if path.name != "README.md"]
    lines = ["  { Benchmarks = [", '    "benchmarks/README.md",']
    for topic, names in TOPICS.items():
        of_topic = sorted(
            (path for path in pages if _begin(path) in names), key=lambda path: (names.index(_begin(path)), path)
        )
        lines += [
            f"    {{ {topic!r} = [".replace("'", '"'),
            *(f'      "benchmarks/{path.name}",' for path in of_topic),
            "    ] },",
        ]
    if lacking := {_begin(path) for path in pages} - {name for names in TOPICS.values() for name in names}:
        raise ValueError(
            f"expected a topic for each benchmark page, got none for {sorted(lacking)}. Add them to TOPICS."
        )
    lines += ["  ] },", "  { API = [", '    "api/README.md",']
    for kind, names in public_names().items():
        lines += [f'    {{ "{kind}" = [', *(f'      {{ "{name}" = "api/{name}.md" }},' for name in names), "    ] },"]
    return "\n".join([*lines, "  ] },"])


def _begin(path):
    return path.name.partition("_")[0]


def advice(page):
    """Return a line for each card: its name, its file, and when to use it."""
    lines = []
    for path in cards():
        text = " ".join(path.read_text().split())
        use = re.search(r"\*\*Use when\*\* (.*?) (?=## |\| )", text)[1].replace("**", "")
        lines.append(f"- {front_matter(path)['name']} (`{path.name}`): use when {without_links(use)}")
    return "\n".join(lines)


def without_links(text):
    """Return the text without images, with links to pages of this site replaced by their text."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


def symptoms():
    """Return the paths of all symptom pages."""
    return sorted((ROOT / "docs" / "symptoms").glob("*.md"))


def summary():
    """Return the start of llms.txt: the first paragraph of the README, and how to use each technique."""
    first = " ".join((ROOT / "README.md").read_text().split("\n\n")[1].split())
    how = SKILL.read_text().partition("## How to use it\n")[2].partition("\n## ")[0]
    return f"# lightning-turbo\n\n> {first}\n\n{how.strip()}\n"


def index_for_assistants():
    """Return llms.txt: each page with one sentence. Paths are relative to docs/."""
    parts = [summary(), "Everything in one file: [llms-full.txt](llms-full.txt).\n", "## Techniques\n"]
    for path in cards():
        paragraph = re.search(r"\*\*What it does\.\*\* (.*?)(?:\n\n|$)", path.read_text(), re.DOTALL)[1]
        what = re.match(r".*?\.(?= [A-Z`]|$)", " ".join(paragraph.split()))[0]
        parts.append(f"- [{front_matter(path)['name']}](cards/{path.name}): {without_links(what)}")
    for title, pages in (("Symptoms", symptoms()), ("Guides", [ROOT / "docs" / f"{name}.md" for name in GUIDES])):
        parts.append(f"\n## {title}\n")
        for path in pages:
            heading = re.search(r"^# (.+)$", path.read_text(), re.M)[1]
            parts.append(f"- [{heading}]({path.relative_to(ROOT / 'docs').as_posix()})")
    return "\n".join(parts) + "\n"


def everything_for_assistants():
    """Return llms-full.txt: all cards, symptoms and guides, and the arguments of all public names."""
    texts = {path: updated(path) if path in PARTS else path.read_text() for path in cards()}
    parts = [summary()]
    for path in cards():
        fields = front_matter(path)
        trainer, loop = _code(fields["class"]), _code(fields["function"])
        used = f"In the Trainer: {trainer}. In any loop: {loop}. Maths unchanged: {_words(fields['maths_unchanged'])}."
        body = re.sub(r"<!--.*?-->\n", "", texts[path].partition("\n---\n")[2]).strip()
        parts.append(body.replace("\n", f"\n\n{used}\n", 1))
    parts += [path.read_text().strip() for path in symptoms()]
    parts += [(ROOT / "docs" / f"{name}.md").read_text().strip() for name in GUIDES]
    return without_links("\n\n".join([*parts, signatures()])) + "\n"


def signatures():
    """Return the arguments of each callable public name, then of each name in ``MODULES``, with their defaults."""
    import lightning_turbo

    named = {name: getattr(lightning_turbo, name) for names in public_names().values() for name in names}
    for module, place in MODULES.items():
        home = importlib.import_module(f"lightning_turbo.{place}")
        found = {f"{module}.{name}": getattr(home, name) for name in home.__all__}
        named |= {name: value for name, value in found.items() if value not in named.values()}
    calls = {name: value for name, value in named.items() if callable(value) and not name.endswith(("Error", "Report"))}
    lines = [f"- `{name}{arguments(value)}`" for name, value in calls.items()]
    return "\n".join(["# Arguments of every public name\n", *lines])


def arguments(function):
    """Return the signature of a function or class without annotations. Defaults that are functions appear by name."""
    given = inspect.signature(function).parameters.values()
    bare = inspect.Signature([argument.replace(annotation=inspect.Parameter.empty) for argument in given])
    return re.sub(r"<(?:built-in )?function (\w+).*?>", r"\1", str(bare))


# Page -> the name in the markers around its generated part, and the function that returns that part.
PARTS = {
    CARDS / "README.md": ("techniques", table),
    API: ("public names", reference),
    SITE: ("public names", navigation),
    SKILL: ("techniques", advice),
    AUGMENTATION: ("transforms", transforms),
}


def stub():
    """Return the public names as type checkers read them, which cannot follow the table of the package."""
    import lightning_turbo

    homes = {name: home for names in lightning_turbo.PUBLIC.values() for name, home in names.items()}
    places = []
    for name, home in homes.items():
        is_module = inspect.ismodule(getattr(lightning_turbo, name))
        places.append((f"lightning_turbo.{home}".rpartition(".")[0] if is_module else f"lightning_turbo.{home}", name))
    lines = [f"from {home} import {name} as {name}" for home, name in sorted(places)]
    return "\n".join(
        ["# Made by scripts/overview.py.", "", *lines, "", "__version__: str", "PUBLIC: dict[str, dict[str, str]]", ""]
    )


def generated():
    """Return the text of each generated file by its path."""
    pages = {
        API.parent / f"{name}.md": f"{UNSEARCHED}::: lightning_turbo.{name}\n"
        for names in public_names().values()
        for name in names
    }
    texts = {ROOT / "docs" / "llms.txt": index_for_assistants(), STUB: stub()}
    return pages | {page: updated(page) for page in PARTS} | texts


def updated(page):
    """Return the text of ``page`` with an updated generated part."""
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
    """Run the command and return its exit status."""
    if "--full" in argv:
        for page in FULL:
            page.write_text(everything_for_assistants())
        return 0
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
