"""Results as files and tables: JSON, Markdown, and the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from lightning_turbo._files import whole_file

__all__ = ["markdown_table", "print_lines", "print_table", "three_digits", "write_json"]


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


def print_lines(*lines: str, stream: TextIO | None = None) -> None:
    """Write lines to a stream; ``None`` takes standard output."""
    target = sys.stdout if stream is None else stream
    target.write("".join(f"{line}\n" for line in lines))
    target.flush()


def print_table(
    title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], stream: TextIO | None = None
) -> None:
    """Print a table in plain text; the first column and one called ``note`` are text, the others numbers.

    Args:
        title: Shown above the table.
        columns: Their names.
        lines: The cells of each line.
        stream: Where to write; ``None`` takes standard output.
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *lines, strict=True)]
    to_the_left = [number == 0 or column == "note" for number, column in enumerate(columns)]
    rule = ["-" * width for width in widths]
    rows = [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(cells, widths, to_the_left, strict=True)
        ).rstrip()
        for cells in (columns, rule, *lines)
    ]
    print_lines("", title, *rows, "", stream=stream)
