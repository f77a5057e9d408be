"""What the demo is asked to do, checked before anything heavy is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lightning_turbo.errors import TurboError

__all__ = ["DemoError", "DemoSettings"]

LEVELS = ("O0", "O1", "O2", "O3")
DATA = ("digits", "mni")
EPOCHS = {"digits": 10, "mni": 8}  # enough for every level to clear its accuracy floor, with a margin
MAX_SEED = 2**32 - 1  # the largest seed of numpy


class DemoError(TurboError, ValueError):
    """The demo cannot do what was asked; the message says what it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """One run of the demo.

    ``None`` means "not asked for": the value of the run that is resumed, else the default.

    Args:
        levels: Levels to train, in this order, without repetition; default all of ``LEVELS``.
        epochs: Passes over the training data per level, 1 or more; default ``EPOCHS[data]``.
        data: ``"digits"`` (default) or ``"mni"``.
        device: ``"auto"`` (CUDA if there is one), ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.
        seed: Seeds the split, the initial weights and the order of the samples, 0 to 2**32 - 1; default 0.
        out: Folder for everything that is written; made when missing.
        resume: Continue from the checkpoints in ``out`` instead of starting anew.

    Raises:
        TypeError: If ``epochs`` or ``seed`` is no integer.
        DemoError: If a value is outside the range above; the message names what is accepted.
    """

    levels: tuple[str, ...] | None = None
    epochs: int | None = None
    data: str | None = None
    device: str = "auto"
    seed: int | None = None
    out: Path = Path("runs/demo")
    resume: bool = False

    def __post_init__(self) -> None:
        """Refuse what the demo cannot do."""
        if self.levels is not None:
            unknown = [level for level in self.levels if level not in LEVELS]
            if unknown or not self.levels or len(set(self.levels)) != len(self.levels):
                hint = " (letter O, not zero)" if any(level.startswith("0") for level in unknown) else ""
                raise DemoError(
                    f"levels {','.join(self.levels)!r}: accepted are {', '.join(LEVELS)}{hint}, each at most once. "
                    "Write them with commas, for example O0,O2."
                )
        for name, low, high in (("epochs", 1, None), ("seed", 0, MAX_SEED)):
            value = getattr(self, name)
            if value is None:
                continue
            accepted = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} {value!r}: accepted is {accepted}. Pass one, or leave it out.")
            if value < low or (high is not None and value > high):
                raise DemoError(f"{name} {value!r}: accepted is {accepted}. Pass one, or leave it out.")
        if self.data is not None and self.data not in DATA:
            raise DemoError(f"data {self.data!r}: accepted are {' and '.join(DATA)}. Choose one, or leave it out.")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise DemoError(
                f"device {self.device!r}: accepted are auto, cpu, cuda and cuda:<index>. Choose one, or leave it out."
            )
