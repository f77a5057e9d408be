"""Messages, docstrings and pages use the words of PyTorch's documentation."""

import re
from pathlib import Path

import lightning_turbo

ROOT = Path(lightning_turbo.__file__).parents[1]
BANNED = {
    r"(?<!here )\bis no [a-z]+[;:,.]": "expected X, got Y; in a sentence: is not a",
    r"\baccepted (is|are)\b": "expected X, got Y",
    r"\b[Mm]end(s|ed|ing)?\b": "fix, repair",
    r"\banew\b": "again",
    r"\bset aside\b": "has no effect",
    r"\bprocess-wide generators?\b": "global RNG",
    r"\bwhat was given\b": "the argument",
}
FILES = sorted(
    path
    for pattern in (
        "lightning_turbo/**/*.py",
        "benchmarks/*.py",
        "examples/**/*.py",
        "docs/*.md",
        "docs/cards/*.md",
        "docs/symptoms/*.md",
        "*.md",
    )
    for path in ROOT.glob(pattern)
    if path.name != "changelog.md"
)


def test_no_private_words():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}; write: {better}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for phrase, better in BANNED.items()
        for match in re.finditer(phrase, line)
    ]
    assert found == []
