"""Messages, docstrings and pages use the words of PyTorch's documentation, in American spelling."""

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
# British spellings, in lower case. Names of other packages are written as they are.
BRITISH = re.compile(
    r"behaviour|neighbour|colour|favour|\b(un)?labelled\b(?!=)|\b(centre|metre|millimetre|licence|grey)s?\b|"
    r"(normal|standard|initial|synchron|minim|maxim|optim|general|summar|recogn|parallel|random)is(e|ed|es|er|ing|ation)\b"
)
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


def place(path, text, match):
    return f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"


def test_no_private_words():
    found = [
        f"{place(path, text, match)}; write: {better}"
        for path in FILES
        for text in (path.read_text(),)
        for phrase, better in BANNED.items()
        for match in re.finditer(phrase, text)
    ]
    assert found == []


def test_spelling_is_american():
    others = [path for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py")]
    others += (ROOT / "docs" / "benchmarks").glob("*.md")
    found = [
        place(path, text, match)
        for path in {*FILES, *others} - {Path(__file__)}
        for text in (path.read_text().lower(),)
        for match in BRITISH.finditer(text)
    ]
    assert found == []
