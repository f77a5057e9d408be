"""Results as files and tables: JSON, Markdown, and the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_turbo._files import whole_file

__all__ = ["console_for", "markdown_table", "print_table", "three_digits", "write_json"]


def three_digits(value: float) -> str:
    """Write a number with at least three digits and without an exponent."""
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{decimals}f}"


def write_json(results: Mapping[str, Any], path: Path) -> Path:
    """Write a file of plain values, whole or not at all.

    Args:
        results: What to write.
        path: Where to; its folder is made if missing.

    Returns:
        The path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        part.write_text(json.dumps(results, indent=1) + "\n")
    return path


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, from the names of its columns and the cells of each line."""
    cells = [columns, ["---"] * len(columns), *lines]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells]


def console_for(console: Any = None) -> Any:
    """Return the console passed, or one on standard output, wide enough for tables outside of a terminal."""
    from rich.console import Console

    console = console or Console()
    return console if console.is_terminal else Console(file=console.file, width=160)


def print_table(console: Any, title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column and one called ``note`` are text, the others numbers.

    Args:
        console: A rich console.
        title: Shown above the table.
        columns: Their names.
        lines: The cells of each line.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column == "note" else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(escape, line))
    console.print(table)
