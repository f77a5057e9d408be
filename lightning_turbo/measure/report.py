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
    """Return the lines of a Markdown table, from the names of its columns and the cells of each line.

    Its columns stand below one another, so that it reads well in a terminal too.
    """
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (columns, ["---"] * len(columns), *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells)
    return [f"| {' | '.join(line)} |" for line in padded]


def print_lines(*lines: str, stream: TextIO | None = None) -> None:
    """Write lines to a stream, whatever letters that takes; ``None`` takes standard output."""
    target = sys.stdout if stream is None else stream
    encoding = getattr(target, "encoding", None) or "utf-8"  # an object in its place may have none
    text = "".join(f"{line}\n" for line in lines)
    target.write(text.encode(encoding, "backslashreplace").decode(encoding))
    target.flush()
