"""Settings of the demo, checked before slow imports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lightning_turbo._checks import expect, is_number, is_whole
from lightning_turbo.errors import TurboError

__all__ = ["DemoError", "DemoSettings"]

LEVELS = ("O0", "O1", "O2", "O3")
MAX_SEED = 2**32 - 1  # the largest seed of numpy


class DemoError(TurboError, ValueError):
    """Error of a setting that the demo cannot use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """Settings of one run of the demo.

    Args:
        levels: Levels to train on digits, each at most once.
        epochs: Epochs per level, at least 1. Every level reaches its accuracy in 10 with a margin.
        device: ``"auto"`` (CUDA if available), ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.
        seed: Seed of the split, the initial weights and the order of the samples, from 0 to 2**32 - 1.
        tune_seconds: Time for the search on the volumes; 0 leaves the second part out.
        out: Folder for all files; created if missing.

    Raises:
        TypeError: If a number has another type.
        DemoError: If a value is out of range.
    """

    levels: tuple[str, ...] = LEVELS
    epochs: int = 10
    device: str = "auto"
    seed: int = 0
    tune_seconds: float = 30.0
    out: Path = Path("runs/demo")

    def __post_init__(self) -> None:
        """Check the settings."""
        known = self.levels and set(self.levels) <= set(LEVELS) and len(set(self.levels)) == len(self.levels)
        hint = " (letter O, not zero)" if any(level.startswith("0") for level in self.levels) else ""
        expected = f"some of {', '.join(LEVELS)}{hint}, each at most once, with commas between them"
        expect(known, "levels", ",".join(self.levels), expected, DemoError)
        _check_integer("epochs", self.epochs, 1, 10**6)
        _check_integer("seed", self.seed, 0, MAX_SEED)
        expect(is_number(self.tune_seconds), "tune_seconds", self.tune_seconds, "a number from 0 on", TypeError)
        expect(0 <= self.tune_seconds < 1e9, "tune_seconds", self.tune_seconds, "a number from 0 on", DemoError)
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        expect(known, "device", self.device, "auto, cpu, cuda or cuda:<index>", DemoError)


def _check_integer(name: str, value: int, low: int, high: int) -> None:
    expected = f"an integer from {low} to {high}"
    expect(is_whole(value, -(10**18)), name, value, expected, TypeError)
    expect(low <= value <= high, name, value, expected, DemoError)
