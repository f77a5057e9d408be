"""Results as JSON and Markdown, and lines for the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from lightning_turbo._files import whole_file

__all__ = ["markdown_table", "print_lines", "three_digits", "write_json"]


def three_digits(value: float) -> str:
    """Format a number with at least three digits and without an exponent."""
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{decimals}f}"


def write_json(results: Mapping[str, Any], path: Path) -> Path:
    """Write plain values to a file, completely or not at all.

    Args:
        results: The values.
        path: The file; its folder is created if missing.

    Returns:
        The path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        part.write_text(json.dumps(results, indent=1) + "\n")
    return path


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table with these column names and cells.

    The columns are aligned, so that the table is readable on a terminal too.
    """
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (columns, ["---"] * len(columns), *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells)
    return [f"| {' | '.join(line)} |" for line in padded]


def print_lines(*lines: str, stream: TextIO | None = None) -> None:
    """Write lines to a stream, with escapes for what its encoding lacks; ``None`` means standard output."""
    target = sys.stdout if stream is None else stream
    encoding = getattr(target, "encoding", None) or "utf-8"  # a replacement of sys.stdout may have none
    text = "".join(f"{line}\n" for line in lines)
    target.write(text.encode(encoding, "backslashreplace").decode(encoding))
    target.flush()
