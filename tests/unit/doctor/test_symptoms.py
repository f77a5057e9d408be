"""The page of symptoms says what the rules say."""

from pathlib import Path

from lightning_turbo.doctor.rules import RULES
from lightning_turbo.doctor.rules.prose import BEGIN, END, as_markdown

PAGE = Path(__file__).parents[3] / "docs" / "symptoms.md"


def test_the_page_has_the_rules_in_prose():
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(BEGIN) : text.index(END) + len(END)]
    assert table == as_markdown(), "put as_markdown() between the two marks"


def test_every_rule_has_its_row():
    rows = [line for line in as_markdown().splitlines() if line.startswith("| ")]
    assert len(rows) == len(RULES) + 1
    assert all(row.count(" | ") == 4 for row in rows)


def test_every_card_that_a_rule_names_exists():
    missing = {rule.card for rule in RULES if not (PAGE.parent / "cards" / f"{rule.card}.md").exists()}
    assert missing == set()
