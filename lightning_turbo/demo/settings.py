"""Settings of the demo, checked before slow imports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lightning_turbo._checks import expect, is_whole
from lightning_turbo.errors import TurboError

__all__ = ["DemoError", "DemoSettings"]

LEVELS = ("O0", "O1", "O2", "O3")
DATA = ("digits", "mni")
EPOCHS = {"digits": 10, "mni": 8}  # every level reaches its accuracy with a margin
MAX_SEED = 2**32 - 1  # the largest seed of numpy


class DemoError(TurboError, ValueError):
    """Error of a setting that the demo cannot use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """Settings of one run of the demo.

    ``None`` is the value of the resumed run, or the default for a new run.

    Args:
        levels: Levels to train, each at most once. Default: all of ``LEVELS``.
        epochs: Epochs per level, at least 1. Default: ``EPOCHS[data]``.
        data: ``"digits"`` (default) or ``"mni"``.
        device: ``"auto"`` (CUDA if available), ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.
        seed: Seed of the split, the initial weights and the order of the samples, from 0 to 2**32 - 1. Default: 0.
        out: Folder for all files; created if missing.
        resume: Continue from the checkpoints in ``out`` instead of starting again.

    Raises:
        TypeError: If ``epochs`` or ``seed`` is not an integer.
        DemoError: If a value is out of range.
    """

    levels: tuple[str, ...] | None = None
    epochs: int | None = None
    data: str | None = None
    device: str = "auto"
    seed: int | None = None
    out: Path = Path("runs/demo")
    resume: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.levels is not None:
            known = self.levels and set(self.levels) <= set(LEVELS) and len(set(self.levels)) == len(self.levels)
            hint = " (letter O, not zero)" if any(level.startswith("0") for level in self.levels) else ""
            expected = f"some of {', '.join(LEVELS)}{hint}, each at most once, with commas between them"
            expect(known, "levels", ",".join(self.levels), expected, DemoError)
        _check_integer("epochs", self.epochs, 1, 10**6)
        _check_integer("seed", self.seed, 0, MAX_SEED)
        expect(self.data in (None, *DATA), "data", self.data, " or ".join(DATA), DemoError)
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        expect(known, "device", self.device, "auto, cpu, cuda or cuda:<index>", DemoError)


def _check_integer(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None:
        expected = f"an integer from {low} to {high}"
        expect(is_whole(value, -(10**18)), name, value, expected, TypeError)
        expect(low <= value <= high, name, value, expected, DemoError)
