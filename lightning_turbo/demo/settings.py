"""The demo's settings, checked before anything heavy is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lightning_turbo._checks import expect, is_whole
from lightning_turbo.errors import TurboError

__all__ = ["DemoError", "DemoSettings"]

LEVELS = ("O0", "O1", "O2", "O3")
DATA = ("digits", "mni")
EPOCHS = {"digits": 10, "mni": 8}  # enough for every level to clear its accuracy floor, with a margin
MAX_SEED = 2**32 - 1  # the largest seed of numpy


class DemoError(TurboError, ValueError):
    """The demo cannot run as asked; the message names the settings that it accepts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """One run of the demo.

    ``None`` means "not asked for": the value of the run that is resumed, else the default.

    Args:
        levels: Levels to train, without repetition; default all of ``LEVELS``.
        epochs: Passes over the training data per level, 1 or more; default ``EPOCHS[data]``.
        data: ``"digits"`` (default) or ``"mni"``.
        device: ``"auto"`` (CUDA if there is one), ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.
        seed: Seeds the split, the initial weights and the order of the samples, 0 to 2**32 - 1; default 0.
        out: Folder for everything that is written; made when missing.
        resume: Continue from the checkpoints in ``out`` instead of starting again.

    Raises:
        TypeError: If ``epochs`` or ``seed`` is not an integer.
        DemoError: If a value is outside the range above.
    """

    levels: tuple[str, ...] | None = None
    epochs: int | None = None
    data: str | None = None
    device: str = "auto"
    seed: int | None = None
    out: Path = Path("runs/demo")
    resume: bool = False

    def __post_init__(self) -> None:
        """Refuse settings that the demo does not know."""
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
