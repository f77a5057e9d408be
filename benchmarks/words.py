"""Writes a text of random words to ``data/wikitext-2.txt``, where ``WikiText2`` of Lightning's demos reads it."""

import random
from itertools import accumulate
from pathlib import Path


def write(path: Path) -> None:
    """Write 12,000 lines of 25 words from a vocabulary of 5,000."""
    draw = random.Random(0)
    words = [f"w{number}" for number in range(5000)]
    weights = [*accumulate(1 / rank for rank in range(1, 5001))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(" ".join(draw.choices(words, cum_weights=weights, k=25)) for _ in range(12_000)) + "\n")


if __name__ == "__main__":
    write(Path("data/wikitext-2.txt"))
