"""What mkdocs is told beyond mkdocs.yml: pages that lie elsewhere, folders in the navigation, examples in docstrings."""

import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parent
WIDE = ("symptoms.md", "cards/README.md")  # their tables take the place of the table of contents
PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "from-plain-pytorch.md": "examples/from_plain_pytorch.md",
}


def on_config(config):
    """Lists every page of a folder behind the folder's README."""
    for entry in config.nav:
        for title, page in entry.items():
            if page.endswith("/README.md"):
                others = sorted(path for path in (DOCS / page).parent.glob("*.md") if path.name != "README.md")
                # The stored results have headings alike; their files' names tell them apart.
                entry[title] = [
                    page,
                    *({path.stem.replace("_", ", "): name} if "_" in path.stem else name
                      for path in others for name in [path.relative_to(DOCS).as_posix()]),
                ]  # fmt: skip
    return config


def on_files(files, config):
    """Adds the pages that are files outside of this folder."""
    for page, source in PAGES.items():
        text = re.sub(r"\]\((\.\./)?docs/", "](", (DOCS.parent / source).read_text())
        for other, name in PAGES.items():
            text = text.replace(f"]({name})", f"]({other})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, **_):
    """Shows a card's front matter below its title, and links each picture to itself, to be opened in full size.

    Links to files outside of this folder become links to their pages.
    """
    for other, source in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({other}")
    if page.file.src_uri in WIDE or page.file.src_uri.startswith("benchmarks/"):
        page.meta["hide"] = ["toc"]
    markdown = re.sub(r"^(!\[[^]]*\]\(([^)]+)\))$", r"[\1](\2)", markdown, flags=re.M)
    status = page.meta.pop("status", None)  # the theme would make an icon of it
    if status is None:
        return markdown
    words = {True: "yes", False: "no"}
    shown = [f"**{key}** {words.get(value, value)}" for key, value in page.meta.items() if key != "name"]
    title, _, rest = markdown.lstrip().partition("\n")
    return f"{title}\n\n{' · '.join([*shown, f'**status** {status}'])}\n\n{rest}"


class Examples(griffe.Extension):
    """Lets griffe know the section ``Example:``, which it calls ``Examples:``."""

    def on_object(self, *, obj, **_):
        """Renames the section of one docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
